"""Experts in fp8: sums of codes, their scales, and the activation's result in fp8.

Sums of the tensor cores end after 128 depths, as in pallas_kernels/fp8_matmul. There the scales of
blocks multiply them; the others multiply the totals.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dtypes import rounded_division
from pallas_kernels.fp8_matmul.weight import BLOCK, DTYPE, LARGEST
from pallas_kernels.hopper import interpreting
from pallas_kernels.moe.mosaic_gpu.tuning import TILE_N
from pallas_kernels.moe.mosaic_gpu.units import LAYOUT
from pallas_kernels.mosaic import load, store
from pallas_kernels.types import Accumulator, Ref

T = TypeVar("T")  # an array, or the kernel's ref
TRANSFORMS = (plgpu.TilingTransform((8, BLOCK)), plgpu.SwizzleTransform(128))
# A row of 128 values is half a warp's, eight values a thread's.
BY_ROW = plgpu.Layout.TILED(
    fa.Tiling(((8, BLOCK), (2, BLOCK), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


class Scales(NamedTuple, Generic[T]):
    """Scales of the operands, float32.

    weights: [experts, width], or [experts, width / 128, depth / 128]
    rows:    [places], or by depth, [depth / 128, places]
    """

    weights: T
    rows: T


class Tile(NamedTuple):
    """What an item multiplies: its expert, the first column of each part, its rows."""

    expert: jax.Array
    columns: tuple[jax.Array, ...]
    first_row: jax.Array
    rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return TILE_N, self.rows


def block_factors(scales: Scales[Ref], tile: Tile, depth: jax.Array) -> list[jax.Array]:
    """Return what multiplies the sums of 128 depths from `depth` on, for each part."""
    block = lax.div(depth, BLOCK)
    at = scales.rows.at[block, pl.ds(tile.first_row, tile.rows)]
    by_row = load(at, LAYOUT.reduce(0), optimized=False)
    of_weights = [
        scales.weights[tile.expert, lax.div(column, BLOCK), block] for column in tile.columns
    ]
    return [lax.broadcast_in_dim(by_row * one, tile.shape, [1]) for one in of_weights]


def multiply(
    totals: tuple[jax.Array, ...],
    weights: Ref,
    x: Ref,
    factors: Sequence[Sequence[jax.Array]],
) -> tuple[jax.Array, ...]:
    """Return totals, float32 [64, rows] each, plus weights times x^T.

    weights: [totals, 64, depth]
    x:       [rows, depth]
    factors: of block_factors, for each 128 depths; [] without blocks
    """
    chunks, count = x.shape[1] // BLOCK, len(totals)
    shape = TILE_N, totals[0].shape[1]

    def accumulate(*accumulators: Accumulator) -> list[jax.Array]:
        for i, acc in enumerate(accumulators):
            chunk, part = divmod(i, count)
            k = pl.ds(chunk * BLOCK, BLOCK)
            plgpu.wgmma(acc, weights.at[part, :, k], x.at[:, k].transpose((1, 0)))
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in accumulators]

    accumulators = [plgpu.ACC(shape, jnp.float32)] * (chunks * count)
    sums = pl.run_scoped(accumulate, *accumulators)
    found = list(totals)
    for i, added in enumerate(sums):
        chunk, part = divmod(i, count)
        found[part] += added * factors[chunk][part] if factors else added
    return tuple(found)


def scaled(
    totals: Sequence[jax.Array], columns: Sequence[jax.Array], rows: jax.Array, tile: Tile
) -> list[jax.Array]:
    """Return totals times the scales of their columns and rows; see load_scales."""
    by_row = lax.broadcast_in_dim(rows, tile.shape, [1])
    return [
        total * lax.broadcast_in_dim(own, tile.shape, [0]) * by_row
        for total, own in zip(totals, columns, strict=True)
    ]


def load_scales(scales: Scales[Ref], tile: Tile) -> tuple[list[jax.Array], jax.Array]:
    """Return the scales of each part's columns, and those of the rows."""
    columns = [
        load(
            scales.weights.at[tile.expert, pl.ds(column, TILE_N)],
            LAYOUT.reduce(1),
            optimized=False,
        )
        for column in tile.columns
    ]
    rows = scales.rows.at[pl.ds(tile.first_row, tile.rows)]
    return columns, load(rows, LAYOUT.reduce(0), optimized=False)


def quantise(values: Ref, codes: Ref, scales: Ref) -> None:
    """Write values [rows, 128] in fp8, and the scale of each row.

    See pallas_kernels.fp8_matmul.rows.quantise.
    """
    wide = load(values, BY_ROW, optimized=False).astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=1)
    divisors = jnp.where(largest == 0.0, 1.0, _divide(largest, jnp.float32(LARGEST)))
    store(scales, divisors)
    divisor = plgpu.layout_cast(lax.broadcast_in_dim(divisors, wide.shape, [0]), BY_ROW)
    codes[...] = jnp.clip(_divide(wide, divisor), -LARGEST, LARGEST).astype(DTYPE)


def _divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return x / divisor, correctly rounded: XLA, which interprets kernels, would invert it."""
    return rounded_division(x, divisor) if interpreting() else x / divisor
