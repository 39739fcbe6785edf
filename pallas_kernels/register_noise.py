"""Gumbel noise that is made in a kernel's registers.

The bits are those that XLA makes of noise.gumbel, in a kernel of any accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import math

from pallas_kernels import noise
from pallas_kernels.hopper import interpreting

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout


def gumbel(layout: Layout, key: noise.Key, token_ids: jax.Array) -> jax.Array:
    """Run noise.gumbel in a kernel. layout: of token_ids, int32."""
    if interpreting():
        return noise.gumbel(key, token_ids)
    return noise.gumbel(
        key,
        token_ids,
        partial(_libdevice, layout, math.log),
        partial(_libdevice, layout, math.log1p),
    )


def noisy(logits: jax.Array, temperature: jax.Array, gumbel: jax.Array) -> jax.Array:
    """Return logits / temperature + gumbel in a kernel; a quotient of NaN counts as -inf."""
    # As in XLA's kernel, nothing fuses the quotient with the sum.
    scaled = logits / temperature
    return jnp.where(scaled == scaled, scaled, -jnp.inf) + gumbel


def _libdevice(layout: Layout, function: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    """Apply XLA's own logarithms.

    Pallas has no rule for log1p, and its log differs where a kernel approximates.
    """

    @plgpu.inline_mgpu(
        arg_types=(layout,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout),
    )
    def call(_: Any, values: Any) -> Any:
        return values.foreach(lambda value, _: function(value), create_array=True)

    each: Any = call
    return each(x)
