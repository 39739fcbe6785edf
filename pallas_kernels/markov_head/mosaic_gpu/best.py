"""The best of a block's scores in each row, and its column.

For each of its places in a tile, a thread keeps the best score of all tiles. The places are
compared once, at the end. A kernel compares what the blocks found.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.markov_head.mosaic_gpu.block import LAYOUT, Block
from pallas_kernels.matmul.mosaic_gpu.sizes import Sizes
from pallas_kernels.matmul.plan import TILE_N
from pallas_kernels.mosaic import store
from pallas_kernels.pieces import LANES, NO_INDEX
from pallas_kernels.row_maximum import first_of_highest
from pallas_kernels.types import Index, Ref

T = TypeVar("T")  # an array, its type, or the kernel's ref


class Found(NamedTuple, Generic[T]):
    """The best score in each row of each block's columns, [padded rows, blocks and unused places].

    value: float32
    id:    int32, its first column
    """

    value: T
    id: T


class Best(NamedTuple, Generic[T]):
    """The best scores so far at each place of a tile, [rows, TILE_N].

    value: float32
    tile:  int32, number of the first tile that has it
    """

    value: T
    tile: T


def results_of(sizes: Sizes) -> Found[jax.ShapeDtypeStruct]:
    """Return the types of what the blocks find."""
    shape = (sizes.padded, -(-sizes.blocks // LANES) * LANES)
    return Found(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)))


def first_column(found: Found[jax.Array], sizes: Sizes, rows: int) -> jax.Array:
    """Return the column int32 [rows] of the best score of all blocks; of equal ones the first."""
    return first_of_highest(found.value, found.id, sizes.blocks, rows=rows, name="markov_combine")


def nothing(shape: tuple[int, ...], tile: jax.Array) -> Best[jax.Array]:
    """Return the start of a search: -inf at each place, in tile `tile`. A row of -inf keeps it."""
    values = plgpu.layout_cast(jnp.full(shape, -jnp.inf, jnp.float32), LAYOUT)
    return Best(values, plgpu.layout_cast(jnp.full(shape, tile, jnp.int32), LAYOUT))


def better(best: Best[jax.Array], scores: jax.Array, tile: jax.Array) -> Best[jax.Array]:
    """Return the best with the scores of tile number `tile`, which comes later.

    Of equal scores the first stays; NaN is never higher.
    """
    higher = scores > best.value
    return Best(jnp.where(higher, scores, best.value), jnp.where(higher, tile, best.tile))


def write(best: Best[jax.Array], block: Block, results: Found[Ref], first: Index) -> None:
    """Write the best of all places. first: number of best's row 0 among the block's rows"""
    value, tile = best
    highest = jnp.max(value, axis=1)
    is_highest = value == lax.broadcast_in_dim(highest, value.shape, [0])
    ids = columns_of(tile, value.shape)
    column = jnp.min(jnp.where(is_highest, ids, NO_INDEX), axis=1)
    rows = pl.ds(first, value.shape[0])
    for result, of_rows in zip(results, (highest, column), strict=True):
        store(result.at[rows, block.ring.block], of_rows)


def columns_of(tile: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return the columns of the vocabulary at a tile's places, int32 of this shape.

    tile: its number, or the number at each place
    """
    return tile * TILE_N + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT)
