"""MXFP4 experts of a checkpoint: packed for the kernel, or dequantised.

A checkpoint (gpt-oss) stores a matrix of each expert as `blocks` and `scales`:

blocks: uint8 [..., out, in / 32, 16], two codes a byte, the low nibble first
scales: uint8 [..., out, in / 32], the exponent of the power of two, biased by 127; 255 is NaN
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import jax
import numpy as np
from jax.typing import DTypeLike

from jaxspec.config import ConfigError
from jaxspec.layers.params import AssembledSpec
from pallas_kernels.moe.mxfp4 import (
    BLOCK,
    COLUMNS,
    LARGEST_NARROW,
    NAN,
    UNIT,
    Mxfp4Weight,
    pack,
    random_weight,
    scales_of,
)

__all__ = [
    "BLOCK",
    "LARGEST_NARROW",
    "NAN",
    "VALUES",
    "Mxfp4Spec",
    "Mxfp4Weight",
    "dequantise",
    "packed_weight",
]

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


@dataclass(frozen=True)
class Mxfp4Spec(AssembledSpec):
    """The units of packed matrices, int32 [experts, out / 16, in / 32, 68].

    WEIGHTS: weights in a unit, 32 of depth by 16 columns
    WORDS:   int32 words in a unit: its codes and scales
    """

    WEIGHTS: ClassVar[int] = BLOCK * COLUMNS
    WORDS: ClassVar[int] = UNIT

    dtype: str | None = "int32"

    def scales(self, units: np.ndarray) -> np.ndarray:
        """Return the scales of units, uint8 [experts, out / 16, in / 32, 16]."""
        return scales_of(units)

    def draw(self, key: jax.Array, dtype: DTypeLike, scale: float | None) -> jax.Array:
        """Return all codes, and scales that give weights of about 1/8."""
        *experts, columns, blocks, _ = self.shape
        shape = (*experts, blocks * BLOCK, columns * COLUMNS)
        return random_weight(key, shape, exponent=-4).units


def packed_weight(
    name: str,
    shape: tuple[int, int, int],
    axes: tuple[str | None, str | None, str | None],
    *,
    side_by_side: int = 1,
    order: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Mxfp4Weight:
    """Return the entry of a packed matrix of experts in a parameter table.

    shape, axes: of the matrix, [experts, in, out]
    order: sorts blocks and scales along `out`, their second axis
    """
    count, depth, width = shape

    def build(arrays: Sequence[np.ndarray]) -> np.ndarray:
        check_bytes(name, arrays)
        blocks, scales = map(order, arrays) if order else arrays
        return pack(blocks, scales)

    spec = Mxfp4Spec(
        name,
        (count, width // COLUMNS, depth // BLOCK, UNIT),
        (axes[0], axes[2], axes[1], None),
        side_by_side=side_by_side,
        sources=sources(name, shape),
        build=build,
    )
    return Mxfp4Weight(cast(Any, spec), wide=False)  # check_weight refuses others


def sources(
    name: str, shape: tuple[int, int, int]
) -> tuple[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...]]]:
    """Return names and shapes of the tensors of a matrix [experts, in, out]: blocks, scales.

    ConfigError for a matrix whose depth is not a whole number of blocks.
    """
    count, depth, width = shape
    if depth % BLOCK:
        raise ConfigError(
            f"{name}: expected columns in multiples of {BLOCK} for MXFP4, got {depth}"
        )
    scales = (count, width, depth // BLOCK)
    return (f"{name}_blocks", (*scales, BLOCK // 2)), (f"{name}_scales", scales)


def check_bytes(name: str, arrays: Sequence[np.ndarray]) -> None:
    """Raise ConfigError unless blocks and scales are bytes, and all scales are numbers."""
    if any(array.dtype != np.uint8 for array in arrays):
        got = " and ".join(array.dtype.name for array in arrays)
        raise ConfigError(f"{name}: expected uint8 blocks and scales, got {got}")
    if (arrays[1] == NAN).any():
        raise ConfigError(f"{name}_scales: expected scales that are numbers, got NaN ({NAN})")


def dequantise(blocks_and_scales: Sequence[np.ndarray]) -> np.ndarray:
    """Return blocks and scales as float32 [..., in, out]. A scale of 255 gives NaN."""
    blocks, scales = blocks_and_scales
    codes = np.stack([blocks & 0xF, blocks >> 4], axis=-1).reshape(*scales.shape, BLOCK)
    values = np.array(VALUES, np.float32)[codes]
    with np.errstate(over="ignore"):  # the caller refuses infinite weights
        values = np.ldexp(values, scales[..., None].astype(np.int32) - 127)
    values = np.where(scales[..., None] == NAN, np.float32(np.nan), values)
    return values.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)
