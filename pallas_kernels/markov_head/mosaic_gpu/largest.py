"""The largest of a block's logits. No logit is written, and XLA compares what the blocks found.

For each of its places in a tile, a thread keeps the largest logit of all the block's tiles. The
block compares the places once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.markov_head.mosaic_gpu.block import LAYOUT, Block
from pallas_kernels.matmul.mosaic_gpu.sizes import Sizes
from pallas_kernels.matmul.plan import TILE_N
from pallas_kernels.mosaic import load
from pallas_kernels.pieces import NO_INDEX
from pallas_kernels.types import Ref

T = TypeVar("T")  # an array, its type, or the kernel's ref


class Found(NamedTuple, Generic[T]):
    """The largest logit of each block's columns, [blocks, padded rows], or one block's.

    value: float32
    id:    int32, of its first column
    """

    value: T
    id: T


class Kept(NamedTuple, Generic[T]):
    """Shared memory.

    best:  float32 [padded rows, TILE_N], the largest logit at each place of the block's tiles
    tile:  int32 of the same shape, the first tile that has it
    found: of the block
    """

    best: T
    tile: T
    found: Found[T]


@dataclass(frozen=True)
class Largest:
    """Keeps the largest of a block's logits (an Ending of launch)."""

    block: Block
    kept: Kept[Ref]
    results: Found[Ref]

    name = "markov_argmax"

    @staticmethod
    def results_of(sizes: Sizes) -> Found[jax.ShapeDtypeStruct]:
        shape = (sizes.blocks, sizes.padded)
        return Found(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32)))

    @staticmethod
    def memory_of(sizes: Sizes) -> Kept[pl.MemoryRef]:
        tile, row = (sizes.padded, TILE_N), (sizes.padded,)
        found = Found(plgpu.SMEM(row, jnp.float32), plgpu.SMEM(row, jnp.int32))
        return Kept(plgpu.SMEM(tile, jnp.float32), plgpu.SMEM(tile, jnp.int32), found)

    def begin(self) -> None:
        """Begin with -inf everywhere in the first tile, which a row without more has."""
        block, kept = self.block, self.kept
        for index in range(block.slots):
            block.load_base(index)
        shape = kept.best.shape
        kept.best[...] = plgpu.layout_cast(jnp.full(shape, -jnp.inf, jnp.float32), LAYOUT)
        first = jnp.full(shape, block.tile_number(0), jnp.int32)
        kept.tile[...] = plgpu.layout_cast(first, LAYOUT)

    def take(self, index: jax.Array, logits: jax.Array) -> None:
        """Keep what tile `index` has that is larger."""
        block, kept = self.block, self.kept
        best = load(kept.best, LAYOUT, optimized=False)
        tile = load(kept.tile, LAYOUT, optimized=False)
        higher = logits > best  # of equal logits the first stays; NaN is never higher
        kept.best[...] = jnp.where(higher, logits, best)
        kept.tile[...] = jnp.where(higher, block.tile_number(index), tile)
        plgpu.commit_smem()  # all threads have read the slot
        block.load_base(index + block.slots)

    def end(self) -> None:
        """Write the largest of all that was kept."""
        found = self.kept.found
        best = load(self.kept.best, LAYOUT, optimized=False)
        tile = load(self.kept.tile, LAYOUT, optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, best.shape, 1, layout=LAYOUT)
        highest = jnp.max(best, axis=1)
        is_highest = best == lax.broadcast_in_dim(highest, best.shape, [0])
        found.value[...] = highest
        found.id[...] = jnp.min(jnp.where(is_highest, tile * TILE_N + column, NO_INDEX), axis=1)
        plgpu.commit_smem()
        number = self.block.ring.block
        plgpu.copy_smem_to_gmem(found.value, self.results.value.at[number])
        plgpu.copy_smem_to_gmem(found.id, self.results.id.at[number])
