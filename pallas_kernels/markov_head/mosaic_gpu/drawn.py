"""A token drawn from a block's logits, which are written over its base logits.

The first warpgroup adds a tile's product to its base logits, in their slot, and copies them out of
it. Warpgroups that multiply nothing score the tile, some rows each. They make a tile's noise while
its weights arrive, so the noise takes no extra time. A slot is filled anew when its tile has left
and is scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import noise, register_noise
from pallas_kernels.markov_head.mosaic_gpu import best
from pallas_kernels.markov_head.mosaic_gpu.best import Best, Found, columns_of
from pallas_kernels.markov_head.mosaic_gpu.block import LAYOUT, Block
from pallas_kernels.matmul.mosaic_gpu.sizes import Sizes
from pallas_kernels.matmul.plan import TILE_N
from pallas_kernels.mosaic import load
from pallas_kernels.types import Barrier, Ref

OF_ROWS = LAYOUT.reduce(1)
LAG = 2  # tiles that the helpers may be behind


class Ready(NamedTuple):
    """Barriers, one of each kind for a slot.

    logits: the slot has a tile's logits
    scores: all helpers have read them
    """

    logits: Barrier
    scores: Barrier


@dataclass(frozen=True)
class Drawn:
    """Writes a block's logits and draws from them (an Ending of launch)."""

    block: Block
    ready: Ready
    results: Found[Ref]

    name = "markov_draw"

    @staticmethod
    def slots(padded: int) -> int:
        """Return fewer for tiles of many rows, which are larger."""
        return 6 if padded <= 16 else 4

    @staticmethod
    def helpers(sizes: Sizes) -> int:
        """Return one for 8 rows, and two for more.

        Four beside two that multiply would spill registers for 64 rows. Two beside three (a rank of
        192) spill 172 bytes a thread.
        """
        return 1 if sizes.padded == 8 else 2

    @staticmethod
    def memory_of(sizes: Sizes) -> Ready:
        slots, helpers = Drawn.slots(sizes.padded), Drawn.helpers(sizes)
        return Ready(
            logits=plgpu.Barrier(num_barriers=slots),
            scores=plgpu.Barrier(num_barriers=slots, num_arrivals=helpers),
        )

    def begin(self) -> None:
        """Fill all slots but LAG, which `take` fills."""
        for index in range(self.block.slots - LAG):
            self.block.load_base(index)

    def take(self, index: jax.Array, logits: jax.Array) -> None:
        """Write tile `index`."""
        block = self.block
        self._wait_for_scores(index - LAG)
        plgpu.wait_smem_to_gmem(LAG - 1, wait_read_only=True)  # that tile has left its slot too
        block.load_base(index - LAG + block.slots)
        slot = block.slot(index)
        tile = block.memory.base.at[slot]
        tile[...] = logits
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, block.base(index))
        plgpu.barrier_arrive(self.ready.logits.at[slot])

    def end(self) -> None:
        """Wait for the scores of the last tiles: the interpreter wants each arrival awaited."""
        for i in range(LAG):
            self._wait_for_scores(self.block.tiles_here - LAG + i)

    def _wait_for_scores(self, index: jax.Array) -> None:
        """Wait until the helpers have read tile `index`, if there is such a tile."""

        @pl.when(index >= 0)
        def _wait() -> None:
            plgpu.barrier_wait(self.ready.scores.at[self.block.slot(index)])

    def help(self, helper: jax.Array) -> None:
        """Score a part of the rows, and write the best of them."""
        block, sources = self.block, self.block.sources
        sizes = block.ring.sizes
        share = sizes.padded // self.helpers(sizes)
        first = helper * share
        rows, shape = pl.ds(first, share), (share, TILE_N)
        assert sources.temperature is not None and sources.keys is not None
        temperature = load(sources.temperature.at[rows], OF_ROWS, optimized=False)
        high, low = (load(sources.keys.at[i, rows], OF_ROWS, optimized=False) for i in range(2))
        key = noise.fold_in((high, low), block.step)

        def spread(of_rows: jax.Array) -> jax.Array:
            return lax.broadcast_in_dim(of_rows, shape, [0])

        def step(index: jax.Array, so_far: Best[jax.Array]) -> Best[jax.Array]:
            number, slot = block.tile_number(index), block.slot(index)
            token_ids = columns_of(number, shape)
            gumbel = register_noise.gumbel(LAYOUT, (spread(key[0]), spread(key[1])), token_ids)
            plgpu.barrier_wait(self.ready.logits.at[slot])
            logits = load(block.memory.base.at[slot, rows], LAYOUT, optimized=False)
            plgpu.commit_smem()  # all threads have read the slot
            plgpu.barrier_arrive(self.ready.scores.at[slot])
            heat = spread(temperature)
            noisy = register_noise.noisy(logits, heat, gumbel)
            scores = jnp.where(heat == 0.0, logits, noisy)
            return best.better(so_far, scores, number)

        nothing = best.nothing(shape, block.tile_number(0))
        found = lax.fori_loop(0, block.tiles_here, step, nothing)
        best.write(found, block, self.results, first)
