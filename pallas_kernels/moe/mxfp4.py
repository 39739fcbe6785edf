"""Experts in MXFP4, in the order in which the kernel's threads read them.

MXFP4 (OCP microscaling formats 1.0) has blocks of 32 codes along the depth that share a power of
two. A code is e2m1: a sign, two bits of exponent, one of mantissa. Every weight is exact in
bfloat16.

A unit is 16 columns of 32 depths in 68 words: two words for each lane of a warp, then 16 bytes of
scales. A lane's words hold the 16 weights of its fragment of wgmma's operand A (PTX ISA, "Register
Fragments for wgmma.mma_async.m64nNk16"). Lane 4 * g + t has eight registers of two depths each.
Register 4 * j + 2 * k + h holds column g + 8 * h and the depths from 16 * j + 8 * k + 2 * t on.

The four bits of a code are those of its bfloat16 number times 2 ** -126: the sign, the last two
bits of the exponent, and the first of the mantissa (KEPT). The other bits of a word belong to other
registers, which a rotation brings into the same places. Each word has three registers. The places
that both words leave make up two more, so every bit is part of a code.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.types import STATIC

BLOCK = 32  # depths that share a scale
COLUMNS = 16  # of a unit
CODE_WORDS = 64
UNIT = CODE_WORDS + COLUMNS // 4  # words
KEPT = np.uint32(0x81C081C0)
# Right rotations of the first word, of the second, and of the places that both leave.
ROTATIONS = ((0, 6, 28), (4, 26, 30), (2, 8))
LEFT = np.uint32(0x06030603)  # the first word's bits of the last two; the second's are others
NAN = 255  # the scale that stands for NaN
# A scale of up to 128 takes one product, with 2 ** 126 times the power of two. A larger one
# overflows, and takes a product with NORMALISE (2 ** 126, twice) before.
LARGEST_NARROW = 128
NORMALISE = 0x7E807E80
SPREAD = 0x00800080  # times a scale: the exponents of two bfloat16 numbers

Word = Any  # an array of uint32, or a word of the kernel


def registers(
    first: Word,
    second: Word,
    *,
    rotate: Callable[[Word, int], Word],
    blend: Callable[[Word, Word], Word],
) -> list[Word]:
    """Return the eight registers of a lane's words, bfloat16 pairs times 2 ** -126.

    rotate: rotates a word to the right by a number of bits
    blend:  takes the bits of LEFT from the first word, the others from the second
    """
    words = (first, second, blend(first, second))
    return [
        (rotate(word, bits) if bits else word) & KEPT
        for word, rotations in zip(words, ROTATIONS, strict=True)
        for bits in rotations
    ]


def power_words(wide: bool) -> tuple[int, int]:
    """Return (least, more): a scale's power of two, twice in a word, from SPREAD times the scale.

    It is the larger of the product and `least`, or else the product plus `more`.
    """
    return (0x00400040, 0) if wide else (0, 0x3F003F00)  # 2 ** -127 is subnormal


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Mxfp4Weight:
    """Matrices of experts in MXFP4. In a parameter table, `units` is a ParamSpec.

    units: int32 [..., out / 16, in / 32, 68]
    wide:  static; some scale may be more than LARGEST_NARROW, which costs the kernel a second
           product for each pair of weights
    """

    units: jax.Array
    wide: bool = field(metadata=STATIC)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices, [..., in, out]."""
        *experts, columns, blocks, _ = self.units.shape
        return (*experts, blocks * BLOCK, columns * COLUMNS)

    @property
    def dtype(self) -> jnp.dtype:
        """The narrowest dtype that holds every weight."""
        return jnp.dtype(jnp.bfloat16)

    def to_array(self, dtype: DTypeLike) -> jax.Array:
        """Return the matrices as [..., in, out], exact in bfloat16 and float32."""
        units = lax.bitcast_convert_type(self.units, jnp.uint32)
        *outer, _ = units.shape
        words = units[..., :CODE_WORDS].reshape(*outer, 8, 4, 2)
        pairs = jnp.stack(
            registers(words[..., 0], words[..., 1], rotate=_rotated, blend=_blended), axis=-1
        )
        # [..., out / 16, in / 32, g, t, j, k, h, depth of the pair]
        halves = jnp.stack([pairs & 0xFFFF, pairs >> 16], axis=-1).reshape(*outer, 8, 4, 2, 2, 2, 2)
        scales = lax.bitcast_convert_type(units[..., CODE_WORDS:], jnp.uint8)
        scales = scales.reshape(*outer, 8, 1, 1, 1, 2, 1).astype(jnp.int32)
        values = _times_power_of_two(halves, scales)
        rank = len(outer) - 2
        columns, blocks, g, t, j, k, h, depth = range(rank, rank + 8)
        values = values.transpose(*range(rank), blocks, j, k, t, depth, columns, h, g)
        return values.reshape(self.shape).astype(dtype)


def _rotated(words: jax.Array, bits: int) -> jax.Array:
    return (words >> bits) | (words << (32 - bits))


