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
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

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

_ptx = utils.inline_ptx  # pyright: ignore[reportAttributeAccessIssue]  # new in jax 0.11


def _i32(x: int) -> Any:
    return utils.c(x - (1 << 32) if x >> 31 else x, ir.IntegerType.get_signless(32))


@dataclass(frozen=True)
class _Word:
    """A word in a register."""

    value: Any

    def __and__(self, mask: np.uint32) -> _Word:
        return _Word(arith.andi(self.value, _i32(int(mask))))


def _rotated(word: _Word, bits: int) -> _Word:
    if bits >= 26:  # no bit that is kept comes from the other end
        return _Word(arith.shli(word.value, _i32(32 - bits)))
    ptx = f"shf.r.wrap.b32 $0, $1, $1, {bits};"
    return _Word(_ptx(ptx, word.value, result_types=word.value.type))


def _blended(first: _Word, second: _Word) -> _Word:
    # One instruction, of which LLVM would make two.
    ptx = f"lop3.b32 $0, $1, $2, {LEFT:#x}, 0xe4;"
    values = first.value, second.value
    return _Word(_ptx(ptx, *values, result_types=first.value.type))


def _product(a: Any, b: Any) -> Any:
    return _ptx("mul.rn.bf16x2 $0, $1, $2;", a, b, result_types=a.type)


def _lane_and_warp() -> tuple[Any, Any]:
    thread = utils.thread_idx()
    warp = arith.andi(arith.shrui(thread, _i32(5)), _i32(3))
    return arith.andi(thread, _i32(31)), warp


def _strides(ref: Any) -> list[int]:
    strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
    return list(strides)


class _Reader:
    """Reads a lane's fragments of units [..., warp, block, 68]."""

    def __init__(self, units: Any, wide: bool) -> None:
        i8, self._i32 = (ir.IntegerType.get_signless(n) for n in (8, 32))
        self._i8, self._wide = i8, wide
        lane, warp = _lane_and_warp()
        first = arith.muli(warp, _i32(_strides(units)[-3]))
        base = utils.memref_ptr(units)
        word = arith.addi(first, arith.shli(lane, _i32(1)))
        self._codes = utils.getelementptr(base, [word], self._i32)
        group = arith.shli(arith.shrui(lane, _i32(2)), _i32(1))
        byte = arith.addi(arith.shli(first, _i32(2)), group)
        self._scales = utils.getelementptr(base, [byte], i8)

    def registers(self, offset: int) -> list[Any]:
        """Return the eight registers, bfloat16 pairs, of the unit at this word."""
        pair = ir.VectorType.get((2,), self._i32)
        address = utils.getelementptr(self._codes, [offset], self._i32)
        words = llvm.load(pair, address, alignment=8)
        first, second = (_Word(llvm.extractelement(words, _i32(i))) for i in range(2))
        powers = [self._power(4 * (offset + CODE_WORDS) + half) for half in range(2)]
        found = []
        codes = registers(first, second, rotate=_rotated, blend=_blended)
        for register, word in enumerate(codes):
            value = word.value
            if self._wide:
                value = _product(value, _i32(NORMALISE))
            found.append(_product(value, powers[register & 1]))
        return found

    def _power(self, byte: int) -> Any:
        address = utils.getelementptr(self._scales, [byte], self._i8)
        scale = arith.extui(self._i32, llvm.load(self._i8, address, alignment=1))
        spread = arith.muli(scale, _i32(SPREAD))
        least, more = power_words(self._wide)
        return arith.maxui(spread, _i32(least)) if least else arith.addi(spread, _i32(more))


def _multiply(totals: Any, units: Any, x: Any, wide: bool) -> Any:
    reader = _Reader(units, wide)
    blocks = ir.MemRefType(units.type).shape[2]
    part_stride, _, block_stride, _ = _strides(units)
    row_tiles = ir.MemRefType(x.type).shape[0]
    row_stride, depth_stride = _strides(x)[:2]
    # ldmatrix: lane 8 * i + r gives the address of row r of matrix i, which is 8 depths wide.
    lane, _ = _lane_and_warp()
    row, matrix = arith.andi(lane, _i32(7)), arith.shrui(lane, _i32(3))
    chunk = arith.shli(arith.xori(row, matrix), _i32(4))  # 16 bytes, swizzled
    offset = arith.ori(arith.shli(row, _i32(7)), chunk)
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(x))
    starts = [arith.addi(base, o) for o in (offset, arith.xori(offset, _i32(64)))]
    values = [_scalars(total) for total in totals]
    for block in range(blocks):
        rows = []
        for tile in range(row_tiles):
            place = 2 * (tile * row_stride + block // 2 * depth_stride)
            rows.append(_load_rows(arith.addi(starts[block % 2], _i32(place))))
        for part, sums in enumerate(values):
            weights = reader.registers(part * part_stride + block * block_stride)
            for j in range(2):
                a = weights[4 * j : 4 * j + 4]
                for tile, b in enumerate(rows):
                    own = slice(4 * tile, 4 * tile + 4)
                    sums[own] = _mma(sums[own], a, b[2 * j : 2 * j + 2])
    return tuple(_array(sums, total) for sums, total in zip(values, totals, strict=True))


def _store(units: Any, out: Any, wide: bool) -> None:
    reader = _Reader(units, wide)
    blocks = ir.MemRefType(units.type).shape[1]
    block_stride = _strides(units)[1]
    # stmatrix: lane 8 * i + r gives the address of row (depth) r of register 4 * j + i, whose 16
    # bytes are 8 columns.
    lane, warp = _lane_and_warp()
    row, register = arith.andi(lane, _i32(7)), arith.shrui(lane, _i32(3))
    tile, half = arith.shrui(register, _i32(1)), arith.andi(register, _i32(1))
    columns = arith.addi(arith.shli(warp, _i32(1)), half)
    chunk = arith.shli(arith.xori(row, columns), _i32(4))  # swizzled
    offset = arith.ori(arith.shli(row, _i32(7)), chunk)
    offset = arith.addi(offset, arith.muli(tile, _i32(TILE_BYTES)))
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(out))
    start = arith.addi(base, offset)
    for block in range(blocks):
        weights = reader.registers(block * block_stride)
        for j in range(2):
            place = arith.addi(start, _i32((4 * block + 2 * j) * TILE_BYTES))
            _ptx(
                "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
                place,
                *weights[4 * j : 4 * j + 4],
                has_side_effects=True,
                convergent=True,
            )


def _load_rows(address: Any) -> list[Any]:
    return list(
        _ptx(
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];",
            address,
            result_types=[address.type] * 4,
            has_side_effects=True,
            convergent=True,
        )
    )


def _mma(sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
    ptx = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    types = [ir.F32Type.get()] * 4
    return list(_ptx(ptx, *a, *b, *sums, result_types=types, convergent=True))


def _scalars(array: Any) -> list[Any]:
    """Return the numbers of an array of LAYOUT in the order of mma's registers."""
    return [llvm.extractelement(pair, _i32(i)) for pair in array.registers.flat for i in range(2)]


def _array(scalars: list[Any], like: Any) -> Any:
    """Return an array of these numbers with the layout of another."""
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    pairs = []
    for first, second in zip(scalars[::2], scalars[1::2], strict=True):
        vector = llvm.insertelement(llvm.mlir_undef(pair), first, _i32(0))
        pairs.append(llvm.insertelement(vector, second, _i32(1)))
    shaped = np.array(pairs, dtype=object).reshape(like.registers.shape)
    return fa.FragmentedArray(_registers=shaped, _layout=like.layout, _is_signed=None)
