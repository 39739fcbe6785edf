"""A block's logits, written over its base logits.

A tile is copied out of the slot that its base logits arrived in. So the next copy into this slot
starts one tile later than in `largest`.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.markov_head.mosaic_gpu.block import Block
from pallas_kernels.matmul.mosaic_gpu.sizes import Sizes


@dataclass(frozen=True)
class Written:
    """Writes a block's logits (an Ending of launch)."""

    block: Block
    kept: None
    results: tuple[()]

    name = "markov_logits"

    @staticmethod
    def results_of(sizes: Sizes) -> tuple[()]:
        return ()

    @staticmethod
    def memory_of(sizes: Sizes) -> None:
        return None

    def begin(self) -> None:
        """Fill the ring but for its last slot, which the first tile's turn fills."""
        for index in range(self.block.slots - 1):
            self.block.load_base(index)

    def take(self, index: jax.Array, logits: jax.Array) -> None:
        """Write tile `index`."""
        block = self.block
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left its slot
        block.load_base(index + block.slots - 1)
        tile = block.memory.base.at[block.slot(index)]
        tile[...] = logits
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, block.base(index))

    def end(self) -> None:
        """Do nothing: launch waits for the last copy."""
