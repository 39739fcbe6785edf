"""Units of int4 in shared memory, decoded in registers and multiplied by mma.sync or wgmma."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fragments import (
    RowReader,
    array_of,
    i32,
    lane_and_warp,
    mma,
    of_registers,
    ptx,
    scalars,
    strides,
)
from pallas_kernels.fragments import zeros as no_sums
from pallas_kernels.hopper import interpreting
from pallas_kernels.int4_matmul.weight import DEPTHS, ZERO, Int4Weight
from pallas_kernels.types import Accumulator, Ref

LAYOUT = plgpu.Layout.WGMMA
TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
CODE_BITS = 0x000F000F
EXPONENT = 0x43004300  # 128 in bfloat16, twice: the last bits of the mantissa count units
PAIR = 0x00010001


class Step(NamedTuple):
    """A step of the weights in shared memory.

    words:  int32 [blocks, 4, depth / 64, 128]; a block has 64 columns of a weight
    scales: [blocks, groups, 64]
    zeros:  uint8 [blocks, groups or more, 64], or None
    """

    words: Ref
    scales: Ref
    zeros: Ref | None


def multiply(
    totals: Sequence[jax.Array], step: Step, x: Ref, *, group: int, sum_depth: int
) -> tuple[jax.Array, ...]:
    """Return totals, float32 [64, rows] for each block, plus weights times x^T, by mma.sync.

    x:         [rows, depth], rows padded to a multiple of 8
    group:     depths that share a scale
    sum_depth: depths of a sum that a scale multiplies
    """
    if interpreting():  # registers are the GPU's alone
        return multiply_by_wgmma(totals, step, x, group=group, sum_depth=sum_depth)
    total = plgpu.ShapeDtypeStruct(totals[0].shape, jnp.float32, layout=LAYOUT)
    plain = plgpu.RefType()
    zeros = () if step.zeros is None else (step.zeros,)

    @plgpu.inline_mgpu(
        arg_types=(
            (LAYOUT,) * len(totals),
            plain,
            plain,
            (plain,) * len(zeros),
            plgpu.RefType(TRANSFORMS),
        ),
        return_type=(total,) * len(totals),
    )
    def run(_: Any, totals: Any, words: Any, scales: Any, zeros: Any, x: Any) -> Any:
        offsets = zeros[0] if zeros else None
        return _multiply(totals, words, scales, offsets, x, group, sum_depth)

    call: Any = run
    return call(tuple(totals), step.words, step.scales, zeros, x)


def multiply_by_wgmma(
    totals: Sequence[jax.Array], step: Step, x: Ref, *, group: int, sum_depth: int
) -> tuple[jax.Array, ...]:
    """Return what `multiply` returns, by wgmma. On an H200 its sums have the bits of mma.sync.

    Codes minus zeros are operands A. Accumulators start at zero for each sum of a scale.
    """
    for place, few in _sums_of(int(x.shape[1]), group, sum_depth):
        sums = _sums_by_wgmma(step, x, few, place, totals)
        totals = _add_scaled(totals, sums, step, place)
    return tuple(totals)


def _sums_of(depth: int, group: int, sum_depth: int) -> Iterator[tuple[int, range]]:
    """Yield, for each sum of a step, the place of its group in the step, and its units."""
    for start in range(0, depth, sum_depth):
        place = start // group if depth > group else 0
        yield place, range(start // DEPTHS, (start + sum_depth) // DEPTHS)


def _sums_by_wgmma(
    step: Step, x: Ref, few: range, place: int, like: Sequence[jax.Array]
) -> tuple[jax.Array, ...]:
    """Return codes minus zeros times x^T, for each block: the sums of some units.

    few:   the units
    place: of their group in the step
    like:  arrays of the sums' shape, for each block
    """

    def operands(block: int, unit: int) -> tuple[jax.Array, Ref]:
        codes = _operand(step, block, unit, place, scaled=False)
        return codes, x.at[:, pl.ds(unit * DEPTHS, DEPTHS)]

    def multiply(*sums: Accumulator) -> tuple[jax.Array, ...]:
        for block, acc in enumerate(sums):
            for unit in few:
                codes, depths = operands(block, unit)
                plgpu.wgmma(acc, codes, depths.transpose((1, 0)))
        # As in many_rows.py: LLVM may read the sums before they are made.
        return tuple(lax.optimization_barrier(acc[...]) for acc in sums)

    if interpreting():  # its wgmma takes no arrays
        return tuple(_dot(operands(block, unit) for unit in few) for block in range(len(like)))
    columns, rows = like[0].shape
    return pl.run_scoped(multiply, *(plgpu.ACC((columns, rows), jnp.float32),) * len(like))


def _dot(operands: Iterable[tuple[jax.Array, Ref]]) -> jax.Array:
    """Return the sum of weights [64, depth] times x [rows, depth]^T."""
    found = [jnp.dot(w, x[...].T, preferred_element_type=jnp.float32) for w, x in operands]
    return functools.reduce(jnp.add, found)


def _add_scaled(
    totals: Sequence[jax.Array], sums: Sequence[jax.Array], step: Step, place: int
) -> tuple[jax.Array, ...]:
    """Return totals plus sums times the scales of a group, rounded once.

    place: of the group in the step
    """
    if interpreting():
        scales = [step.scales[block, place].astype(jnp.float32) for block in range(len(totals))]
        return tuple(
            total + sum_ * scale[:, None]
            for total, sum_, scale in zip(totals, sums, scales, strict=True)
        )
    total = plgpu.ShapeDtypeStruct(totals[0].shape, jnp.float32, layout=LAYOUT)
    layouts = (LAYOUT,) * len(totals)

    @plgpu.inline_mgpu(
        arg_types=(layouts, layouts, plgpu.RefType(), plgpu.RefType()),
        return_type=(total,) * len(totals),
    )
    def run(_: Any, totals: Any, sums: Any, words: Any, scales: Any) -> Any:
        reader = _Reader(words, scales, None)
        return tuple(
            array_of(_plus_scaled(scalars(total), scalars(sum_), reader.scales(i, place)), total)
            for i, (total, sum_) in enumerate(zip(totals, sums, strict=True))
        )

    call: Any = run
    return call(tuple(totals), tuple(sums), step.words, step.scales)


def values(step: Step, block: int) -> jax.Array:
    """Return a block of weights as operand A of wgmma: bfloat16 [64 columns, 64 depths].

    The step has one unit of the depth, and one group. The bits are those of Int4Weight.to_array.
    """
    return _operand(step, block, 0, 0, scaled=True)


def _operand(step: Step, block: int, unit: int, place: int, *, scaled: bool) -> jax.Array:
    """Return a unit of a block as operand A of wgmma: bfloat16 [64 columns, 64 depths].

    place:  of the unit's group in the step
    scaled: whether to multiply codes minus their zeros, which are exact, by the group's scales
    """
    if interpreting():
        ones = jnp.ones((1, 64), jnp.float32)
        codes = Int4Weight(step.words[block, :, pl.ds(unit, 1)], ones).codes().astype(jnp.float32)
        numbers = codes - (
            ZERO if step.zeros is None else step.zeros[block, place].astype(jnp.float32)
        )
        if scaled:
            numbers *= step.scales[block, place].astype(jnp.float32)
        return numbers.T.astype(jnp.bfloat16)
    plain = plgpu.RefType()
    zeros = () if step.zeros is None else (step.zeros,)

    @plgpu.inline_mgpu(
        arg_types=(plain, plain, (plain,) * len(zeros)),
        return_type=plgpu.ShapeDtypeStruct((64, DEPTHS), jnp.bfloat16, layout=LAYOUT),
    )
    def run(_: Any, words: Any, scales: Any, zeros: Any) -> Any:
        reader = _Reader(words, scales, zeros[0] if zeros else None)
        return _operand_of(reader, block, unit, place, scaled)

    call: Any = run
    return call(step.words, step.scales, zeros)


# ---- for each thread


def _decode_word(word: Any, offsets: Sequence[Any]) -> list[Any]:
    """Return four registers of bfloat16 pairs: a word's codes minus their zeros, which is exact.

    offsets: 128 plus the zero of each of both columns, twice in a word
    """
    registers = []
    for i in range(4):
        shifted = arith.shrui(word, i32(4 * i)) if i else word
        # (word & CODE_BITS) | EXPONENT in one instruction.
        number = ptx(
            f"lop3.b32 $0, $1, {CODE_BITS:#x}, {EXPONENT:#x}, 0xea;",
            shifted,
            result_types=word.type,
        )
        registers.append(
            ptx("sub.bf16x2 $0, $1, $2;", number, offsets[i % 2], result_types=word.type)
        )
    return registers


def _multiply(
    totals: Any, words: Any, scales: Any, zeros: Any, x: Any, group: int, sum_depth: int
) -> Any:
    values, rows = [scalars(total) for total in totals], RowReader(x)
    depth = ir.MemRefType(words.type).shape[2] * DEPTHS
    reader = _Reader(words, scales, zeros)
    none = utils.c(0.0, ir.F32Type.get())
    for place, few in _sums_of(depth, group, sum_depth):
        sums = [[none] * len(numbers) for numbers in values]
        offsets = [reader.offsets(block, place) for block in range(len(values))]
        for unit in few:
            operands = [
                [rows.load(tile, 2 * unit + half) for tile in range(rows.tiles)]
                for half in range(2)
            ]
            for block, numbers in enumerate(sums):
                fragments = reader.fragments(block, unit, offsets[block])
                for j, a in enumerate(fragments):
                    for tile, b in enumerate(operands[j // 2]):
                        own = slice(4 * tile, 4 * tile + 4)
                        pair = b[2 * (j % 2) : 2 * (j % 2) + 2]
                        numbers[own] = mma(numbers[own], a, pair)
        for block, numbers in enumerate(sums):
            values[block] = _plus_scaled(values[block], numbers, reader.scales(block, place))
    return tuple(array_of(numbers, total) for numbers, total in zip(values, totals, strict=True))


def _plus_scaled(totals: list[Any], sums: list[Any], factors: list[Any]) -> list[Any]:
    """Return totals plus sums times the scales of both columns."""
    # Of four sums, two are of column g and two of column g + 8.
    return [
        ptx(
            "fma.rn.f32 $0, $1, $2, $3;",
            number,
            factors[i // 2 % 2],
            total,
            result_types=total.type,
        )
        for i, (total, number) in enumerate(zip(totals, sums, strict=True))
    ]


def _operand_of(reader: _Reader, block: int, unit: int, place: int, scaled: bool) -> Any:
    fragments = reader.fragments(block, unit, reader.offsets(block, place))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = [register for fragment in fragments for register in fragment]
    if scaled:
        factors, times = reader.scales(block, place), _times
        if reader.has_bf16_scales:
            factors, times = [_bf16_twice(factor) for factor in factors], _times_bf16
        registers = [times(register, factors[i % 2]) for i, register in enumerate(registers)]
    registers = [llvm.bitcast(pair, register) for register in registers]
    return of_registers(registers, no_sums((64, DEPTHS)))


def _bf16_twice(factor: Any) -> Any:
    """Return a float32 number that bfloat16 holds as such, twice in a word."""
    word = llvm.bitcast(ir.IntegerType.get_signless(32), factor)
    return arith.ori(word, arith.shrui(word, i32(16)))


def _times_bf16(register: Any, factors: Any) -> Any:
    """Return the product of two pairs of bfloat16 numbers.

    All have 8 bits, so it is rounded once, as that of float32 numbers is.
    """
    return ptx("mul.rn.bf16x2 $0, $1, $2;", register, factors, result_types=register.type)


def _times(register: Any, factor: Any) -> Any:
    """Return a pair of bfloat16 numbers times a float32 factor, rounded once."""
    word, f32 = register.type, ir.F32Type.get()
    first = llvm.bitcast(f32, arith.shli(register, i32(16)))
    second = llvm.bitcast(f32, arith.andi(register, i32(0xFFFF0000)))
    first, second = (arith.mulf(number, factor) for number in (first, second))
    return ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", second, first, result_types=word)


class _Reader:
    """Reads what a lane has of a step; see Step. place: of a group in the step."""

    def __init__(self, words: Any, scales: Any, zeros: Any) -> None:
        self._word = ir.IntegerType.get_signless(32)
        self._byte = ir.IntegerType.get_signless(8)
        lane, warp = lane_and_warp()
        self._block_stride, warp_stride, self._unit_stride, _ = strides(words)
        first = arith.addi(arith.muli(warp, i32(warp_stride)), arith.shli(lane, i32(2)))
        self._words = utils.getelementptr(utils.memref_ptr(words), [first], self._word)
        # Columns g and g + 8 of the warp's 16.
        column = arith.addi(arith.shli(warp, i32(4)), arith.shrui(lane, i32(2)))
        self._scale_type = ir.MemRefType(scales.type).element_type
        self.has_bf16_scales = self._scale_type == ir.BF16Type.get()
        self._scale_strides = strides(scales)[:2]
        self._scales = utils.getelementptr(utils.memref_ptr(scales), [column], self._scale_type)
        self._zeros = None
        if zeros is not None:
            self._zero_strides = strides(zeros)[:2]
            self._zeros = utils.getelementptr(utils.memref_ptr(zeros), [column], self._byte)

    def offsets(self, block: int, place: int) -> list[Any]:
        """Return 128 plus the zero, twice in a word, of both columns."""
        if self._zeros is None:
            return [i32(EXPONENT + ZERO * PAIR)] * 2
        by_block, by_place = self._zero_strides
        found = []
        for half in range(2):
            first = block * by_block + place * by_place + 8 * half
            address = utils.getelementptr(self._zeros, [first], self._byte)
            zero = arith.extui(self._word, llvm.load(self._byte, address, alignment=1))
            found.append(arith.addi(arith.muli(zero, i32(PAIR)), i32(EXPONENT)))
        return found

    def scales(self, block: int, place: int) -> list[Any]:
        """Return the scales of both columns, float32."""
        by_block, by_place = self._scale_strides
        f32, size, found = ir.F32Type.get(), utils.bitwidth(self._scale_type) // 8, []
        for half in range(2):
            first = block * by_block + place * by_place + 8 * half
            address = utils.getelementptr(self._scales, [first], self._scale_type)
            scale = llvm.load(self._scale_type, address, alignment=size)
            found.append(scale if size == 4 else arith.extf(f32, scale))
        return found

    def fragments(self, block: int, unit: int, offsets: list[Any]) -> list[list[Any]]:
        """Return four operands A of a unit, four registers of bfloat16 pairs each."""
        first = block * self._block_stride + unit * self._unit_stride
        address = utils.getelementptr(self._words, [first], self._word)
        four = llvm.load(ir.VectorType.get((4,), self._word), address, alignment=16)
        found = []
        for j in range(4):
            found.append(_decode_word(llvm.extractelement(four, i32(j)), offsets))
        return found
