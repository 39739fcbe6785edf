"""What the attention kernels share: softmax over keys that come tile by tile (Milakov & Gimelshein, 2018, arXiv:1805.02867)."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

NEVER = (
    -1e30
)  # the maximum of a row that has seen nothing: finite, so that no difference of two is NaN
LOG2E = math.log2(math.e)


def load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  # jax 0.10 wanted an index


def where(condition: jax.Array, x: jax.Array, y: jax.Array | float) -> jax.Array:
    """jnp.where with numbers spread to x's shape, which Mosaic wants spelled out."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, jnp.full(x.shape, y, x.dtype))


def merge(left: tuple, right: tuple, spread=lambda x: x) -> tuple:
    """Two softmaxes over neighbouring keys (values, maximum in powers of two, sum) as one; `spread` widens a number a row to its values."""
    (values, top, total), (values_r, top_r, total_r) = left, right
    new = jnp.maximum(top, top_r)
    a, b = jnp.exp2(top - new), jnp.exp2(top_r - new)
    return values * spread(a) + values_r * spread(b), new, total * a + total_r * b


def normalise(state: tuple, sink: jax.Array | None, spread=lambda x: x) -> jax.Array:
    """The weighted mean; a sink is one more logit whose value is zero."""
    values, top, total = state
    if sink is not None:
        sink = sink * LOG2E
        new = jnp.maximum(top, sink)
        a = jnp.exp2(top - new)
        values, total = values * spread(a), total * a + jnp.exp2(sink - new)
    return values * spread(1.0 / where(total > 0.0, total, 1.0))


def await_inputs(interpreted: bool) -> None:
    """Let the next kernel's CTAs come, then wait for what the kernels before this one write: here, everything that it reads."""
    if not interpreted:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
