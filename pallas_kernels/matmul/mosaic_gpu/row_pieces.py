"""Sums of squares and largest magnitudes of the result's rows, by pieces of a warp's columns.

Each warp reduces its own 16 columns of a tile, and stores what it finds. So no warp waits for
another at the end of a tile; the next kernel adds up the pieces while its weights arrive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fragments import i32, lane_and_warp, ptx, scalars, strides
from pallas_kernels.hopper import WARPS, interpreting
from pallas_kernels.matmul.plan import PIECE
from pallas_kernels.types import Ref

LAYOUT = plgpu.Layout.WGMMA
DISTANCES = (4, 8, 16)  # lanes that are so far apart hold other columns of the same rows


def store_squares(value: jax.Array, pieces: Ref, tile: jax.Array) -> None:
    """Store the sums of the squares of value, float32 [TILE_N, padded rows].

    pieces: float32 [pieces, padded rows], in device memory. tile: of the result
    """
    if interpreting():
        _rows_of(pieces, tile)[...] = jnp.sum(_by_warp(value * value), axis=1)
    else:
        _store(value, pieces, tile, _sum_of_squares, arith.addf)


def store_largest(value: jax.Array, pieces: Ref, tile: jax.Array) -> None:
    """Store the largest magnitudes of value; see store_squares."""
    if interpreting():
        _rows_of(pieces, tile)[...] = jnp.max(_by_warp(jnp.abs(value)), axis=1)
    else:
        _store(jnp.abs(value), pieces, tile, arith.maximumf, arith.maximumf)


def _rows_of(pieces: Ref, tile: jax.Array) -> Ref:
    return pieces.at[pl.ds(tile * WARPS, WARPS)]


def _by_warp(value: jax.Array) -> jax.Array:
    return value.reshape(WARPS, PIECE, -1)


# ---- for each thread


def _sum_of_squares(a: Any, b: Any) -> Any:
    # Spelled out: with any number of rows the compiler fuses the same operations.
    square = ptx("mul.rn.f32 $0, $1, $1;", b, result_types=b.type)
    return ptx("fma.rn.f32 $0, $1, $1, $2;", a, square, result_types=a.type)


def _store(
    value: jax.Array,
    pieces: Ref,
    tile: jax.Array,
    first: Callable[[Any, Any], Any],
    combine: Callable[[Any, Any], Any],
) -> None:
    """Store a reduction over the columns of each warp.

    first: of the two columns that a thread has of a row. combine: of the results of two threads
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), LAYOUT))
    def run(_: Any, target: Any, array: Any) -> None:
        lane, warp = lane_and_warp()
        numbers = scalars(array)
        row_stride, f32 = strides(target)[0], ir.F32Type.get()
        has_first_columns = arith.cmpi(arith.CmpIPredicate.ult, lane, i32(4))
        for start in range(0, len(numbers), 4):
            # Four numbers: two rows side by side, of two columns.
            own = [first(numbers[start + row], numbers[start + 2 + row]) for row in range(2)]
            for distance in DISTANCES:
                own = [combine(x, utils.shfl_bfly(x, distance)) for x in own]
            place = arith.addi(
                arith.muli(warp, i32(row_stride)),
                arith.addi(arith.shli(lane, i32(1)), i32(2 * start)),
            )
            address = utils.getelementptr(utils.memref_ptr(target), [place], f32)
            ptx("st.global.v2.f32 [$0], {$1, $2};", address, *own, predicate=has_first_columns)

    call: Any = run
    call(_rows_of(pieces, tile), value)
