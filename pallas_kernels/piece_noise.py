"""Gumbel noise of a piece of a row, made in a kernel's registers.

The bits are those that XLA makes of noise.gumbel, in a kernel of any accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import math

from pallas_kernels import noise
from pallas_kernels.hopper import interpreting
from pallas_kernels.pieces import Pieces


def gumbel(pieces: Pieces, key: noise.Key, token_ids: jax.Array) -> jax.Array:
    """Run noise.gumbel in a kernel; token_ids: int32 [pieces.size]."""
    if interpreting():
        return noise.gumbel(key, token_ids)
    return noise.gumbel(
        key,
        token_ids,
        partial(_libdevice, pieces, math.log),
        partial(_libdevice, pieces, math.log1p),
    )


def _libdevice(pieces: Pieces, function: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    """Apply XLA's own logarithms.

    Pallas has no rule for log1p, and its log differs where a kernel approximates.
    """

    @plgpu.inline_mgpu(
        arg_types=(pieces.layout,),
        return_type=plgpu.ShapeDtypeStruct((pieces.size,), jnp.float32, layout=pieces.layout),
    )
    def call(_: Any, values: Any) -> Any:
        return values.foreach(lambda value, _: function(value), create_array=True)

    each: Any = call
    return each(x)
