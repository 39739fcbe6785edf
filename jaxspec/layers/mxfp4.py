"""MXFP4 weights: blocks of 32 4-bit floats that share a power of two.

The format is that of OCP microscaling formats 1.0, as gpt-oss ships it. Every value is exact in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jax.typing import DTypeLike

BLOCK = 32
VALUES = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    -0.0,
    -0.5,
    -1.0,
    -1.5,
    -2.0,
    -3.0,
    -4.0,
    -6.0,
)  # by code: sign, 2 exponent, 1 mantissa


@struct.dataclass
class Mxfp4Weight:
    """A matrix in MXFP4, which a program dequantises where a product reads it.

    blocks: uint8 [..., out, in / 32, 16], two codes a byte, the low nibble first
    scales: uint8 [..., out, in / 32], the exponent of the power of two, biased by 127
    """

    blocks: jax.Array
    scales: jax.Array

    def to_array(self, dtype: DTypeLike) -> jax.Array:
        """Return the matrix as [..., in, out] in dtype.

        The result is exact for scales from 2 to 254. Below 2, values under 2 ** -126 count as 0.
        A scale of 255 is NaN.
        """
        codes = jnp.stack([self.blocks & 0xF, self.blocks >> 4], axis=-1)
        codes = codes.reshape(*self.scales.shape, BLOCK)
        power = lax.bitcast_convert_type(self.scales.astype(jnp.uint32) << 23, jnp.float32)
        values = jnp.asarray(VALUES, jnp.float32)[codes] * power[..., None]
        values = values.reshape(*self.scales.shape[:-1], -1)
        return jnp.swapaxes(values, -1, -2).astype(dtype)


def dequantise_on_host(blocks_and_scales: Sequence[np.ndarray]) -> np.ndarray:
    """Return (blocks, scales) of Mxfp4Weight as float32 [..., in, out], at loading."""
    blocks, scales = blocks_and_scales
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    values = np.ldexp(np.array(VALUES, np.float32)[codes], scales[..., None].astype(np.int32) - 127)
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
