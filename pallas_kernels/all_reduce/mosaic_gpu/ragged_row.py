"""Rows whose width the threads of a block do not divide: loads and stores of their values alone.

A block's warpgroups hold a padded row in pieces. Values past the width are zeros, and not stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.all_reduce.mosaic_gpu.words import strided_array, to_words
from pallas_kernels.peers.ptx import (
    Value,
    address_of,
    at,
    below,
    c32,
    i32,
    inline_ptx,
    load_if,
    vector_of,
)
from pallas_kernels.peers.turn import WARPGROUP
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout


def load_row(
    piece: int,
    width: int,
    values: int,
    dtype: jnp.dtype,
    layout: Layout,
    *,
    is_shared: bool = False,
) -> Callable[[Ref], jax.Array]:
    """Return a function of an array [rows, width], or [width] if shared by all rows.

    It returns the warpgroup's piece of the block's row, in `layout` of `values` a register.
    """
    itemsize = dtype.itemsize
    size = values * itemsize // 4  # words of a register

    def run(_ctx: object, array: Value) -> FragmentedArray:
        words: list[Value] = []
        for place, inside in _places(piece, width, values):
            row = _row(array, 0 if is_shared else width * itemsize)
            address = at(row, arith.muli(place, c32(itemsize)))
            for first in range(0, size, 4):
                words += load_if(inside, address, 4 * first, min(4, size - first))
        return strided_array(words, piece, values, dtype)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((piece,), dtype, layout=layout),
    )(run)


def store_row(
    piece: int, width: int, values: int, dtype: jnp.dtype, layout: Layout
) -> Callable[[Ref, jax.Array], None]:
    """Return a function that stores the warpgroup's piece of the block's row in [rows, width]."""
    itemsize = dtype.itemsize
    size = values * itemsize // 4

    def run(_ctx: object, array: Value, row_values: FragmentedArray) -> None:
        words = to_words(row_values)
        for i, (place, inside) in enumerate(_places(piece, width, values)):
            address = at(_row(array, width * itemsize), arith.muli(place, c32(itemsize)))
            for first in range(0, size, 4):
                count = min(4, size - first)
                suffix, registers = vector_of([f"${1 + j}" for j in range(count)])
                start = i * size + first
                inline_ptx(
                    f"st.global.{suffix} [$0 + {4 * first}], {registers};",
                    *(address, *words[start : start + count]),
                    predicate=inside,
                    has_side_effects=True,
                )

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))(run)


def _places(piece: int, width: int, values: int) -> list[tuple[Value, Value]]:
    """Return the index in the row of each register's first value, and whether it is inside."""
    thread = utils.thread_idx()
    warpgroup = arith.divui(thread, c32(WARPGROUP))
    start = arith.addi(
        arith.muli(warpgroup, c32(piece)),
        arith.muli(arith.remui(thread, c32(WARPGROUP)), c32(values)),
    )
    steps = range(0, piece, WARPGROUP * values)
    places = [arith.addi(start, c32(step)) for step in steps]
    return [(place, below(place, c32(width))) for place in places]


def _row(array: Value, row_bytes: int) -> Value:
    """Return the address of the block's row."""
    block = arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x))
    return at(address_of(array), arith.muli(block, c32(row_bytes)))
