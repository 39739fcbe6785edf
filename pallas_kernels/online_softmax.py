"""Softmax over keys that arrive tile by tile (Milakov & Gimelshein, 2018, arXiv:1805.02867)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

# The maximum over no keys: finite, so that no difference of two is NaN.
NEVER = -1e30
LOG2E = math.log2(math.e)

# (values, maximum in powers of two, sum); of several queries, with one maximum and sum for each.
State: TypeAlias = tuple[jax.Array, jax.Array, jax.Array]
Spread: TypeAlias = Callable[[jax.Array], jax.Array]  # a number for each query, to its values


def where(condition: jax.Array, x: jax.Array, y: jax.Array | float) -> jax.Array:
    """Return jnp.where with operands broadcast to x's shape, which Mosaic needs."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, jnp.full(x.shape, y, x.dtype))


def merge(left: State, right: State, spread: Spread = lambda x: x) -> State:
    """Return the softmax over the keys of two neighbours."""
    (values, top, total), (values_r, top_r, total_r) = left, right
    new = jnp.maximum(top, top_r)
    a, b = jnp.exp2(top - new), jnp.exp2(top_r - new)
    return values * spread(a) + values_r * spread(b), new, total * a + total_r * b


def normalise(state: State, sink: jax.Array | None, spread: Spread = lambda x: x) -> jax.Array:
    """Return the weighted mean. A sink is one more logit, whose value is zero."""
    values, top, total = state
    if sink is not None:
        sink = sink * LOG2E
        new = jnp.maximum(top, sink)
        a = jnp.exp2(top - new)
        values, total = values * spread(a), total * a + jnp.exp2(sink - new)
    return values * spread(1.0 / where(total > 0.0, total, 1.0))


def await_inputs(interpreted: bool) -> None:
    """Launch the next kernel early, then wait for the kernels before this one (PDL).

    For kernels that read nothing before the wait.
    """
    if not interpreted:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
