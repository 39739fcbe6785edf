"""Products of many rows on Hopper, whose number changes no bits: those of prefill.

cuBLAS divides the depth among blocks where a product has few tiles, so the bits of a row depend on
how many others there are. Here one warpgroup sums the depth in order, 16 at a time, for all numbers
of rows (docs/notes/prefill-products.md has the cost).

Warpgroups of a CTA multiply 64 rows each, and one more starts the TMA copies. CTAs stay for all of
their tiles, so copies of the next tile are in flight while one ends. Copies fill rows beyond the
last one with zeros, and write none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import NUM_SMS, interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.mosaic_gpu.many_rows_ring import (
    CONSUMER_ROWS,
    ManyRowsRing,
)
from pallas_kernels.matmul.plan import MAX_SMEM, Product
from pallas_kernels.mosaic import RegisterShares, load
from pallas_kernels.swiglu import swiglu
from pallas_kernels.types import Accumulator, Barrier, Index, Ref, Slice

T = TypeVar("T")  # an array, the kernel's ref, or its type

LAYOUT = plgpu.Layout.WGMMA
TILE_K = 64  # depth of a step
PIECE = 64  # columns of a result that are written at once
# Rows and columns of a tile; of gate and up, half as many columns of each.
TILES = ((128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128), (192, 128), (192, 64))
SLOTS = 2  # pieces of a warpgroup in flight
# Of a CTA's step and of all CTAs together, fitted to 150 tiles of 144 to 2,016 rows on an H200.
VALUES_A_MICROSECOND = 40_960  # sums of a step of 64
BYTES_A_MICROSECOND = 80_000
BYTES_OF_ALL_A_MICROSECOND = 9_000_000
MIN_STAGES = 2  # a slot is free after the next step's product has started


class Operands(NamedTuple, Generic[T]):
    """Operands of the kernel, in bfloat16.

    x:        [rows, depth]
    weights:  one [depth, width], or gate and up
    bias:     [width]
    residual: [rows, width]
    """

    x: T
    weights: tuple[T, ...]
    bias: T | None
    residual: T | None


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    x, weights: rings of steps; each weight has a place of its own in a step's slot
    out:        pieces of the result, and of the residual before it:
                [warpgroups, SLOTS, CONSUMER_ROWS, PIECE]
    full:       for each slot of the rings, its copies have arrived
    consumed:   for each slot of the rings, the warpgroups have read it
    residual:   for each piece's slot, the residual has arrived
    """

    x: T
    weights: T
    out: T
    full: Barrier
    consumed: Barrier
    residual: Barrier


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    rows: of a tile: 64 for two warpgroups side by side, else 64 for each warpgroup
    tile: columns of a tile, of each weight
    ctas: that run at once
    """

    rows: int
    tile: int
    ctas: int = NUM_SMS

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return max(2, self.rows // CONSUMER_ROWS)

    @property
    def side_by_side(self) -> int:
        """Warpgroups that multiply the same rows."""
        return self.consumers * CONSUMER_ROWS // self.rows

    def stages(self, products: int) -> int:
        """Return how many stages of the ring fit."""
        out = self.consumers * SLOTS * CONSUMER_ROWS * PIECE * 2
        fixed = out + 2048  # barriers, alignment
        return (MAX_SMEM - fixed) // (TILE_K * (self.rows + products * self.tile) * 2)

    def tiles(self, rows: int, width: int) -> int:
        """Return the tiles of a result."""
        return -(-rows // self.rows) * (width // self.tile)

    def microseconds(self, product: Product) -> float:
        """Return the estimate by which tiles are chosen: within 3 % of the best one measured."""
        tiles, columns = self.tiles(product.rows, product.width), product.accumulators * self.tile
        ctas = min(tiles, self.ctas)
        read = (self.rows + columns) * TILE_K * 2  # of a step
        step = max(
            self.rows * columns / VALUES_A_MICROSECOND,
            read / BYTES_A_MICROSECOND,
            ctas * read / BYTES_OF_ALL_A_MICROSECOND,
        )
        return -(-tiles // ctas) * (step * product.depth / TILE_K + 1)


def tunings(product: Product) -> list[Tuning]:
    """Return the tiles that divide the product's width."""
    found = (Tuning(rows, columns // product.accumulators) for rows, columns in TILES)
    return [
        tuning
        for tuning in found
        if product.width % tuning.tile == 0 and tuning.tile % (PIECE * tuning.side_by_side) == 0
    ]


def choose_tuning(product: Product) -> Tuning:
    """Return the tile whose waves take least time."""
    return min(tunings(product), key=lambda tuning: tuning.microseconds(product))


def unsupported(product: Product) -> str | None:
    """Return why this kernel cannot make this product, None if it can."""
    dtypes = [a.dtype for a in (product.x, *product.weights)]
    if any(dtype != jnp.bfloat16 for dtype in (*dtypes, jnp.dtype(product.out_dtype))):
        got = " and ".join(sorted({jnp.dtype(d).name for d in (*dtypes, product.out_dtype)}))
        return f"expected bfloat16 operands and result, got {got}"
    if product.normed or product.norms:
        return "expected no norm with many rows, got one"
    if product.depth % TILE_K or product.depth < MIN_STAGES * TILE_K:
        return f"expected a depth that is a multiple of {TILE_K} from 128 on, got {product.depth}"
    if any(width % PIECE for width in product.widths):
        return f"expected widths that are multiples of {PIECE}, got {product.widths}"
    return None


def matmul(inputs: Inputs, *, decoded: bool = False, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.matmul.matmul.

    decoded: whether a kernel of the same program makes the weights
    """
    if len(inputs.weights) > 1 and not inputs.swiglu:
        parts = (matmul(part, decoded=decoded, tuning=tuning) for part in inputs.by_weight())
        return jnp.concatenate(tuple(parts), axis=-1)
    rows = inputs.x.shape[0]
    # TMA ends a copy where the array ends; the interpreter does not.
    tuning = tuning or choose_tuning(Product.of(inputs))
    idle = -rows % tuning.rows if interpreting() else 0
    padding = ((0, idle), (0, 0))
    x, residual = inputs.x, inputs.residual
    if idle:
        x = jnp.pad(x, padding)
        residual = None if residual is None else jnp.pad(residual, padding)
    operands = Operands(x, inputs.weights, inputs.bias, residual)
    out = _matmul(operands, decoded=decoded, tuning=tuning)
    return out[:rows] if idle else out


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("decoded", "tuning"))
def _matmul(operands: Operands[jax.Array], *, decoded: bool, tuning: Tuning) -> jax.Array:
    (rows, depth), width = operands.x.shape, operands.weights[0].shape[1]
    tile, products, steps = tuning.tile, len(operands.weights), depth // TILE_K
    consumers, side_by_side = tuning.consumers, tuning.side_by_side
    own_tile = tile // side_by_side  # columns of a warpgroup
    tiles, row_tiles = tuning.tiles(rows, width), -(-rows // tuning.rows)
    ctas = min(tiles, tuning.ctas)
    # A CTA may have a tile less than others.
    stages = min(tuning.stages(products), tiles // ctas * steps)
    ring = ManyRowsRing(stages, steps, TILE_K, consumers)
    registers = RegisterShares(consumers, *((232, 40) if consumers == 2 else (160, 24)))
    pieces, pdl = own_tile // PIECE, not interpreting()
    assert stages >= MIN_STAGES and width % tile == 0 and own_tile % PIECE == 0, tuning

    def body(operands: Operands[Ref], out: Ref, scratch: Scratch[Ref]) -> None:
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        tiles_here = lax.div(tiles - cta + (ctas - 1), ctas)
        turns = tiles_here * steps

        def first_of(index: Index) -> tuple[jax.Array, jax.Array]:
            """Return the first row and column of the CTA's n-th tile.

            CTAs take tiles in turn, and all rows of the same columns first.
            """
            place = cta + index * ctas
            return lax.rem(place, row_tiles) * tuning.rows, lax.div(place, row_tiles) * tile

        def load_weights(turn: jax.Array) -> None:
            slot, k = ring.place(turn)
            _, column = first_of(lax.div(turn, steps))
            for i, weight in enumerate(operands.weights):
                plgpu.copy_gmem_to_smem(
                    weight.at[k, pl.ds(column, tile)],
                    scratch.weights.at[slot, i],
                    scratch.full.at[slot],
                )

        def load_x(turn: jax.Array) -> None:
            slot, k = ring.place(turn)
            row, _ = first_of(lax.div(turn, steps))
            plgpu.copy_gmem_to_smem(
                operands.x.at[pl.ds(row, tuning.rows), k],
                scratch.x.at[slot],
                scratch.full.at[slot],
            )

        @pl.when(wg == consumers)
        def _produce() -> None:
            registers.give_back()
            ring.produce(
                *(turns, load_weights, load_x, scratch.consumed),
                weights_first=not decoded,
                # Down follows gate and up. A smaller kernel would crowd into the first free SMs.
                launches_next=products == 2,
            )

        @pl.when(wg < consumers)
        def _consume() -> None:
            registers.take()
            if pdl:
                plgpu.griddepcontrol_wait()
            own_row = lax.div(wg, side_by_side) * CONSUMER_ROWS
            own_column = lax.rem(wg, side_by_side) * own_tile
            mine = pl.ds(own_row, CONSUMER_ROWS)
            own_columns = pl.ds(own_column, own_tile) if side_by_side > 1 else slice(None)

            def accumulate(first_turn: jax.Array, *sums: Accumulator) -> tuple[jax.Array, ...]:
                @pl.loop(first_turn, first_turn + steps)
                def _step(turn: jax.Array) -> None:
                    slot = lax.rem(turn, stages)
                    plgpu.barrier_wait(scratch.full.at[slot])
                    for i, acc in enumerate(sums):
                        weights = scratch.weights.at[slot, i, :, own_columns]
                        plgpu.wgmma(acc, scratch.x.at[slot, mine], weights)
                    plgpu.wgmma_wait(products)  # the step before is done: free its slot
                    before = lax.rem(turn + (stages - 1), stages)
                    pl.when(turn > first_turn)(
                        lambda: plgpu.barrier_arrive(scratch.consumed.at[before])
                    )

                # Without a barrier, LLVM reads the sums of an unrolled loop before they are made.
                found = tuple(lax.optimization_barrier(acc[...]) for acc in sums)
                last = lax.rem(first_turn + (steps - 1), stages)
                plgpu.barrier_arrive(scratch.consumed.at[last])
                return found

            @pl.loop(0, tiles_here)
            def _tile(index: jax.Array) -> None:
                row, column = first_of(index)
                rows_here = pl.ds(row + own_row, CONSUMER_ROWS)
                column = column + own_column

                def here(piece: int) -> tuple[Slice, Slice]:
                    return rows_here, pl.ds(column + piece * PIECE, PIECE)

                def load_residual(piece: int) -> None:
                    if operands.residual is None:
                        return
                    slot = piece % SLOTS
                    plgpu.copy_gmem_to_smem(
                        operands.residual.at[here(piece)],
                        scratch.out.at[wg, slot],
                        scratch.residual.at[wg * SLOTS + slot],
                    )

                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                for piece in range(min(SLOTS, pieces)):
                    load_residual(piece)
                shape = plgpu.ACC((CONSUMER_ROWS, own_tile), jnp.float32)
                sums = pl.run_scoped(partial(accumulate, index * steps), *(shape,) * products)
                for piece in range(pieces):
                    slot, columns = piece % SLOTS, slice(piece * PIECE, (piece + 1) * PIECE)
                    target = scratch.out.at[wg, slot]
                    value = _finished([s[:, columns] for s in sums], operands.bias, here(piece)[1])
                    if operands.residual is not None:
                        plgpu.barrier_wait(scratch.residual.at[wg * SLOTS + slot])
                        residual = target[...].astype(jnp.float32)
                        value = (residual + value.astype(jnp.float32)).astype(jnp.bfloat16)
                    elif piece >= SLOTS:
                        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
                    target[...] = value
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(target, out.at[here(piece)])
                    if operands.residual is not None and piece + SLOTS < pieces:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                        load_residual(piece + SLOTS)

            plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, TILE_K)), plgpu.SwizzleTransform(128))
    fused = "_swiglu" * (products == 2) + "_biased" * (operands.bias is not None)
    fused += "_residual" * (operands.residual is not None)
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        grid=(ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name=f"matmul_{depth}x{width}_rows{rows}{fused}",
        scratch_types=[
            Scratch(
                x=plgpu.SMEM((stages, tuning.rows, TILE_K), jnp.bfloat16, transforms=transforms),
                weights=plgpu.SMEM(
                    (stages, products, TILE_K, tile), jnp.bfloat16, transforms=transforms
                ),
                out=plgpu.SMEM(
                    (consumers, SLOTS, CONSUMER_ROWS, PIECE), jnp.bfloat16, transforms=transforms
                ),
                full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + products),
                consumed=ring.consumed(1),
                residual=plgpu.Barrier(num_barriers=consumers * SLOTS),
            )
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(operands)


def _finished(sums: list[jax.Array], bias: Ref | None, columns: Slice) -> jax.Array:
    """Return a piece of the result in bfloat16, before a residual."""
    if bias is not None:
        (total,) = sums
        added = load(bias.at[columns], LAYOUT.reduce(0), optimized=False).astype(jnp.float32)
        sums = [total + lax.broadcast_in_dim(added, total.shape, [1])]
    rounded = [total.astype(jnp.bfloat16) for total in sums]
    if len(rounded) == 1:
        return rounded[0]
    gate, up = (value.astype(jnp.float32) for value in rounded)
    return swiglu(gate, up)
