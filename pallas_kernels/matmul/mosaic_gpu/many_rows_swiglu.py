"""silu(x @ gate) * (x @ up) of many rows on Hopper, where arithmetic is the limit.

At 256 rows the tensor cores set the time, and cuBLAS loses it to tiles that do not fill the last
wave: gate and up of Llama-3-8B are 224 tiles of 256 x 128 on 132 SMs. Here a block makes 128 rows
of as many columns as give every SM one block, 224 there (64 x 2 blocks). It passes over x twice
with one set of accumulators: gate first, kept in bfloat16 registers, then up. Both accumulators
lie in the same places, so the activation is elementwise in registers, and neither product goes
through memory. A single row tile has both accumulators in one pass, if its columns are at most
ONE_PASS_TILE.

Two warpgroups multiply 64 rows each, a third starts the TMA copies. Two blocks form a cluster and
read the same operand: each loads one half and sends it to both (multicast), because L2 could not
feed the tensor cores otherwise. Above each other they share the weights. Side by side, where one
row tile is all there is, they share x. L2 then sends 252 MB for a width of 12,288. Blocks of 96
columns that pass twice over an x of their own take 470 MB, and 80 us instead of 62 on an H200
(docs/notes/many-row-products.md).

Depth is summed in order, 16 at a time: a row's bits depend neither on its neighbours nor on their
number.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    CONSUMERS,
    TILE_ROWS,
    ManyRowsRing,
)
from pallas_kernels.matmul.plan import MAX_ROWS as FEW_ROWS
from pallas_kernels.matmul.plan import MAX_SMEM, Product
from pallas_kernels.mosaic import RegisterShares
from pallas_kernels.swiglu import swiglu as activated
from pallas_kernels.types import Accumulator, Barrier, Ref

MAX_ROWS = 256
TILE_K = 64  # depth of a step
# Columns of a block: one wgmma's N. 256 leaves too few registers.
TILES = (224, 192, 160, 128, 96, 64)
ONE_PASS_TILE = 128  # widest tile whose two accumulators fit into registers
BUSY_BLOCKS = 96  # that read as much as the memory gives; narrower tiles only repeat more of x


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    tile:    columns of a block
    stages:  of the ring of copies
    cluster: blocks that share the weights, or x where there is one row tile
    passes:  over x, 2 with a product each or 1 with both
    """

    tile: int
    stages: int
    cluster: int = 1
    passes: int = 2

    @property
    def products(self) -> int:
        """Products of a pass."""
        return 2 // self.passes

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, to within the barriers.

        The result is written through the ring.
        """
        return self.stages * TILE_K * (TILE_ROWS + self.products * self.tile) * 2 + 1024


def choose_tuning(rows: int, width: int) -> Tuning | None:
    """Return the tile whose waves take least time, None if no tile divides the width.

    The wider one of two equals. A single row tile takes the widest one that makes one pass and
    leaves BUSY_BLOCKS.
    """
    row_tiles = rows // TILE_ROWS
    candidates = [tile for tile in TILES if width % tile == 0]
    if not candidates:
        return None
    tile = min(candidates, key=lambda tile: -(-row_tiles * (width // tile) // NUM_SMS) * tile)
    sharers, passes = row_tiles, 2
    if row_tiles == 1:
        narrow = (tile for tile in candidates if tile <= ONE_PASS_TILE)
        busy = [tile for tile in narrow if BUSY_BLOCKS <= width // tile <= NUM_SMS]
        tile = max(busy, default=tile)
        sharers, passes = width // tile, 1 if tile <= ONE_PASS_TILE else 2
    cluster = 1 if sharers % 2 else 2
    tunings = (Tuning(tile, stages, cluster, passes) for stages in range(8, 1, -1))
    return next(tuning for tuning in tunings if tuning.smem_bytes <= MAX_SMEM)


def unsupported(product: Product) -> str | None:
    """Return why this kernel cannot make this product, None if it can."""
    (rows, depth), (gate, up) = product.x.shape, product.weights
    dtypes = product.x.dtype, gate.dtype, up.dtype
    out_dtype = jnp.dtype(product.out_dtype)
    if any(dtype != jnp.bfloat16 for dtype in (*dtypes, out_dtype)):
        got = f"{product.x.dtype}, {gate.dtype} and {out_dtype}"
        return f"expected bfloat16 operands and result, got {got}"
    if rows % TILE_ROWS or not TILE_ROWS <= rows <= MAX_ROWS:
        return (
            f"expected at most {FEW_ROWS} rows, or a multiple of {TILE_ROWS} up to {MAX_ROWS}, "
            f"of gate and up, got {rows}"
        )
    if product.residual or product.transposed or product.normed or product.norms:
        return (
            f"expected gate and up as they are and nothing beside them for {rows} rows, "
            "got a residual, a norm or transposed weights"
        )
    tuning = choose_tuning(rows, gate.shape[1])
    if depth % TILE_K or tuning is None:
        return (
            f"expected a depth that is a multiple of {TILE_K} and a width that one of {TILES} "
            f"divides, got {gate.shape}"
        )
    blocks = rows // TILE_ROWS * (gate.shape[1] // tuning.tile)
    # More blocks: narrow tiles, for which L2 is too slow, or a last wave that is nearly empty.
    if blocks > NUM_SMS:
        return (
            f"expected tiles that give each of {NUM_SMS} SMs one block at most, "
            f"got {blocks} of {TILE_ROWS} x {tuning.tile}"
        )
    return None


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def swiglu(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op with swiglu; see pallas_kernels.matmul.matmul."""
    x, (gate, up) = inputs.x, inputs.weights
    (rows, depth), width = x.shape, gate.shape[1]
    tuning = tuning or choose_tuning(rows, width)
    assert tuning is not None  # the public op has checked `unsupported`
    tile, products, pdl = tuning.tile, tuning.products, not interpreting()
    cluster = 1 if interpreting() else tuning.cluster  # the interpreter has no multicast
    shares_x = cluster > 1 and rows == TILE_ROWS
    shares_weights = cluster > 1 and not shares_x
    columns_here, rows_here = (cluster if shares else 1 for shares in (shares_x, shares_weights))
    # The second pass over a wide tile needs the most; 40 are better for the copying warpgroup.
    registers = RegisterShares(CONSUMERS, *((240, 24) if tile > 192 else (232, 40)))
    steps = depth // TILE_K
    turns = tuning.passes * steps
    stages = min(tuning.stages, turns)
    ring = ManyRowsRing(stages, steps, TILE_K)
    swizzle = 128 if tile % 64 == 0 else 64
    assert stages * products >= CONSUMERS and width % (tile * columns_here) == 0, tuning
    assert rows % (TILE_ROWS * rows_here) == 0 and products * tile <= 2 * ONE_PASS_TILE, tuning
    # A warpgroup's result has the shape of a step's weights, and is written through their slot.
    assert CONSUMER_ROWS == TILE_K

    def body(
        x_gmem: Ref,
        gate_gmem: Ref,
        up_gmem: Ref,
        out_gmem: Ref,
        x_smem: Ref,
        w_smem: Ref,
        full: Barrier,
        consumed: Barrier,
        drained: Barrier,
    ) -> None:
        wg = lax.axis_index("wg")
        rank = lax.axis_index("rank")
        row = lax.axis_index("rows") * rows_here + (rank if shares_weights else 0)
        column = lax.axis_index("columns") * columns_here + (rank if shares_x else 0)
        row, columns = row * TILE_ROWS, pl.ds(column * tile, tile)

        def load_weights(turn: jax.Array) -> None:
            slot, k = ring.place(turn)
            sent_to = "rank" if shares_weights else None

            def copy(ref: Ref, product: int) -> None:
                target = w_smem.at[slot, product]
                plgpu.copy_gmem_to_smem(
                    ref.at[k, columns], target, full.at[slot], collective_axes=sent_to
                )

            if products == 2:
                copy(gate_gmem, 0)
                copy(up_gmem, 1)
                return
            pl.when(turn < steps)(lambda: copy(gate_gmem, 0))
            pl.when(turn >= steps)(lambda: copy(up_gmem, 0))

        def load_x(turn: jax.Array) -> None:
            slot, k = ring.place(turn)
            plgpu.copy_gmem_to_smem(
                x_gmem.at[pl.ds(row, TILE_ROWS), k],
                x_smem.at[slot],
                full.at[slot],
                collective_axes="rank" if shares_x else None,
            )

        @pl.when(wg == CONSUMERS)
        def _produce() -> None:
            registers.give_back()
            ring.produce(turns, load_weights, load_x, consumed)

        @pl.when(wg < CONSUMERS)
        def _consume() -> None:
            registers.take()
            if pdl:
                plgpu.griddepcontrol_wait()
            mine = pl.ds(wg * CONSUMER_ROWS, CONSUMER_ROWS)

            def make(first_turn: int) -> tuple[jax.Array, ...]:
                """Return the products of the pass that begins at this turn.

                Each is bfloat16 [CONSUMER_ROWS, tile].
                """

                def accumulate(*accumulators: Accumulator) -> tuple[jax.Array, ...]:
                    @pl.loop(first_turn, first_turn + steps)
                    def _step(turn: jax.Array) -> None:
                        slot = lax.rem(turn, stages)
                        plgpu.barrier_wait(full.at[slot])
                        for product, acc in enumerate(accumulators):
                            plgpu.wgmma(acc, x_smem.at[slot, mine], w_smem.at[slot, product])
                        plgpu.wgmma_wait(products)  # the step before is done: free its slot
                        pl.when(turn > first_turn)(
                            lambda: plgpu.barrier_arrive(consumed.at[lax.rem(turn - 1, stages)])
                        )

                    # Packed until the activation takes a few columns at a time: registers cannot
                    # hold two float32 arrays of a wide tile.
                    results = tuple(
                        lax.optimization_barrier(acc[...].astype(jnp.bfloat16))
                        for acc in accumulators
                    )
                    plgpu.barrier_arrive(consumed.at[(first_turn + steps - 1) % stages])
                    return results

                shape = plgpu.ACC((CONSUMER_ROWS, tile), jnp.float32)
                return pl.run_scoped(accumulate, *(shape,) * products)

            gates, ups = make(0) if products == 2 else (*make(0), *make(steps))
            # After this, neither warpgroup reads the ring, and nothing more arrives in it.
            plgpu.barrier_arrive(drained)
            plgpu.barrier_wait(drained)
            result = w_smem.at[0, wg] if products == 2 else w_smem.at[wg, 0]
            for first in range(0, tile, swizzle // 2):
                few = slice(first, first + swizzle // 2)
                g, u = gates[:, few].astype(jnp.float32), ups[:, few].astype(jnp.float32)
                result[:, few] = activated(g, u)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                result,
                out_gmem.at[pl.ds(row + wg * CONSUMER_ROWS, CONSUMER_ROWS), columns],
            )
            plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        grid=(width // tile // columns_here, rows // TILE_ROWS // rows_here),
        grid_names=("columns", "rows"),
        cluster=(cluster,),
        cluster_names=("rank",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=f"swiglu_{depth}x{width}_rows{rows}",
        scratch_types=[
            plgpu.SMEM((stages, TILE_ROWS, TILE_K), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((stages, products, TILE_K, tile), jnp.bfloat16, transforms=transforms),
            plgpu.Barrier(num_barriers=stages, num_arrivals=1 + products),
            ring.consumed(cluster),
            plgpu.Barrier(num_arrivals=CONSUMERS),
        ],
    )
    return call(x, gate, up)
