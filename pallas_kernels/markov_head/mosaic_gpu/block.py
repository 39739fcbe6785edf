"""What a block of a Markov head's step reads: its rows of W1, and its tiles of base logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_gpu.epilogue import by_row
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Sizes
from pallas_kernels.matmul.plan import TILE_N
from pallas_kernels.mosaic import load
from pallas_kernels.types import Barrier, Index, Ref

T = TypeVar("T")  # an array, its type, or the kernel's ref

# Of a tile of eight rows, each warp has two, with 64 columns, which wgmma reads together.
LAYOUT = plgpu.Layout.TILED(
    fa.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


class Sources(NamedTuple, Generic[T]):
    """What the kernel reads beside W2; see Inputs.

    step:        int32 [1]
    temperature: None without a draw
    keys:        None without a draw
    """

    base: T
    step: T
    token: T
    table: T
    temperature: T | None
    keys: T | None


class Memory(NamedTuple, Generic[T]):
    """Shared memory and barriers of a block, beside those of the product.

    rows:   W1's rows, [steps, padded rows, tile_k]
    base:   a ring of tiles of the base logits
    ending: what the ending's memory_of asks for (launch.Ending)

    rows_ready: for each warpgroup: its part of the rows has arrived
    base_ready: for each slot of the ring
    """

    rows: T
    base: T
    ending: Any
    rows_ready: Barrier
    base_ready: Barrier


def memory_of(sizes: Sizes, rows: int, slots: int, ending: Any) -> Memory[pl.MemoryRef]:
    """Return the memory of a block, for this number of rows and slots of base logits."""
    tuning = sizes.tuning
    steps = sizes.steps * tuning.warpgroups
    return Memory(
        rows=plgpu.SMEM((steps, sizes.padded, tuning.tile_k), sizes.product.x.dtype),
        base=plgpu.SMEM((slots, sizes.padded, TILE_N), jnp.float32),
        ending=ending,
        rows_ready=plgpu.Barrier(num_barriers=tuning.warpgroups, num_arrivals=sizes.steps * rows),
        base_ready=plgpu.Barrier(num_barriers=slots),
    )


@dataclass(frozen=True)
class Block:
    """A warpgroup of a block, in the kernel.

    tiles_here: tiles of the block
    step:       of the base logits
    rows:       that are not padding
    slots:      of the ring of base logits
    """

    ring: Ring
    sources: Sources[Ref]
    memory: Memory[Ref]
    tiles_here: jax.Array
    step: jax.Array
    rows: int
    slots: int

    def look_up(self) -> None:
        """Start the copies of W1's rows: a warpgroup's part of the depth."""
        ring, sources, memory = self.ring, self.sources, self.memory
        last = sources.table.shape[0] - 1
        tokens = [jnp.clip(sources.token[row], 0, last) for row in range(self.rows)]

        @pl.loop(0, ring.sizes.steps)
        def _step(i: jax.Array) -> None:
            depth, slot = ring.depth_of(ring.step_of_cta(i)), ring.resident_step(i)
            for row, token in enumerate(tokens):
                plgpu.copy_gmem_to_smem(
                    sources.table.at[pl.ds(token, 1), depth],
                    memory.rows.at[slot, pl.ds(row, 1)],
                    memory.rows_ready.at[ring.wg],
                )

    def arrange_rows(self) -> None:
        """Write the rows that have arrived as wgmma reads them.

        Rows past the last one hold what the memory held before. Their results are dropped.
        """
        ring, memory = self.ring, self.memory
        plgpu.barrier_wait(memory.rows_ready.at[ring.wg])

        @pl.loop(0, ring.sizes.steps)
        def _step(i: jax.Array) -> None:
            slot = ring.resident_step(i)
            ring.scratch.x.at[slot][...] = load(memory.rows.at[slot], LAYOUT, optimized=False)

        plgpu.commit_smem()

    def load_base(self, index: Index) -> None:
        """Start the copy of the base logits of tile `index`, if the block has it."""
        memory, slot = self.memory, self.slot(index)

        @pl.when(index < self.tiles_here)
        def _copy() -> None:
            source = self.base(index)
            plgpu.copy_gmem_to_smem(source, memory.base.at[slot], memory.base_ready.at[slot])

    def base(self, index: Index) -> Ref:
        """Return the base logits of tile `index`, [padded rows, TILE_N] of the array."""
        columns = pl.ds(self.tile_number(index) * TILE_N, TILE_N)
        return self.sources.base.at[self.ring.all_rows, self.step, columns]

    def tile_number(self, index: Index) -> jax.Array:
        """Return the number of the block's tile `index` among all."""
        return self.ring.sizes.tile(self.ring.block, index)

    def slot(self, index: Index) -> jax.Array:
        """Return the slot of tile `index` in the ring of base logits."""
        return lax.rem(jnp.int32(index), self.slots)

    def logits(self, index: jax.Array, added: jax.Array) -> jax.Array:
        """Return tile `index` of the logits, float32 [padded rows, TILE_N].

        added: the product, [TILE_N, padded rows]
        """
        slot, halves = self.slot(index), self.ring.scratch.halves
        assert halves is not None  # of a float32 product
        plgpu.barrier_wait(self.memory.base_ready.at[slot])
        base = load(self.memory.base.at[slot], LAYOUT, optimized=False)
        return base + by_row(added, halves)