def _blended(first: jax.Array, second: jax.Array) -> jax.Array:
    return (first & LEFT) | (second & ~LEFT)


def _times_power_of_two(halves: jax.Array, scales: jax.Array) -> jax.Array:
    """Return bfloat16 numbers from registers' halves (uint32) and biased exponents (int32).

    Integers do it: a float product would lose subnormal numbers where XLA flushes them.
    """
    codes = ((halves >> 6) & 7).astype(jnp.int32)
    exponent = (codes >> 1) + scales - 1  # of 0.5 too, which is subnormal in a code
    mantissa = jnp.where(codes > 1, (codes & 1) << 6, 0)
    number = jnp.where(
        exponent >= 1,
        jnp.minimum(exponent, 255) << 7 | jnp.where(exponent < 255, mantissa, 0),
        (0x80 | mantissa) >> jnp.minimum(1 - exponent, 8),
    )
    number = jnp.where(codes == 0, 0, number)
    number = jnp.where(scales == NAN, 0x7FC0, number)
    bits = number.astype(jnp.uint16) | (halves.astype(jnp.uint16) & 0x8000)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def random_weight(key: jax.Array, shape: tuple[int, ...], exponent: int) -> Mxfp4Weight:
    """Return random codes with scales of 2 ** (exponent - 1) to 2 ** (exponent + 1).

    shape: of the matrices, [..., in, out]
    """
    *experts, depth, width = shape
    units = (*experts, width // COLUMNS, depth // BLOCK)
    codes, exponents = jax.random.split(key)
    words = jax.random.bits(codes, (*units, CODE_WORDS), jnp.uint32)
    scales = jax.random.randint(exponents, (*units, UNIT - CODE_WORDS, 4), -1, 2)
    scales = (scales + (exponent + 127)).astype(jnp.uint8)
    parts = [lax.bitcast_convert_type(part, jnp.int32) for part in (words, scales)]
    return Mxfp4Weight(jnp.concatenate(parts, axis=-1), wide=exponent + 128 > LARGEST_NARROW)


def pack(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the units of a checkpoint's blocks and scales.

    blocks: uint8 [..., out, in / 32, 16], two codes a byte, the low nibble first
    scales: uint8 [..., out, in / 32], exponents biased by 127

    The codes of a block of NaN become zeros, since the kernel multiplies by infinity.
    """
    *outer, width, depth = scales.shape
    assert width % COLUMNS == 0, width
    units = np.empty((*outer, width // COLUMNS, depth, UNIT), np.int32)
    for matrix in np.ndindex(*outer):
        _pack_matrix(blocks[matrix], scales[matrix], units[matrix])
    return units


def scales_of(units: np.ndarray) -> np.ndarray:
    """Return the scales of units, uint8 [..., out / 16, in / 32, 16]."""
    return np.ascontiguousarray(units[..., CODE_WORDS:]).view(np.uint8)


def _pack_matrix(blocks: np.ndarray, scales: np.ndarray, units: np.ndarray) -> None:
    """Write the units of one matrix."""
    columns, depth, _ = units.shape
    if (scales == NAN).any():
        blocks = np.where((scales == NAN)[..., None], np.uint8(0), blocks)
    # A byte holds the two depths of a register. [out / 16, h, g, in / 32, j, k, t]
    pairs = blocks.reshape(columns, 2, 8, depth, 2, 2, 4)
    words = np.zeros((2, columns, depth, 8, 4), np.uint32)
    for register, tables in enumerate(_TABLES):
        j, k, h = register >> 2, (register >> 1) & 1, register & 1
        bytes_ = np.ascontiguousarray(pairs[:, h, :, :, j, k].swapaxes(1, 2))
        for word, table in tables:
            words[word] |= table.take(bytes_, mode="clip")  # the fastest mode
    units[..., :CODE_WORDS] = (
        np.moveaxis(words, 0, -1).view(np.int32).reshape(columns, depth, CODE_WORDS)
    )
    by_lane = scales.reshape(columns, 2, 8, depth).transpose(0, 3, 2, 1)
    units[..., CODE_WORDS:] = (
        np.ascontiguousarray(by_lane).reshape(columns, depth, -1).view(np.int32)
    )


def _tables() -> list[list[tuple[int, np.ndarray]]]:
    """Return for each register the words that hold it, and each byte's bits there."""
    byte = np.arange(256, dtype=np.uint32)
    halves = [(code >> 3) << 15 | (code & 7) << 6 for code in (byte & 15, byte >> 4)]
    pair = halves[0] | halves[1] << 16

    def rotated_left(bits: int) -> np.ndarray:
        return (pair << bits) | (pair >> (32 - bits)) if bits else pair

    left = [(0, LEFT), (1, ~LEFT)]
    tables = [[(word, rotated_left(bits))] for word in (0, 1) for bits in ROTATIONS[word]]
    return tables + [
        [(word, rotated_left(bits) & mask) for word, mask in left] for bits in ROTATIONS[2]
    ]


_TABLES = _tables()
