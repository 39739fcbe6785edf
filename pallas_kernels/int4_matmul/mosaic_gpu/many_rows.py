"""Products of many rows with int4 weights on Hopper, decoded in registers on their way to wgmma.

A unit is an operand A of wgmma (weight.py), so a CTA makes a transposed tile: columns of weights
times rows. Two warpgroups have half of the tile's columns each, or half of its rows. With columns
of their own they decode a weight once, else twice. The second block of 64 columns is decoded while
the tensor cores multiply the first. A third warpgroup starts the TMA copies. CTAs stay for all of
their tiles, so copies of the next tile are in flight while one ends.

Weights have the bits of Int4Weight.to_array in bfloat16. With `in_order`, the depth is summed in
order for any number of rows. Else a narrow result may be a sum of parts of the depth. Up to 64 rows
have other bits (product.py).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import NUM_SMS, interpreting
from pallas_kernels.int4_matmul.mosaic_gpu import units
from pallas_kernels.int4_matmul.mosaic_gpu.plan import unfit
from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, UNIT, Int4Weight
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul import reference
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.mosaic_gpu.many_rows_ring import (
    ROW_TILE,
    ManyRowsRing,
    TileTurns,
    with_idle_rows,
)
from pallas_kernels.matmul.mosaic_gpu.result_pieces import SLOTS, ResultPieces, finished
from pallas_kernels.matmul.plan import MAX_SMEM, TILE_N, Product
from pallas_kernels.mosaic import RegisterShares
from pallas_kernels.types import Accumulator, Barrier, Index, Ref

T = TypeVar("T")  # an array, the kernel's ref, or its type

CONSUMERS = 2
OWN_ROWS = (64, 96, 128)  # of a warpgroup
PIECE = 32  # rows of a result that are written at once
PARTS = (2, 4)  # of the depth
PART_STEPS = 8  # of a part of the depth, at least
# Of a step, of a block in it, and of a row and a block in it; of adding parts up, and their sums.
# Fitted to 152 tiles of 96 to 2,016 rows on an H200. They and 6 us of a call are within 7 %.
STEP_MICROSECONDS, BLOCK_MICROSECONDS, ROW_MICROSECONDS = 0.13, 0.13, 0.0016
ADDING_MICROSECONDS, SUMS_A_MICROSECOND = 3, 700_000
SIDES_FIRST_ABOVE = 256  # rows; measured. The estimate does not tell tiles of equal area apart


class Operands(NamedTuple, Generic[T]):
    """Operands of the kernel.

    x:        bfloat16 [rows, depth]
    words, scales, zeros: of each weight, see Int4Weight
    bias:     [width]
    residual: [rows, width]
    """

    x: T
    words: tuple[T, ...]
    scales: tuple[T, ...]
    zeros: tuple[T, ...]
    bias: T | None
    residual: T | None


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    x:        ring of steps, [stages, rows of a tile, DEPTHS]
    words:    ring of steps, [stages, sides, blocks, 4, 1, UNIT]
    scales:   ring of steps, [stages, sides, blocks, 1, TILE_N]
    zeros:    ring of steps, [stages, sides, blocks, 2, TILE_N], of which the first row is read
    out:      pieces of the result, and of the residual before it:
              [CONSUMERS, SLOTS, PIECE, TILE_N]; of sums [CONSUMERS, SLOTS, TILE_N, PIECE]
    weights:  decoded ones, for the interpreter, whose wgmma has no operand in registers:
              [CONSUMERS, blocks, TILE_N, DEPTHS]
    full:     for each slot of the rings, its copies have arrived
    consumed: for each slot of the rings, the warpgroups have read it
    residual: for each piece's slot, the residual has arrived
    """

    x: T
    words: T
    scales: T
    zeros: T | None
    out: T
    weights: T | None
    full: Barrier
    consumed: Barrier
    residual: Barrier


