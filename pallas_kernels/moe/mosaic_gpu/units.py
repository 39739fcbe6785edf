"""Units of MXFP4 in shared memory: a warp decodes them in registers and multiplies or stores them.

Two weights take two integer instructions and one product of bfloat16 pairs. The products are those
of mma.sync, which gives the bits of wgmma. wgmma with its operand A in registers took longer
(docs/notes/mxfp4-experts.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fragments import (
    RowReader,
    array_of,
    i32,
    lane_and_warp,
    mma,
    ptx,
    scalars,
    strides,
)
from pallas_kernels.hopper import interpreting
from pallas_kernels.moe.mxfp4 import (
    CODE_WORDS,
    LEFT,
    NORMALISE,
    SPREAD,
    Mxfp4Weight,
    power_words,
    registers,
)
from pallas_kernels.types import Ref

WIDTH = 64  # columns: a unit for each warp
TILE = (8, 64)
LAYOUT = plgpu.Layout.WGMMA
TRANSFORMS = (plgpu.TilingTransform(TILE), plgpu.SwizzleTransform(128))
ROW_BYTES = 128  # of a swizzled tile
TILE_BYTES = TILE[0] * ROW_BYTES


def multiply(
    totals: Sequence[jax.Array], units: Ref, x: Ref, *, wide: bool
) -> tuple[jax.Array, ...]:
    """Return totals, float32 [WIDTH, rows] each, plus weights times x^T.

    units: [totals, WIDTH / 16, depth / 32, 68]. x: [rows, depth]. wide: see Mxfp4Weight.
    """
    if interpreting():
        weights = Mxfp4Weight(units[...], wide).to_array(x.dtype)
        rows = x[...].T
        return tuple(
            total + jnp.dot(weight.T, rows, preferred_element_type=jnp.float32)
            for total, weight in zip(totals, weights, strict=True)
        )
    total = plgpu.ShapeDtypeStruct(totals[0].shape, jnp.float32, layout=LAYOUT)

    @plgpu.inline_mgpu(
        arg_types=((LAYOUT,) * len(totals), plgpu.RefType(), plgpu.RefType(TRANSFORMS)),
        return_type=(total,) * len(totals),
    )
    def run(_: Any, totals: Any, units: Any, x: Any) -> Any:
        return _multiply(totals, units, x, wide)

    call: Any = run
    return call(tuple(totals), units, x)


def store(units: Ref, out: Ref, *, wide: bool) -> None:
    """Store the weights of units [WIDTH / 16, depth / 32, 68] in out, bfloat16 [depth, WIDTH]."""
    if interpreting():
        out[...] = Mxfp4Weight(units[...], wide).to_array(out.dtype)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TRANSFORMS)))
    def run(_: Any, units: Any, out: Any) -> None:
        _store(units, out, wide)

    call: Any = run
    call(units, out)


# ---- for each thread


@dataclass(frozen=True)
class _Word:
    """A word in a register."""

    value: Any

    def __and__(self, mask: np.uint32) -> _Word:
        return _Word(arith.andi(self.value, i32(int(mask))))


def _rotated(word: _Word, bits: int) -> _Word:
    if bits >= 26:  # no bit that is kept comes from the other end
        return _Word(arith.shli(word.value, i32(32 - bits)))
    instruction = f"shf.r.wrap.b32 $0, $1, $1, {bits};"
    return _Word(ptx(instruction, word.value, result_types=word.value.type))


def _blended(first: _Word, second: _Word) -> _Word:
    # One instruction, of which LLVM would make two.
    instruction = f"lop3.b32 $0, $1, $2, {LEFT:#x}, 0xe4;"
    values = first.value, second.value
    return _Word(ptx(instruction, *values, result_types=first.value.type))


def _product(a: Any, b: Any) -> Any:
    return ptx("mul.rn.bf16x2 $0, $1, $2;", a, b, result_types=a.type)


class _Reader:
    """Reads a lane's fragments of units [..., warp, block, 68]."""

    def __init__(self, units: Any, wide: bool) -> None:
        i8, self._i32 = (ir.IntegerType.get_signless(n) for n in (8, 32))
        self._i8, self._wide = i8, wide
        lane, warp = lane_and_warp()
        first = arith.muli(warp, i32(strides(units)[-3]))
        base = utils.memref_ptr(units)
        word = arith.addi(first, arith.shli(lane, i32(1)))
        self._codes = utils.getelementptr(base, [word], self._i32)
        group = arith.shli(arith.shrui(lane, i32(2)), i32(1))
        byte = arith.addi(arith.shli(first, i32(2)), group)
        self._scales = utils.getelementptr(base, [byte], i8)

    def registers(self, offset: int) -> list[Any]:
        """Return the eight registers, bfloat16 pairs, of the unit at this word."""
        pair = ir.VectorType.get((2,), self._i32)
        address = utils.getelementptr(self._codes, [offset], self._i32)
        words = llvm.load(pair, address, alignment=8)
        first, second = (_Word(llvm.extractelement(words, i32(i))) for i in range(2))
        powers = [self._power(4 * (offset + CODE_WORDS) + half) for half in range(2)]
        found = []
        codes = registers(first, second, rotate=_rotated, blend=_blended)
        for register, word in enumerate(codes):
            value = word.value
            if self._wide:
                value = _product(value, i32(NORMALISE))
            found.append(_product(value, powers[register & 1]))
        return found

    def _power(self, byte: int) -> Any:
        address = utils.getelementptr(self._scales, [byte], self._i8)
        scale = arith.extui(self._i32, llvm.load(self._i8, address, alignment=1))
        spread = arith.muli(scale, i32(SPREAD))
        least, more = power_words(self._wide)
        return arith.maxui(spread, i32(least)) if least else arith.addi(spread, i32(more))


