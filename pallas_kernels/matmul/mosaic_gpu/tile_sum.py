"""The sums of a tile: each warpgroup multiplies its steps, and one adds up the shares of all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_gpu import cluster_sum
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Results
from pallas_kernels.matmul.plan import TILE_N
from pallas_kernels.mosaic import load
from pallas_kernels.types import Accumulator, Ref


def multiply(ring: Ring, index: jax.Array, turns: jax.Array) -> Sequence[jax.Array]:
    """Return this warpgroup's sums of its block's tile `index`: float32 [TILE_N, padded rows].

    turns: of the warpgroup through all tiles. Refills the ring, and launches the next kernel.
    """
    sizes, scratch, wg = ring.sizes, ring.scratch, ring.wg
    product, tuning, steps = sizes.product, sizes.tuning, sizes.steps
    stages = tuning.stages

    def accumulate(*accumulators: Accumulator) -> tuple[jax.Array, ...]:
        @pl.loop(0, steps)
        def _step(step: jax.Array) -> None:
            turn = step + index * steps
            slot = wg * stages + lax.rem(turn, stages)
            plgpu.barrier_wait(scratch.full.at[slot])
            x = scratch.x.at[ring.resident_step(step) if sizes.resident else slot]
            x_tile = x.transpose((1, 0))
            for i, acc in enumerate(accumulators):
                w = scratch.w.at[slot, i]
                plgpu.wgmma(acc, w if product.transposed else w.transpose((1, 0)), x_tile)
            plgpu.wgmma_wait(product.accumulators)  # the step before is done: refill its slot
            pl.when((turn > 0) & (turn - 1 + stages < turns))(
                lambda: ring.refill(turn - 1 + stages)
            )
            if sizes.pdl and tuning.launches_next:
                # When the last copy has started: the next kernel's would compete with this one's.
                pl.when(turn == jnp.maximum(turns - stages, 0))(
                    plgpu.griddepcontrol_launch_dependents
                )

        return tuple(acc[...] for acc in accumulators)

    accumulators = [plgpu.ACC((TILE_N, sizes.padded), jnp.float32)] * product.accumulators
    return pl.run_scoped(accumulate, *accumulators)


def add_up(
    ring: Ring,
    results: Results[Ref] | None,
    sums: Sequence[jax.Array],
    finishes: jax.Array,
    index: jax.Array,
    tiles_here: jax.Array,
    finish: Callable[[list[jax.Array]], None],
) -> None:
    """Run finish(sums of all warpgroups and CTAs) in the warpgroup that finishes the tile.

    Warpgroups are added in order, then the CTAs of a cluster. index: of the tile, of tiles_here.
    results: None if no cluster shares a tile.
    """
    sizes, scratch, block, wg, part = ring.sizes, ring.scratch, ring.block, ring.wg, ring.part
    others = sizes.tuning.warpgroups - 1
    exchange = None
    if sizes.senders:
        assert results is not None
        exchange = cluster_sum.Exchange.of(results, scratch)

    if exchange is not None:
        pl.when(part > 0)(
            lambda: cluster_sum.send(sums, exchange, block, (part - 1) * (others + 1) + wg)
        )

    if scratch.partial is not None:
        partial = scratch.partial

        @pl.when((wg > 0) & (part == 0))
        def _hand_over() -> None:
            pl.when(index > 0)(lambda: plgpu.barrier_wait(scratch.taken.at[wg - 1]))
            for product, result in enumerate(sums):
                partial[wg - 1, product] = result
            plgpu.barrier_arrive(scratch.done)

    @pl.when(finishes)
    def _add_up() -> None:
        totals = list(sums)
        if scratch.partial is not None:
            plgpu.barrier_wait(scratch.done)
            for other in range(others):
                for product in range(len(totals)):
                    share = scratch.partial.at[other, product]
                    totals[product] += load(share, plgpu.Layout.WGMMA, optimized=False)

            @pl.when(index + 1 < tiles_here)
            def _free() -> None:
                for other in range(others):
                    plgpu.barrier_arrive(scratch.taken.at[other])

        if exchange is not None:
            totals = cluster_sum.add(sizes, totals, exchange, block)
        finish(totals)
