"""The results of a loop's steps, a row each, which kernels write.

XLA writes a contiguous row by a copy to an address that depends on the step, on a stream of its
own. In a program of CUDA graphs the host, which computes the address, updates a whole graph in each
step. After such copies a GPU may start every kernel of the process 0.6 us later
(docs/notes/copies-on-streams.md). A select makes the write a kernel.

Loops whose programs show copies on streams use these functions; tests/aot counts such copies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")
C = TypeVar("C")


def with_row(i: jax.Array | int, results: jax.Array, new: jax.Array) -> jax.Array:
    """Return results [rows, ...] with row i replaced."""
    is_own = jnp.arange(results.shape[0], dtype=jnp.int32) == i
    return jnp.where(is_own.reshape(-1, *(1,) * new.ndim), new, results)


def scan_rows(step: Callable[[Any, C], tuple[T, C]], carry: C, count: int) -> tuple[T, C]:
    """Return the results [count, ...] of all steps, and the last carry.

    step: of (i, carry), returns the result and the next carry

    Results come before the carry, as in the functions of a round; lax.scan has the other order.

    Each step selects over all results, so these should be small beside what a step computes.
    """

    def write(i: jax.Array, last: tuple[T, C]) -> tuple[T, C]:
        row, carry = step(i, last[1])
        return jax.tree.map(partial(with_row, i), last[0], row), carry

    shapes, _ = jax.eval_shape(step, jnp.int32(0), carry)
    rows = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
    found: tuple[T, C] = lax.fori_loop(0, count, write, (rows, carry))
    return found


def map_rows(function: Callable[[Any], T], rows: Any) -> T:
    """Return function(row) of each row of a pytree of arrays [rows, ...], as lax.map does.

    A slice that only a library's product reads would be such a copy too. "fill" adds a select, and
    so a kernel reads the row.
    """

    def step(i: jax.Array, _: None) -> tuple[T, None]:
        own = jax.tree.map(lambda x: jnp.take(x, i[None], axis=0, mode="fill")[0], rows)
        return function(own), None

    return scan_rows(step, None, jax.tree.leaves(rows)[0].shape[0])[0]
