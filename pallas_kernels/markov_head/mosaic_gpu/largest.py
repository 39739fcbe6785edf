"""The largest of a block's logits. No logit is written."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.markov_head.mosaic_gpu import best
from pallas_kernels.markov_head.mosaic_gpu.best import Best, Found
from pallas_kernels.markov_head.mosaic_gpu.block import LAYOUT, Block
from pallas_kernels.matmul.mosaic_gpu.sizes import Sizes
from pallas_kernels.matmul.plan import TILE_N
from pallas_kernels.mosaic import load
from pallas_kernels.types import Ref


@dataclass(frozen=True)
class Largest:
    """Keeps the largest of a block's logits (an Ending of launch)."""

    block: Block
    kept: Best[Ref]
    results: Found[Ref]

    name = "markov_argmax"

    @staticmethod
    def slots(padded: int) -> int:
        """Return fewer for tiles of many rows, which are larger."""
        return 4 if padded <= 16 else 2

    @staticmethod
    def helpers(sizes: Sizes) -> int:
        return 0

    @staticmethod
    def memory_of(sizes: Sizes) -> Best[pl.MemoryRef]:
        tile = (sizes.padded, TILE_N)
        return Best(plgpu.SMEM(tile, jnp.float32), plgpu.SMEM(tile, jnp.int32))

    def begin(self) -> None:
        """Fill the ring of base logits."""
        for index in range(self.block.slots):
            self.block.load_base(index)
        tile = (self.block.ring.sizes.padded, TILE_N)
        self._keep(best.nothing(tile, self.block.tile_number(0)))

    def take(self, index: jax.Array, logits: jax.Array) -> None:
        """Keep what tile `index` has that is larger."""
        self._keep(best.better(self._kept(), logits, self.block.tile_number(index)))
        plgpu.commit_smem()  # all threads have read the slot
        self.block.load_base(index + self.block.slots)

    def end(self) -> None:
        """Write the largest of all."""
        best.write(self._kept(), self.block, self.results, 0)

    def help(self, helper: jax.Array) -> None:
        """Do nothing: there is no helper."""

    def _keep(self, kept: Best[jax.Array]) -> None:
        self.kept.value[...] = kept.value
        self.kept.tile[...] = kept.tile

    def _kept(self) -> Best[jax.Array]:
        return Best(*(load(ref, LAYOUT, optimized=False) for ref in self.kept))
