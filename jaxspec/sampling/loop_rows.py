"""The results of a loop's steps, a row each, which kernels write.

XLA writes a contiguous row by a copy to an address that depends on the step, on a stream of its
own. In a program of CUDA graphs the host, which computes the address, updates a whole graph in each
step. After such copies a GPU may start every kernel of the process 0.6 us later
(docs/notes/copies-on-streams.md). A select makes the write a kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")


def with_row(i: jax.Array | int, results: jax.Array, new: jax.Array) -> jax.Array:
    """Return results [rows, ...] with row i replaced."""
    is_own = jnp.arange(results.shape[0], dtype=jnp.int32) == i
    return jnp.where(is_own.reshape(-1, *(1,) * new.ndim), new, results)


def map_rows(function: Callable[[Any], T], rows: Any) -> T:
    """Return function(row) of each row of a pytree of arrays [rows, ...], as lax.map does.

    Each step selects over all results, so these should be small beside what a step computes.
    """
    count = jax.tree.leaves(rows)[0].shape[0]

    def run(i: jax.Array | int) -> T:
        return function(
            jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), rows)
        )

    def step(i: jax.Array, results: Any) -> Any:
        return jax.tree.map(partial(with_row, i), results, run(i))

    shapes = jax.eval_shape(run, 0)
    results = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
    found: T = lax.fori_loop(0, count, step, results)
    return found
