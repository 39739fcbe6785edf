"""Units of int4 in shared memory, decoded in registers: multiplied there, or for wgmma."""

from __future__ import annotations

from collections.abc import Sequence
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
WGMMA_ROWS = 32  # from these on wgmma multiplies, else mma.sync: their sums have the same bits


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
    """Return totals, float32 [64, rows] for each product, plus weights times x^T.

    x:         [rows, depth]
    group:     depths that share a scale
    sum_depth: depths of a sum that a scale multiplies
    """
    if interpreting():
        return _multiply_arrays(totals, step, x[...], group, sum_depth)
    if totals[0].shape[1] >= WGMMA_ROWS:
        return _multiply_by_wgmma(totals, step, x, group, sum_depth)
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


def _multiply_arrays(
    totals: Sequence[jax.Array], step: Step, x: jax.Array, group: int, sum_depth: int
) -> tuple[jax.Array, ...]:
    depth, found = x.shape[1], []
    groups = max(1, depth // group)
    for part, total in enumerate(totals):
        ones = jnp.ones((1, 64), jnp.float32)
        values = Int4Weight(step.words[part], ones).codes().astype(jnp.float32)
        for start in range(0, depth, sum_depth):
            place = start // group if groups > 1 else 0
            zero = ZERO if step.zeros is None else step.zeros[part, place].astype(jnp.float32)
            few = slice(start, start + sum_depth)
            weights = (values[few] - zero).astype(x.dtype)
            sums = jnp.dot(weights.T, x[:, few].T, preferred_element_type=jnp.float32)
            total = total + sums * step.scales[part, place].astype(jnp.float32)[:, None]
        found.append(total)
    return tuple(found)


def _multiply_by_wgmma(
    totals: Sequence[jax.Array], step: Step, x: Ref, group: int, sum_depth: int
) -> tuple[jax.Array, ...]:
    depth, columns, rows = x.shape[1], *totals[0].shape
    for start in range(0, depth, sum_depth):
        place = start // group if depth > group else 0

        def multiply_sum(*sums: Accumulator, start: int = start, place: int = place) -> Any:
            for unit in range(start // DEPTHS, (start + sum_depth) // DEPTHS):
                operand = x.at[:, pl.ds(unit * DEPTHS, DEPTHS)].transpose((1, 0))
                for part, acc in enumerate(sums):
                    codes = _operand(step, part, unit, place, scaled=False)
                    plgpu.wgmma(acc, codes, operand)
            plgpu.wgmma_wait(0)
            return tuple(lax.optimization_barrier(acc[...]) for acc in sums)

        sums = pl.run_scoped(multiply_sum, *[plgpu.ACC((columns, rows), jnp.float32)] * len(totals))
        totals = _add_scaled(totals, sums, step, place)
    return tuple(totals)


def _add_scaled(
    totals: Sequence[jax.Array], sums: Sequence[jax.Array], step: Step, place: int
) -> tuple[jax.Array, ...]:
    """Return totals plus sums times their scales, rounded once."""
    total = plgpu.ShapeDtypeStruct(totals[0].shape, jnp.float32, layout=LAYOUT)
    layouts = (LAYOUT,) * len(totals)

    @plgpu.inline_mgpu(
        arg_types=(layouts, layouts, plgpu.RefType(), plgpu.RefType()),
        return_type=(total,) * len(totals),
    )
    def run(_: Any, totals: Any, sums: Any, words: Any, scales: Any) -> Any:
        reader = _Reader(words, scales, None)
        return tuple(
            array_of(_scaled(scalars(total), scalars(sum_), reader.scales(part, place)), total)
            for part, (total, sum_) in enumerate(zip(totals, sums, strict=True))
        )

    call: Any = run
    return call(tuple(totals), tuple(sums), step.words, step.scales)


def values(step: Step, block: int) -> jax.Array:
    """Return a block of weights as operand A of wgmma: bfloat16 [64 columns, 64 depths].

    The step has one unit of the depth, and one group. The bits are those of Int4Weight.to_array.
    """
    if interpreting():
        ones = jnp.ones((1, 64), jnp.float32)
        codes = Int4Weight(step.words[block], ones).codes().astype(jnp.float32)
        zero = ZERO if step.zeros is None else step.zeros[block, 0].astype(jnp.float32)
        return ((codes - zero) * step.scales[block, 0].astype(jnp.float32)).T.astype(jnp.bfloat16)
    return _operand(step, block, 0, 0, scaled=True)


def _operand(step: Step, block: int, unit: int, group: int, *, scaled: bool) -> jax.Array:
    """Return a unit of a block as operand A of wgmma: bfloat16 [64 columns, 64 depths].

    scaled: whether to multiply codes minus their zeros, which are exact, by the group's scales
    """
    plain = plgpu.RefType()
    zeros = () if step.zeros is None else (step.zeros,)

    @plgpu.inline_mgpu(
        arg_types=(plain, plain, (plain,) * len(zeros)),
        return_type=plgpu.ShapeDtypeStruct((64, DEPTHS), jnp.bfloat16, layout=LAYOUT),
    )
    def run(_: Any, words: Any, scales: Any, zeros: Any) -> Any:
        reader = _Reader(words, scales, zeros[0] if zeros else None)
        return _operand_of(reader, block, unit, group, scaled)

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
    units = ir.MemRefType(words.type).shape[2]
    depth = units * DEPTHS
    reader = _Reader(words, scales, zeros)
    none = utils.c(0.0, ir.F32Type.get())
    for start in range(0, depth, sum_depth):
        sums = [[none] * len(numbers) for numbers in values]
        place = start // group if depth > group else 0
        offsets = [reader.offsets(part, place) for part in range(len(values))]
        for unit in range(start // DEPTHS, (start + sum_depth) // DEPTHS):
            operands = [
                [rows.load(tile, 2 * unit + half) for tile in range(rows.tiles)]
                for half in range(2)
            ]
            for part, numbers in enumerate(sums):
                fragments = reader.fragments(part, unit, offsets[part])
                for j, a in enumerate(fragments):
                    for tile, b in enumerate(operands[j // 2]):
                        own = slice(4 * tile, 4 * tile + 4)
                        pair = b[2 * (j % 2) : 2 * (j % 2) + 2]
                        numbers[own] = mma(numbers[own], a, pair)
        for part, numbers in enumerate(sums):
            values[part] = _scaled(values[part], numbers, reader.scales(part, place))
    return tuple(array_of(numbers, total) for numbers, total in zip(values, totals, strict=True))


def _scaled(totals: list[Any], sums: list[Any], factors: list[Any]) -> list[Any]:
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


def _operand_of(reader: _Reader, block: int, unit: int, group: int, scaled: bool) -> Any:
    fragments = reader.fragments(block, unit, reader.offsets(block, group))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    registers = [register for fragment in fragments for register in fragment]
    if scaled:
        factors, times = reader.scales(block, group), _times
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
    """Reads a lane's part of a step; see Step."""

    def __init__(self, words: Any, scales: Any, zeros: Any) -> None:
        self._word = ir.IntegerType.get_signless(32)
        self._byte = ir.IntegerType.get_signless(8)
        lane, warp = lane_and_warp()
        self._part_stride, warp_stride, self._unit_stride, _ = strides(words)
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

    def offsets(self, part: int, group: int) -> list[Any]:
        """Return 128 plus the zero, twice in a word, of both columns."""
        if self._zeros is None:
            return [i32(EXPONENT + ZERO * PAIR)] * 2
        by_part, by_group = self._zero_strides
        found = []
        for half in range(2):
            place = part * by_part + group * by_group + 8 * half
            address = utils.getelementptr(self._zeros, [place], self._byte)
            zero = arith.extui(self._word, llvm.load(self._byte, address, alignment=1))
            found.append(arith.addi(arith.muli(zero, i32(PAIR)), i32(EXPONENT)))
        return found

    def scales(self, part: int, group: int) -> list[Any]:
        """Return the scales of both columns, float32."""
        by_part, by_group = self._scale_strides
        f32, size, found = ir.F32Type.get(), utils.bitwidth(self._scale_type) // 8, []
        for half in range(2):
            place = part * by_part + group * by_group + 8 * half
            address = utils.getelementptr(self._scales, [place], self._scale_type)
            scale = llvm.load(self._scale_type, address, alignment=size)
            found.append(scale if size == 4 else arith.extf(f32, scale))
        return found

    def fragments(self, part: int, unit: int, offsets: list[Any]) -> list[list[Any]]:
        """Return four operands A of a unit, four registers of bfloat16 pairs each."""
        place = part * self._part_stride + unit * self._unit_stride
        address = utils.getelementptr(self._words, [place], self._word)
        four = llvm.load(ir.VectorType.get((4,), self._word), address, alignment=16)
        found = []
        for j in range(4):
            found.append(_decode_word(llvm.extractelement(four, i32(j)), offsets))
        return found
