"""Matrices in int4, in the order in which the kernel's threads read them.

Weights are (code - zero) * scale: a code of 0 to 15, and a zero and a scale for a group of depths
of one output column. GPTQ, AWQ and compressed-tensors (pack-quantized) all store this.

A unit is 16 columns of 64 depths in 128 words: four words for each lane of a warp. A word holds a
lane's eight weights of a fragment of 16 x 16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"). Word
j of lane 4 * g + t has the depths from 16 * j on, in four registers of two depths. Register
2 * k + h holds column g + 8 * h and the depths 8 * k + 2 * t and the next. The first depth of
register i has bits 4 * i to 4 * i + 3 of the word, the second one the bits 16 higher.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

DEPTHS = 64  # of a unit
COLUMNS = 16  # of a unit
UNIT = 128  # words
ZERO = 8  # of a weight without zeros


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int4Weight:
    """A matrix in int4. In a parameter table, its arrays are ParamSpecs.

    words:  int32 [..., out / 16, in / 64, 128], units of codes
    scales: floating point [..., in / group, out]
    zeros:  uint8 [..., in / group, out], at most 128; None if each is 8
    """

    words: jax.Array
    scales: jax.Array
    zeros: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [..., in, out]."""
        *outer, columns, depths, _ = self.words.shape
        return (*outer, depths * DEPTHS, columns * COLUMNS)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the words."""
        return jnp.dtype(jnp.int32)

    @property
    def depth(self) -> int:
        """Size of `in`."""
        return self.shape[-2]

    @property
    def group(self) -> int:
        """Depths that share a scale."""
        return self.depth // self.scales.shape[-2]

    def check_scales(self, prefix: str = "") -> None:
        """Raise ValueError for scales or zeros that do not fit. prefix: of the message."""
        *outer, depth, width = self.shape
        scales, zeros = self.scales.shape, None if self.zeros is None else self.zeros.shape
        groups = scales[-2] if len(scales) == len(outer) + 2 else 0
        if not groups or depth % groups or scales != (*outer, groups, width):
            expected = ", ".join(map(str, (*outer, f"groups that divide {depth}", width)))
            raise ValueError(f"{prefix}scales: expected [{expected}], got {scales}")
        if zeros is not None and zeros != scales:
            raise ValueError(f"{prefix}zeros: expected {scales}, got {zeros}")

    def codes(self) -> jax.Array:
        """Return the codes, uint8 [..., in, out]."""
        words = lax.bitcast_convert_type(self.words, jnp.uint32)
        *outer, columns, depths, _ = words.shape
        words = words.reshape(*outer, columns, depths, 8, 4, 4)  # [..., g, t, j]
        nibbles = jnp.stack([(words >> (4 * i)) & 15 for i in range(8)], axis=-1)
        # [..., columns, depths, g, t, j, depth of the pair, k, h]
        nibbles = nibbles.astype(jnp.uint8).reshape(*outer, columns, depths, 8, 4, 4, 2, 2, 2)
        rank = len(outer)
        c, d, g, t, j, pair, k, h = range(rank, rank + 8)
        return nibbles.transpose(*range(rank), d, j, k, t, pair, c, h, g).reshape(self.shape)

    def to_array(self, dtype: DTypeLike) -> jax.Array:
        """Return the matrix [..., in, out], rounded to dtype."""
        groups = self.scales.shape[-2]
        codes = self.codes().astype(jnp.float32)
        codes = codes.reshape(*codes.shape[:-2], groups, self.group, codes.shape[-1])
        zeros = ZERO if self.zeros is None else self.zeros.astype(jnp.float32)[..., None, :]
        values = (codes - zeros) * self.scales.astype(jnp.float32)[..., None, :]
        return values.reshape(self.shape).astype(dtype)


def pack(codes: np.ndarray) -> np.ndarray:
    """Return the units of codes, uint8 [..., out, in] of 0 to 15."""
    *outer, width, depth = codes.shape
    if width % COLUMNS or depth % DEPTHS:
        expected = f"multiples of {COLUMNS} and {DEPTHS}"
        raise ValueError(f"codes: expected {expected} for width and depth, got {width} x {depth}")
    columns, depths = width // COLUMNS, depth // DEPTHS
    # [..., columns, h, g, depths, j, k, t, depth of the pair]
    parts = codes.reshape(*outer, columns, 2, 8, depths, 4, 2, 4, 2)
    words = np.zeros((*outer, columns, depths, 8, 4, 4), np.uint32)
    for k in range(2):
        for h in range(2):
            for pair in range(2):
                few = parts[..., :, h, :, :, :, k, :, pair]  # [..., columns, g, depths, j, t]
                few = np.moveaxis(few, (-3, -4, -1), (-4, -3, -2)).astype(np.uint32)
                words |= few << np.uint32(16 * pair + 4 * (2 * k + h))
    return words.reshape(*outer, columns, depths, UNIT).view(np.int32)
