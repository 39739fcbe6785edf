"""Products of many rows on Hopper, whose number changes no bits: those of prefill.

cuBLAS divides the depth among blocks where a product has few tiles, so the bits of a row depend on
how many others there are. Here one warpgroup sums the depth in order, 16 at a time, for all numbers
of rows (docs/notes/prefill-products.md has the cost).

Warpgroups of a CTA multiply 64 rows each, and one more starts the TMA copies. CTAs stay for all of
their tiles, so copies of the next tile are in flight while one ends. Copies fill rows beyond the
last one with zeros, and write none of them.

Operands are bfloat16, or codes in fp8 with a scale for each 128 depths of a row, and for each block
of 128 x 128 of a weight. A product of codes ends after 128 depths, or after 64 where 128 do not
divide the depth: registers add it, times its scales, to the sums in float32.
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
    ROW_TILE,
    ManyRowsRing,
    TileTurns,
    with_idle_rows,
)
from pallas_kernels.matmul.mosaic_gpu.result_pieces import SLOTS, ResultPieces, finished
from pallas_kernels.matmul.plan import MAX_SMEM, Product
from pallas_kernels.mosaic import RegisterShares, load
from pallas_kernels.types import Accumulator, Barrier, Index, Ref, Slice

T = TypeVar("T")  # an array, the kernel's ref, or its type

LAYOUT = plgpu.Layout.WGMMA
TILE_K = 64  # depth of a step in bfloat16
BLOCK = 128  # depths and columns of codes that share a scale
STEP_BYTES = 128  # of a row in a step, at most: half a block of codes has 64
PIECE = 64  # columns of a result that are written at once
# Rows and columns of a tile; of gate and up, half as many columns of each.
TILES = ((128, 256), (128, 192), (128, 128), (128, 64), (64, 256), (64, 128), (192, 128), (192, 64))
# Of a CTA's step and of all CTAs together, fitted to 150 tiles of 144 to 2,016 rows on an H200.
VALUES_A_MICROSECOND = 40_960  # sums of a step: codes multiply twice as many depths in the time
BYTES_A_MICROSECOND = 80_000
BYTES_OF_ALL_A_MICROSECOND = 9_000_000
MIN_STAGES = 2  # a slot is free after the next step's product has started
MOST_SUMS_OF_CODES = 128  # columns of a warpgroup, whose registers have product and sum


def rows_of_tiles(rows: int) -> int:
    """Return the most rows that all tiles have together, of any tuning."""
    return max(-(-rows // of_tile) * of_tile for of_tile, _ in TILES)


def step_depth(depth: int, *, codes: bool) -> int:
    """Return the depth of a step: TMA tiles divide the depth."""
    if not codes:
        return TILE_K
    return BLOCK if depth % BLOCK == 0 else BLOCK // 2


class BlockScales(NamedTuple, Generic[T]):
    """Scales of codes, float32.

    rows:    [depth / BLOCK rounded up, rows of all tiles or more]
    weights: of each weight, [width / BLOCK rounded up, depth / BLOCK rounded up]
    """

    rows: T
    weights: tuple[T, ...]


class Operands(NamedTuple, Generic[T]):
    """Operands of the kernel: bias and residual in bfloat16, the others too or float8_e4m3fn.

    x:        [rows, depth]
    weights:  one [depth, width], or gate and up. Codes are [width, depth]
    bias:     [width]
    residual: [rows, width]
    scales:   of codes; None without them
    """

    x: T
    weights: tuple[T, ...]
    bias: T | None
    residual: T | None
    scales: BlockScales[T] | None = None


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
        return (MAX_SMEM - fixed) // (STEP_BYTES * (self.rows + products * self.tile))

    def tiles(self, rows: int, width: int) -> int:
        """Return the tiles of a result."""
        return -(-rows // self.rows) * (width // self.tile)

    def microseconds(self, product: Product) -> float:
        """Return the estimate by which tiles are chosen: within 3 % of the best one in bfloat16.

        Codes have half of the bytes, and the tensor cores multiply them at twice the rate.
        """
        tiles, columns = self.tiles(product.rows, product.width), product.accumulators * self.tile
        ctas = min(tiles, self.ctas)
        read = (self.rows + columns) * STEP_BYTES  # of a step
        step = max(
            self.rows * columns / VALUES_A_MICROSECOND,
            read / BYTES_A_MICROSECOND,
            ctas * read / BYTES_OF_ALL_A_MICROSECOND,
        )
        steps = product.depth * product.weights[0].dtype.itemsize / STEP_BYTES
        return -(-tiles // ctas) * (step * steps + 1)


def tunings(product: Product) -> list[Tuning]:
    """Return the tiles that divide the product's width."""
    found = [Tuning(rows, columns // product.accumulators) for rows, columns in TILES]
    if product.weights[0].dtype.itemsize == 1:
        most = MOST_SUMS_OF_CODES // product.accumulators
        found = [tuning for tuning in found if tuning.tile // tuning.side_by_side <= most]
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
    return unfit(product, least_depth=MIN_STAGES * TILE_K)


def unfit(product: Product, *, least_depth: int) -> str | None:
    """Return what of the product does not fit the kernel beside its dtypes, None if all does."""
    depth = product.depth
    if product.normed or product.norms:
        return "expected no norm with many rows, got one"
    if depth % TILE_K or depth < least_depth:
        expected = f"a depth that is a multiple of {TILE_K} from {least_depth} on"
        return f"expected {expected}, got {depth}"
    if any(width % PIECE for width in product.widths):
        return f"expected widths that are multiples of {PIECE}, got {product.widths}"
    return None


def matmul(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.matmul.matmul."""
    if len(inputs.weights) > 1 and not inputs.swiglu:
        parts = (matmul(part, tuning=tuning) for part in inputs.by_weight())
        return jnp.concatenate(tuple(parts), axis=-1)
    tuning = tuning or choose_tuning(Product.of(inputs))
    operands = Operands(inputs.x, inputs.weights, inputs.bias, inputs.residual)
    return multiply(operands, tuning)


def multiply(operands: Operands[jax.Array], tuning: Tuning) -> jax.Array:
    """Return the product in bfloat16, [rows, width]; see matmul."""
    rows = operands.x.shape[0]
    x, residual = with_idle_rows(operands.x, operands.residual, tuning.rows)
    out = _matmul(operands._replace(x=x, residual=residual), tuning=tuning)
    return out[:rows] if x.shape[0] > rows else out


@dataclass(frozen=True)
class _Blocks:
    """Products of codes, as a warpgroup makes and adds them.

    rows, columns: of the warpgroup in a slot of the rings
    width:         its columns
    """

    ring: ManyRowsRing
    scratch: Scratch[Ref]
    scales: BlockScales[Ref]
    rows: Slice
    columns: Slice
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a sum."""
        return CONSUMER_ROWS, self.width

    def sums(self, first: jax.Array, rows: Slice, column: jax.Array) -> tuple[jax.Array, ...]:
        """Return the sums of all steps' products, each times the scales of its depths.

        first:        turn of a tile
        rows, column: the warpgroup's rows, and its first column, of the result
        """
        steps, steps_a_block = self.ring.steps, BLOCK // self.ring.tile_k

        def step(turn: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            slot = lax.rem(turn, self.ring.stages)
            block = lax.div(lax.rem(turn, steps), steps_a_block)
            by_row = load(self.scales.rows.at[block, rows], LAYOUT.reduce(1), optimized=False)
            of_weights = [ref[lax.div(column, BLOCK), block] for ref in self.scales.weights]
            plgpu.barrier_wait(self.scratch.full.at[slot])
            found = self._multiply(slot)
            plgpu.barrier_arrive(self.scratch.consumed.at[slot])
            factors = [
                lax.broadcast_in_dim(by_row * scale, self.shape, [0]) for scale in of_weights
            ]
            return tuple(
                total + added * factor
                for total, added, factor in zip(totals, found, factors, strict=True)
            )

        zeros = plgpu.layout_cast(jnp.zeros(self.shape, jnp.float32), LAYOUT)
        return lax.fori_loop(first, first + steps, step, (zeros,) * len(self.scales.weights))

    def _multiply(self, slot: jax.Array) -> tuple[jax.Array, ...]:
        """Return the product of a step for each weight."""

        def multiply(*sums: Accumulator) -> tuple[jax.Array, ...]:
            for i, acc in enumerate(sums):
                weights = self.scratch.weights.at[slot, i, self.columns]
                plgpu.wgmma(acc, self.scratch.x.at[slot, self.rows], weights.transpose((1, 0)))
            plgpu.wgmma_wait(0)
            return tuple(lax.optimization_barrier(acc[...]) for acc in sums)

        count = len(self.scales.weights)
        return pl.run_scoped(multiply, *(plgpu.ACC(self.shape, jnp.float32),) * count)


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def _matmul(operands: Operands[jax.Array], *, tuning: Tuning) -> jax.Array:
    (rows, depth), dtype = operands.x.shape, operands.x.dtype
    are_codes = operands.scales is not None
    width = operands.weights[0].shape[0 if are_codes else 1]
    tile_k = step_depth(depth, codes=are_codes)
    tile, products, steps = tuning.tile, len(operands.weights), depth // tile_k
    consumers, side_by_side = tuning.consumers, tuning.side_by_side
    own_tile = tile // side_by_side  # columns of a warpgroup
    tiles = TileTurns(tuning.tiles(rows, width), -(-rows // tuning.rows), tuning.ctas)
    stages = min(tuning.stages(products), tiles.fewest * steps)
    ring = ManyRowsRing(stages, steps, tile_k, consumers)
    registers = RegisterShares(consumers, *((232, 40) if consumers == 2 else (160, 24)))
    pieces, pdl = own_tile // PIECE, not interpreting()
    assert stages >= MIN_STAGES and width % tile == 0 and own_tile % PIECE == 0, tuning
    assert not are_codes or BLOCK % own_tile == 0, tuning  # columns of one scale

    def body(operands: Operands[Ref], out: Ref, scratch: Scratch[Ref]) -> None:
        wg, cta = lax.axis_index("wg"), lax.axis_index("cta")
        tiles_here = tiles.here(cta)
        turns = tiles_here * steps

        def first_of(index: Index) -> tuple[jax.Array, jax.Array]:
            """Return the first row and column of the CTA's n-th tile."""
            rows, columns = tiles.place(cta, index)
            return rows * tuning.rows, columns * tile

        def load_weights(turn: jax.Array) -> None:
            slot, k = ring.place(turn)
            _, column = first_of(lax.div(turn, steps))
            columns = pl.ds(column, tile)
            for i, weight in enumerate(operands.weights):
                plgpu.copy_gmem_to_smem(
                    weight.at[columns, k] if are_codes else weight.at[k, columns],
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
                # Down follows gate and up, or the kernel that makes its codes. A smaller product
                # would crowd into the first free SMs.
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

                def place(piece: int) -> tuple[Slice, Slice]:
                    return rows_here, pl.ds(column + piece * PIECE, PIECE)

                results = ResultPieces(
                    count=pieces,
                    slots=scratch.out.at[wg],
                    out=out,
                    residual=operands.residual,
                    arrived=scratch.residual,
                    first=wg * SLOTS,
                    place=place,
                )
                results.begin()
                if operands.scales is None:
                    shape = plgpu.ACC((CONSUMER_ROWS, own_tile), jnp.float32)
                    sums = pl.run_scoped(partial(accumulate, index * steps), *(shape,) * products)
                else:
                    blocks = _Blocks(ring, scratch, operands.scales, mine, own_columns, own_tile)
                    sums = blocks.sums(index * steps, rows_here, column)
                for piece in range(pieces):
                    few = slice(piece * PIECE, (piece + 1) * PIECE)
                    own = [total[:, few] for total in sums]
                    results.write(piece, finished(own, operands.bias, place(piece)[1], axis=1))

            plgpu.wait_smem_to_gmem(0)

    swizzle = plgpu.SwizzleTransform(tile_k * dtype.itemsize)
    transforms = (plgpu.TilingTransform((ROW_TILE, tile_k)), swizzle)
    out_transforms = (
        plgpu.TilingTransform((ROW_TILE, PIECE)),
        plgpu.SwizzleTransform(2 * PIECE),
    )
    step_of_weights = (tile, tile_k) if are_codes else (tile_k, tile)
    fused = "_swiglu" * (products == 2) + "_biased" * (operands.bias is not None)
    fused += "_residual" * (operands.residual is not None)
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        grid=(tiles.ctas,),
        grid_names=("cta",),
        num_threads=consumers + 1,
        thread_name="wg",
        kernel_name=f"{'fp8_' * are_codes}matmul_{depth}x{width}_rows{rows}{fused}",
        scratch_types=[
            Scratch(
                x=plgpu.SMEM((stages, tuning.rows, tile_k), dtype, transforms=transforms),
                weights=plgpu.SMEM(
                    (stages, products, *step_of_weights), dtype, transforms=transforms
                ),
                out=plgpu.SMEM(
                    (consumers, SLOTS, CONSUMER_ROWS, PIECE),
                    jnp.bfloat16,
                    transforms=out_transforms,
                ),
                full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 + products),
                consumed=ring.consumed(1),
                residual=plgpu.Barrier(num_barriers=consumers * SLOTS),
            )
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(operands)
