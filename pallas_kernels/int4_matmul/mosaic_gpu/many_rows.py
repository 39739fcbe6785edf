"""Products of many rows with int4 weights on Hopper, decoded in registers on their way to wgmma.

A unit is an operand A of wgmma (weight.py), so a CTA makes the transposed tile: columns of weights
times rows. Two warpgroups have half of the tile's rows each. Each decodes all of its columns, one
block of 64 while the tensor cores multiply the other. A third warpgroup starts the TMA copies. CTAs
stay for all of their tiles, so copies of the next tile are in flight while one ends.

A weight is rounded to bfloat16 once, after its scale, as Int4Weight.to_array does. The depth is
summed in order, so a row's bits do not depend on the number of rows. Without that, a narrow result
is a sum of parts of the depth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, NamedTuple, TypeVar

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
from pallas_kernels.matmul.mosaic_gpu.many_rows_ring import ROW_TILE, ManyRowsRing, with_idle_rows
from pallas_kernels.matmul.plan import MAX_SMEM, TILE_N, Product
from pallas_kernels.mosaic import RegisterShares, load
from pallas_kernels.swiglu import swiglu
from pallas_kernels.types import Accumulator, Barrier, Index, Ref, Slice

T = TypeVar("T")  # an array, the kernel's ref, or its type

LAYOUT = plgpu.Layout.WGMMA
CONSUMERS = 2
OWN_ROWS = (64, 96, 128)  # of a warpgroup
PIECE = 32  # rows of a result that are written at once
SLOTS = 2  # pieces of a warpgroup in flight
MIN_STAGES = 2
PARTS = (2, 4)  # of the depth
PART_STEPS = 8  # of a part of the depth, at least
# Of a step, of a row and a block in it, and of the sums of parts: fitted to 14 tiles of 128 and 256
# rows on an H200.
STEP_MICROSECONDS, ROW_MICROSECONDS = 0.27, 0.0016
SUM_MICROSECONDS, SUMS_A_MICROSECOND = 4, 210_000


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
    words:    ring of steps, [stages, blocks, 4, 1, UNIT]
    scales:   ring of steps, [stages, blocks, 1, TILE_N]
    zeros:    ring of steps, [stages, blocks, 2, TILE_N], of which the first row is read
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

    own_rows: of a warpgroup
    blocks:   of TILE_N columns that a CTA multiplies at once: gate and up, or of one weight
    parts:    of the depth
    ctas:     that run at once
    """

    own_rows: int
    blocks: int
    parts: int = 1
    ctas: int = NUM_SMS

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return CONSUMERS * self.own_rows

    def tiles(self, product: Product) -> int:
        """Return the tiles of a product, each part of the depth counted."""
        columns = sum(product.widths) // (self.blocks * TILE_N)
        return columns * -(-product.rows // self.rows) * self.parts

    def microseconds(self, product: Product) -> float:
        """Return the estimate by which tiles are chosen; see STEP_MICROSECONDS."""
        waves, steps = -(-self.tiles(product) // self.ctas), product.depth // DEPTHS // self.parts
        step = STEP_MICROSECONDS + self.blocks * self.own_rows * ROW_MICROSECONDS
        multiplied = waves * steps * step
        if self.parts == 1:
            return multiplied
        sums = self.parts * product.rows * product.width
        return multiplied + SUM_MICROSECONDS + sums / SUMS_A_MICROSECOND


def choose_tuning(product: Product) -> Tuning:
    """Return the tile whose waves take least time, of those that decode weights least often.

    The depth has parts where it is not summed in order, and then only if all run at once.
    """
    steps = product.depth // DEPTHS
    blocks = (2,) if product.swiglu else (2, 1) if product.width % (2 * TILE_N) == 0 else (1,)
    parts = [1]
    if not (product.in_order or product.swiglu):
        parts += [n for n in PARTS if steps % n == 0 and steps >= n * PART_STEPS]
    fewest = -(-product.rows // (CONSUMERS * OWN_ROWS[-1]))
    heights = [own for own in OWN_ROWS if -(-product.rows // (CONSUMERS * own)) == fewest]
    found = [Tuning(own, b, n) for n in parts for b in blocks for own in heights]
    found = [t for t in found if t.parts == 1 or t.tiles(product) <= t.ctas]
    return min(found, key=lambda tuning: tuning.microseconds(product))


def unsupported(product: Product) -> str | None:
    """Return why the kernel cannot make this product, None if it can."""
    if reason := unfit(product):
        return reason
    if product.normed or product.norms:
        return "expected no norm with many rows, got one"
    if product.swiglu and product.out_dtype != jnp.bfloat16:
        return f"expected SwiGLU in bfloat16, got {jnp.dtype(product.out_dtype).name}"
    if product.depth < MIN_STAGES * DEPTHS:
        return f"expected a depth from {MIN_STAGES * DEPTHS} on, got {product.depth}"
    return None


def multiply(inputs: Inputs[Int4Weight], *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.int4_matmul.int4_matmul."""
    if len(inputs.weights) > 1 and not inputs.swiglu:
        parts = [multiply(part, tuning=tuning) for part in inputs.by_weight()]
        return jnp.concatenate(parts, axis=-1)
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
    wide = tuning.parts > 1 or inputs.out_dtype != jnp.bfloat16
    if wide:
        parts = _matmul(operands._replace(bias=None, residual=None), wide=True, tuning=tuning)
        out = reference.finish(inputs, [parts[..., : x.shape[0]].sum(0).T])
    else:
        out = _matmul(operands, wide=False, tuning=tuning)
    return out[:rows] if x.shape[0] > rows else out


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("wide", "tuning"))
def _matmul(operands: Operands[jax.Array], *, wide: bool, tuning: Tuning) -> jax.Array:
    """Return the product in bfloat16, [rows, width]; or sums in float32, [parts, width, rows].

    wide: whether to return the latter, of whole pieces of rows. Only 16-bit values can be stored
          transposed
    """
    rows, depth = operands.x.shape
    is_swiglu = len(operands.words) == 2
    width = operands.words[0].shape[0] * COLUMNS
    group = depth // operands.scales[0].shape[0]
    blocks = tuning.blocks
    tile = TILE_N if is_swiglu else blocks * TILE_N  # columns of the result
    own_rows, parts = tuning.own_rows, tuning.parts
    steps, row_tiles = depth // DEPTHS // parts, -(-rows // tuning.rows)
    tiles = row_tiles * (width // tile) * parts
    ctas = min(tiles, tuning.ctas)
    # A CTA may have a tile less than others.
    stages = min(_stages(operands, wide, tuning), tiles // ctas * steps)
    ring = ManyRowsRing(stages, steps, DEPTHS, CONSUMERS)
    registers = RegisterShares(CONSUMERS, 216, 72)
    pieces, pdl, zeros = own_rows // PIECE, not interpreting(), bool(operands.zeros)
    assert not width % tile and stages >= MIN_STAGES and own_rows % PIECE == 0, tuning
    assert not is_swiglu or (blocks == 2 and not wide), tuning

    def body(operands: Operands[Ref], out: Ref, scratch: Scratch[Ref]) -> None:
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        tiles_here = lax.div(tiles - cta + (ctas - 1), ctas)
        turns = tiles_here * steps

        def place_of(index: Index) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Return first row, part of the depth and number of the column tile of the n-th tile.

            CTAs take tiles in turn, and all rows of the same columns first.
            """
            place = cta + index * ctas
            row, place = lax.rem(place, row_tiles) * tuning.rows, lax.div(place, row_tiles)
            return row, lax.rem(place, parts), lax.div(place, parts)

        def load_weights(turn: jax.Array) -> None:
            slot, full = lax.rem(turn, stages), scratch.full.at[lax.rem(turn, stages)]
            _, part, column = place_of(lax.div(turn, steps))
            unit = lax.rem(turn, steps) + part * steps
            place = lax.div(unit * DEPTHS, group)
            for block in range(blocks):
                weight = block if is_swiglu else 0
                first = column * (tile // TILE_N) + (0 if is_swiglu else block)
                columns = pl.ds(first * TILE_N, TILE_N)
                plgpu.copy_gmem_to_smem(
                    operands.words[weight].at[
                        pl.ds(first * (TILE_N // COLUMNS), TILE_N // COLUMNS), pl.ds(unit, 1)
                    ],
                    scratch.words.at[slot, block],
                    full,
                )
                here = pl.ds(place, 1), columns
                plgpu.copy_gmem_to_smem(
                    operands.scales[weight].at[here], scratch.scales.at[slot, block], full
                )
                if scratch.zeros is not None:
                    target = scratch.zeros.at[slot, block, pl.ds(0, 1)]
                    plgpu.copy_gmem_to_smem(operands.zeros[weight].at[here], target, full)

        def load_x(turn: jax.Array) -> None:
            slot = lax.rem(turn, stages)
            row, part, _ = place_of(lax.div(turn, steps))
            unit = lax.rem(turn, steps) + part * steps
            plgpu.copy_gmem_to_smem(
                operands.x.at[pl.ds(row, tuning.rows), pl.ds(unit * DEPTHS, DEPTHS)],
                scratch.x.at[slot],
                scratch.full.at[slot],
            )

        @pl.when(wg == CONSUMERS)
        def _produce() -> None:
            registers.give_back()
            ring.produce(turns, load_weights, load_x, scratch.consumed, launches_next=is_swiglu)

        @pl.when(wg < CONSUMERS)
        def _consume() -> None:
            registers.take()
            if pdl:
                plgpu.griddepcontrol_wait()
            mine = pl.ds(wg * own_rows, own_rows)

            def accumulate(first_turn: jax.Array, *sums: Accumulator) -> tuple[jax.Array, ...]:
                @pl.loop(first_turn, first_turn + steps)
                def _step(turn: jax.Array) -> None:
                    slot = lax.rem(turn, stages)
                    plgpu.barrier_wait(scratch.full.at[slot])
                    zeros = None if scratch.zeros is None else scratch.zeros.at[slot]
                    step = units.Step(scratch.words.at[slot], scratch.scales.at[slot], zeros)
                    x = scratch.x.at[slot, mine].transpose((1, 0))
                    for block, acc in enumerate(sums):
                        weights = units.values(step, block)
                        if scratch.weights is not None:
                            kept = scratch.weights.at[wg, block]
                            kept[...] = weights
                            plgpu.commit_smem()
                            weights = kept
                        plgpu.wgmma(acc, weights, x)
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(scratch.consumed.at[slot])

                # Without a barrier, LLVM reads the sums of an unrolled loop before they are made.
                return tuple(lax.optimization_barrier(acc[...]) for acc in sums)

            @pl.loop(0, tiles_here)
            def _tile(index: jax.Array) -> None:
                row, part, column = place_of(index)
                row = row + wg * own_rows

                def here(place: int) -> tuple[Slice, Slice]:
                    """Return rows and columns of a piece of the tile."""
                    block, piece = divmod(place, pieces)
                    first = column * tile + block * TILE_N
                    return pl.ds(row + piece * PIECE, PIECE), pl.ds(first, TILE_N)

                def load_residual(place: int) -> None:
                    if operands.residual is None:
                        return
                    slot = place % SLOTS
                    plgpu.copy_gmem_to_smem(
                        operands.residual.at[here(place)],
                        scratch.out.at[wg, slot],
                        scratch.residual.at[wg * SLOTS + slot],
                    )

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                places = pieces * (tile // TILE_N)
                for place in range(min(SLOTS, places)):
                    load_residual(place)
                shape = plgpu.ACC((TILE_N, own_rows), jnp.float32)
                sums = pl.run_scoped(partial(accumulate, index * steps), *(shape,) * blocks)
                for place in range(places):
                    block, piece = divmod(place, pieces)
                    slot = place % SLOTS
                    target = scratch.out.at[wg, slot]
                    few = slice(piece * PIECE, (piece + 1) * PIECE)
                    if wide:
                        if place >= SLOTS:
                            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                        target[...] = sums[block][:, few]
                    else:
                        own = sums if is_swiglu else sums[block : block + 1]
                        value = _finished([s[:, few] for s in own], operands.bias, here(place)[1])
                        turned = target.transpose((1, 0))
                        if operands.residual is not None:
                            plgpu.barrier_wait(scratch.residual.at[wg * SLOTS + slot])
                            residual = turned[...].astype(jnp.float32)
                            value = (residual + value.astype(jnp.float32)).astype(jnp.bfloat16)
                        elif place >= SLOTS:
                            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                        turned[...] = value
                    plgpu.commit_smem()
                    rows_here, columns = here(place)
                    there = (part, columns, rows_here) if wide else (rows_here, columns)
                    plgpu.copy_smem_to_gmem(target, out.at[there])
                    if operands.residual is not None and place + SLOTS < places:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        load_residual(place + SLOTS)

            plgpu.wait_smem_to_gmem(0)

    swizzled = (plgpu.TilingTransform((ROW_TILE, DEPTHS)), plgpu.SwizzleTransform(128))
    of_sums = (plgpu.TilingTransform((ROW_TILE, PIECE)), plgpu.SwizzleTransform(4 * PIECE))
    fused = "_swiglu" * is_swiglu + "_biased" * (operands.bias is not None)
    fused += "_residual" * (operands.residual is not None) + f"_parts{parts}" * (parts > 1)
    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((parts, width, -(-rows // PIECE) * PIECE), jnp.float32)
            if wide
            else jax.ShapeDtypeStruct((rows, width), jnp.bfloat16)
        ),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=f"int4_matmul_{depth}x{width}_rows{rows}{fused}",
        scratch_types=[
            Scratch(
                x=plgpu.SMEM((stages, tuning.rows, DEPTHS), jnp.bfloat16, transforms=swizzled),
                words=plgpu.SMEM((stages, blocks, TILE_N // COLUMNS, 1, UNIT), jnp.int32),
                scales=plgpu.SMEM((stages, blocks, 1, TILE_N), operands.scales[0].dtype),
                zeros=plgpu.SMEM((stages, blocks, 2, TILE_N), jnp.uint8) if zeros else None,
                out=(
                    plgpu.SMEM((CONSUMERS, SLOTS, TILE_N, PIECE), jnp.float32, transforms=of_sums)
                    if wide
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
                    num_barriers=stages, num_arrivals=1 + blocks * (3 if zeros else 2)
                ),
                consumed=ring.consumed(1),
                residual=plgpu.Barrier(num_barriers=CONSUMERS * SLOTS),
            )
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(operands)


def _stages(operands: Operands[jax.Array], wide: bool, tuning: Tuning) -> int:
    """Return how many stages of the rings fit."""
    fixed = CONSUMERS * SLOTS * PIECE * TILE_N * (4 if wide else 2)
    by_column = operands.scales[0].dtype.itemsize + (2 if operands.zeros else 0)
    step = 2 * tuning.rows * DEPTHS + tuning.blocks * TILE_N * (DEPTHS // 2 + by_column)
    return (MAX_SMEM - fixed - 4096) // step  # barriers, alignment


def _finished(sums: list[jax.Array], bias: Ref | None, columns: Slice) -> jax.Array:
    """Return a piece of the result in bfloat16, before a residual: [columns, rows]."""
    if bias is not None:
        (total,) = sums
        added = load(bias.at[columns], LAYOUT.reduce(1), optimized=False).astype(jnp.float32)
        sums = [total + lax.broadcast_in_dim(added, total.shape, [0])]
    rounded = [total.astype(jnp.bfloat16) for total in sums]
    if len(rounded) == 1:
        return rounded[0]
    gate, up = (value.astype(jnp.float32) for value in rounded)
    return swiglu(gate, up)