@dataclass(frozen=True)
class Tuning:
    """Static choices; only `parts` changes bits.

    own_rows: rows of a warpgroup
    blocks:   of TILE_N columns that a warpgroup multiplies at once: gate and up, or of one weight
    parts:    of the depth
    ctas:     that run at once
    sides:    of a tile's columns. With CONSUMERS, each warpgroup has a side and all rows; with 1,
              each has half of the rows and all columns
    """

    own_rows: int
    blocks: int
    parts: int = 1
    ctas: int = NUM_SMS
    sides: int = 1

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return CONSUMERS // self.sides * self.own_rows

    @property
    def columns(self) -> int:
        """Columns of a tile, those of gate and up both counted."""
        return self.sides * self.blocks * TILE_N

    def tiles(self, rows: int, columns: int) -> int:
        """Return the tiles of a product, each part of the depth counted.

        columns: of all weights
        """
        return columns // self.columns * -(-rows // self.rows) * self.parts

    def microseconds(self, product: Product) -> float:
        """Return the estimate by which tiles are chosen; see STEP_MICROSECONDS."""
        waves = -(-self.tiles(product.rows, sum(product.widths)) // self.ctas)
        steps = product.depth // DEPTHS // self.parts
        block = BLOCK_MICROSECONDS + self.own_rows * ROW_MICROSECONDS
        step = STEP_MICROSECONDS + self.blocks * block
        multiplied = waves * steps * step
        if self.parts == 1:
            return multiplied
        sums = self.parts * product.rows * product.width
        return multiplied + ADDING_MICROSECONDS + sums / SUMS_A_MICROSECOND


def choose_tuning(product: Product) -> Tuning:
    """Return the tile whose waves take least time.

    The depth has parts where it is not summed in order, and then only if all run at once.
    """
    steps, columns = product.depth // DEPTHS, sum(product.widths)
    parts = [1]
    if not (product.in_order or product.swiglu):
        parts += [n for n in PARTS if steps % n == 0 and steps >= n * PART_STEPS]
    sides_first = product.rows > SIDES_FIRST_ABOVE
    found = [
        Tuning(own_rows, blocks, n, sides=sides)
        for sides in ((CONSUMERS, 1) if sides_first else (1, CONSUMERS))
        for n, own_rows in itertools.product(parts, OWN_ROWS)
        for blocks in ((2,) if product.swiglu else (1, 2))
    ]
    found = [t for t in found if columns % t.columns == 0]
    found = [t for t in found if t.parts == 1 or t.tiles(product.rows, columns) <= t.ctas]
    return min(found, key=lambda tuning: tuning.microseconds(product))


def unsupported(product: Product) -> str | None:
    """Return why the kernel cannot make this product, None if it can."""
    if reason := unfit(product):
        return reason
    if product.normed or product.norms:
        return "expected no norm with many rows, got one"
    if product.swiglu and product.out_dtype != jnp.bfloat16:
        return f"expected SwiGLU in bfloat16, got {jnp.dtype(product.out_dtype).name}"
    return None


def multiply(inputs: Inputs[Int4Weight], *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.int4_matmul.int4_matmul."""
    if len(inputs.weights) > 1 and not inputs.swiglu:
        results = [multiply(each, tuning=tuning) for each in inputs.by_weight()]
        return jnp.concatenate(results, axis=-1)
    tuning = tuning or choose_tuning(Product.of(inputs))
    rows = inputs.x.shape[0]
    x, residual = with_idle_rows(inputs.x, inputs.residual, tuning.rows)
    inputs = replace(inputs, x=x, residual=residual)
    weights = inputs.weights
    operands = Operands(
        inputs.x,
        tuple(weight.words for weight in weights),
        tuple(weight.scales for weight in weights),
        tuple(weight.zeros for weight in weights if weight.zeros is not None),
        inputs.bias,
        inputs.residual,
    )
    returns_sums = tuning.parts > 1 or inputs.out_dtype != jnp.bfloat16
    if returns_sums:
        operands = operands._replace(bias=None, residual=None)
        sums = _matmul(operands, returns_sums=True, tuning=tuning)
        out = reference.finish(inputs, [sums[..., : x.shape[0]].sum(0).T])
    else:
        out = _matmul(operands, returns_sums=False, tuning=tuning)
    return out[:rows] if x.shape[0] > rows else out


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("returns_sums", "tuning"))
def _matmul(operands: Operands[jax.Array], *, returns_sums: bool, tuning: Tuning) -> jax.Array:
    """Return the product in bfloat16, [rows, width]; or sums in float32, [parts, width, rows].

    returns_sums: whether to return the latter, of whole pieces of rows. Only 16-bit values can be
                  stored transposed
    """
    rows, depth = operands.x.shape
    is_swiglu = len(operands.words) == 2
    width = operands.words[0].shape[0] * COLUMNS
    group = depth // operands.scales[0].shape[0]
    blocks = tuning.blocks
    own_columns = TILE_N if is_swiglu else blocks * TILE_N  # of a warpgroup's result
    sides, tile = tuning.sides, tuning.sides * own_columns
    own_rows, parts = tuning.own_rows, tuning.parts
    steps, columns = depth // DEPTHS // parts, len(operands.words) * width
    tiles = TileTurns(tuning.tiles(rows, columns), -(-rows // tuning.rows), tuning.ctas)
    stages = min(_stages(operands, returns_sums, tuning), tiles.fewest * steps)
    ring = ManyRowsRing(stages, steps, DEPTHS, CONSUMERS)
    ring_shape = stages, sides, blocks
    registers = RegisterShares(CONSUMERS, 216, 72)
    row_pieces, pdl, has_zeros = own_rows // PIECE, not interpreting(), bool(operands.zeros)
    assert not width % tile and own_rows % PIECE == 0, tuning
    assert not is_swiglu or (blocks == 2 and not returns_sums), tuning

    def body(operands: Operands[Ref], out: Ref, scratch: Scratch[Ref]) -> None:
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        tiles_here = tiles.here(cta)
        turns = tiles_here * steps

        def tile_of(index: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Return first row, part of the depth and number of the columns of the n-th tile."""
            rows, columns = tiles.place(cta, index)
            return rows * tuning.rows, lax.rem(columns, parts), lax.div(columns, parts)

        def step_of(turn: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """Return slot, unit of the depth, first row and number of the columns of a turn."""
            row, part, column = tile_of(lax.div(turn, steps))
            return lax.rem(turn, stages), lax.rem(turn, steps) + part * steps, row, column

        def load_weights(turn: jax.Array) -> None:
            slot, unit, _, column = step_of(turn)
            full = scratch.full.at[slot]
            group_row = pl.ds(lax.div(unit * DEPTHS, group), 1)
            for side, block in itertools.product(range(sides), range(blocks)):
                weight = block if is_swiglu else 0
                before = side * (own_columns // TILE_N) + (0 if is_swiglu else block)
                number = column * (tile // TILE_N) + before
                in_ring = slot, side, block
                of_units = pl.ds(number * (TILE_N // COLUMNS), TILE_N // COLUMNS), pl.ds(unit, 1)
                by_group = group_row, pl.ds(number * TILE_N, TILE_N)
                words, scales = operands.words[weight], operands.scales[weight]
                plgpu.copy_gmem_to_smem(words.at[of_units], scratch.words.at[in_ring], full)
                plgpu.copy_gmem_to_smem(scales.at[by_group], scratch.scales.at[in_ring], full)
                if scratch.zeros is not None:
                    target = scratch.zeros.at[*in_ring, pl.ds(0, 1)]
                    plgpu.copy_gmem_to_smem(operands.zeros[weight].at[by_group], target, full)

        def load_x(turn: jax.Array) -> None:
            slot, unit, row, _ = step_of(turn)
            here = pl.ds(row, tuning.rows), pl.ds(unit * DEPTHS, DEPTHS)
            plgpu.copy_gmem_to_smem(operands.x.at[here], scratch.x.at[slot], scratch.full.at[slot])

        @pl.when(wg == CONSUMERS)
        def _produce() -> None:
            registers.give_back()
            ring.produce(turns, load_weights, load_x, scratch.consumed, launches_next=is_swiglu)

        @pl.when(wg < CONSUMERS)
        def _consume() -> None:
            registers.take()
            if pdl:
                plgpu.griddepcontrol_wait()
            side, half = (wg, 0) if sides == CONSUMERS else (0, wg)
            mine = pl.ds(half * own_rows, own_rows)

            def accumulate(first_turn: jax.Array, *sums: Accumulator) -> tuple[jax.Array, ...]:
                @pl.loop(first_turn, first_turn + steps)
                def _step(turn: jax.Array) -> None:
                    slot = lax.rem(turn, stages)
                    plgpu.barrier_wait(scratch.full.at[slot])
                    zeros = None if scratch.zeros is None else scratch.zeros.at[slot, side]
                    words, scales = scratch.words.at[slot, side], scratch.scales.at[slot, side]
                    step = units.Step(words, scales, zeros)
                    x = scratch.x.at[slot, mine].transpose((1, 0))
                    for block, acc in enumerate(sums):
                        weights = units.values(step, block)
                        if scratch.weights is not None:
                            weights = _kept(weights, scratch.weights.at[wg, block])
                        plgpu.wgmma(acc, weights, x)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(scratch.consumed.at[slot])

                # Without a barrier, LLVM reads the sums of an unrolled loop before they are made.
                return tuple(lax.optimization_barrier(acc[...]) for acc in sums)

            @pl.loop(0, tiles_here)
            def _tile(index: jax.Array) -> None:
                row, part, column = tile_of(index)
                row, column = row + half * own_rows, column * sides + side

                def place(piece: int) -> tuple[Any, ...]:
                    """Return the place of a piece in the result: blocks of columns one by one."""
                    block, rows_before = divmod(piece, row_pieces)
                    rows = pl.ds(row + rows_before * PIECE, PIECE)
                    columns = pl.ds(column * own_columns + block * TILE_N, TILE_N)
                    return (part, columns, rows) if returns_sums else (rows, columns)

                results = ResultPieces(
                    count=row_pieces * (own_columns // TILE_N),
                    slots=scratch.out.at[wg],
                    out=out,
                    residual=operands.residual,
                    arrived=scratch.residual,
                    first=wg * SLOTS,
                    place=place,
                    turned=not returns_sums,
                )
                results.begin()
                shape = plgpu.ACC((TILE_N, own_rows), jnp.float32)
                sums = pl.run_scoped(partial(accumulate, index * steps), *(shape,) * blocks)
                for piece in range(results.count):
                    block, rows_before = divmod(piece, row_pieces)
                    few = slice(rows_before * PIECE, (rows_before + 1) * PIECE)
                    some = [total[:, few] for total in (sums if is_swiglu else (sums[block],))]
                    value = some[0]
                    if not returns_sums:
                        value = finished(some, operands.bias, place(piece)[1], axis=0)
                    results.write(piece, value)

            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((ROW_TILE, DEPTHS)), plgpu.SwizzleTransform(128))
    of_sums = (plgpu.TilingTransform((ROW_TILE, PIECE)), plgpu.SwizzleTransform(4 * PIECE))
    fused = "_swiglu" * is_swiglu + "_biased" * (operands.bias is not None)
    fused += "_residual" * (operands.residual is not None) + f"_parts{parts}" * (parts > 1)
    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((parts, width, -(-rows // PIECE) * PIECE), jnp.float32)
            if returns_sums
            else jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
        ),
        grid=(tiles.ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=f"int4_matmul_{depth}x{width}_rows{rows}{fused}",
        scratch_types=[
            Scratch(
                x=plgpu.SMEM((stages, tuning.rows, DEPTHS), jnp.bfloat16, transforms=swizzled),
                words=plgpu.SMEM((*ring_shape, TILE_N // COLUMNS, 1, UNIT), jnp.int32),
                scales=plgpu.SMEM((*ring_shape, 1, TILE_N), operands.scales[0].dtype),
                zeros=plgpu.SMEM((*ring_shape, 2, TILE_N), jnp.uint8) if has_zeros else None,
                out=(
                    plgpu.SMEM((CONSUMERS, SLOTS, TILE_N, PIECE), jnp.float32, transforms=of_sums)
                    if returns_sums
                    else plgpu.SMEM(
                        (CONSUMERS, SLOTS, PIECE, TILE_N), jnp.bfloat16, transforms=swizzled
                    )
                ),
                weights=plgpu.SMEM(
                    (CONSUMERS, blocks, TILE_N, DEPTHS), jnp.bfloat16, transforms=swizzled
                )
                if interpreting()
                else None,
                full=plgpu.Barrier(
                    num_barriers=stages, num_arrivals=1 + sides * blocks * (3 if has_zeros else 2)
                ),
                consumed=ring.consumed(1),
                residual=plgpu.Barrier(num_barriers=CONSUMERS * SLOTS),
            )
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(operands)


def _stages(operands: Operands[jax.Array], returns_sums: bool, tuning: Tuning) -> int:
    """Return how many stages of the rings fit."""
    fixed = CONSUMERS * SLOTS * PIECE * TILE_N * (4 if returns_sums else 2)
    by_column = operands.scales[0].dtype.itemsize + (2 if operands.zeros else 0)
    step = 2 * tuning.rows * DEPTHS + tuning.columns * (DEPTHS // 2 + by_column)
    return (MAX_SMEM - fixed - 4096) // step  # barriers, alignment


def _kept(weights: jax.Array, ref: Ref) -> Ref:
    """Return a ref to the weights, for the interpreter: its wgmma takes no operand in registers."""
    ref[...] = weights
    plgpu.commit_smem()
    return ref
