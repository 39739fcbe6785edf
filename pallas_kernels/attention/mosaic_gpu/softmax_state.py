"""The softmax over some keys, in a warpgroup's registers.

Its state is values [head_dim, columns], and the maximum and the sum of each column.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu.plan import Plan
from pallas_kernels.online_softmax import NEVER, State, merge

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout

MATRIX = plgpu.Layout.WGMMA
BY_COLUMN = MATRIX.reduce(0)  # of arrays with one number for each column


def splat(shape: tuple[int, ...], value: float, layout: Layout) -> jax.Array:
    """Return an array of one float32 value."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return [rows, columns] whose rows are all x [columns]."""
    return lax.broadcast_in_dim(x, shape, [1])


def nothing(plan: Plan) -> State:
    """Return the state over no keys."""
    return (
        splat(plan.tall, 0.0, MATRIX),
        splat((plan.columns,), NEVER, BY_COLUMN),
        splat((plan.columns,), 0.0, BY_COLUMN),
    )


def join(left: State, right: State) -> State:
    """Return the state over the keys of two neighbours."""
    return merge(left, right, lambda x: spread(x, left[0].shape))