def _multiply(totals: Any, units: Any, x: Any, wide: bool) -> Any:
    reader = _Reader(units, wide)
    blocks = ir.MemRefType(units.type).shape[2]
    part_stride, _, block_stride, _ = strides(units)
    x_rows = RowReader(x)
    values = [scalars(total) for total in totals]
    for block in range(blocks):
        rows = [x_rows.load(tile, block) for tile in range(x_rows.tiles)]
        for part, sums in enumerate(values):
            weights = reader.registers(part * part_stride + block * block_stride)
            for j in range(2):
                a = weights[4 * j : 4 * j + 4]
                for tile, b in enumerate(rows):
                    own = slice(4 * tile, 4 * tile + 4)
                    sums[own] = mma(sums[own], a, b[2 * j : 2 * j + 2])
    return tuple(array_of(sums, total) for sums, total in zip(values, totals, strict=True))


def _store(units: Any, out: Any, wide: bool) -> None:
    reader = _Reader(units, wide)
    blocks = ir.MemRefType(units.type).shape[1]
    block_stride = strides(units)[1]
    # stmatrix: lane 8 * i + r gives the address of row (depth) r of register 4 * j + i, whose 16
    # bytes are 8 columns.
    lane, warp = lane_and_warp()
    row, register = arith.andi(lane, i32(7)), arith.shrui(lane, i32(3))
    tile, half = arith.shrui(register, i32(1)), arith.andi(register, i32(1))
    columns = arith.addi(arith.shli(warp, i32(1)), half)
    chunk = arith.shli(arith.xori(row, columns), i32(4))  # swizzled
    offset = arith.ori(arith.shli(row, i32(7)), chunk)
    offset = arith.addi(offset, arith.muli(tile, i32(TILE_BYTES)))
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(out))
    start = arith.addi(base, offset)
    for block in range(blocks):
        weights = reader.registers(block * block_stride)
        for j in range(2):
            place = arith.addi(start, i32((4 * block + 2 * j) * TILE_BYTES))
            ptx(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
                place,
                *weights[4 * j : 4 * j + 4],
                has_side_effects=True,
                convergent=True,
            )
