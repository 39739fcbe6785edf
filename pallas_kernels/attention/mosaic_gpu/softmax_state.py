"""The softmax over some keys, in a warpgroup's registers: values [head_dim, columns], and of each column the maximum and the sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.mosaic_gpu.plan import Plan
from pallas_kernels.online_softmax import NEVER, merge

MATRIX = plgpu.Layout.WGMMA
BY_COLUMN = MATRIX.reduce(0)  # of what has one number a column

State = tuple[jax.Array, jax.Array, jax.Array]


def splat(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A number a column [columns], in every row of a shape [rows, columns]."""
    return lax.broadcast_in_dim(x, shape, [1])


def nothing(plan: Plan) -> State:
    """Over no keys."""
    return (
        splat(plan.tall, 0.0, MATRIX),
        splat((plan.columns,), NEVER, BY_COLUMN),
        splat((plan.columns,), 0.0, BY_COLUMN),
    )


def join(left: State, right: State) -> State:
    """Two over neighbouring keys as one."""
    return merge(left, right, lambda x: spread(x, left[0].shape))
