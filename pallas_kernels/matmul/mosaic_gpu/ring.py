"""A warpgroup's ring of TMA copies: steps of the weights, and of x unless it is resident."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Scratch, Sizes
from pallas_kernels.matmul.plan import TILE_N
from pallas_kernels.types import Index, Ref, Slice


@dataclass(frozen=True)
class Ring:
    """Copies of one warpgroup, in the kernel. Turns count its steps through all tiles of a block.

    block, wg: of this warpgroup. part: its CTA in the cluster. all_rows: of x.
    """

    sizes: Sizes
    operands: Operands[Ref]
    scratch: Scratch[Ref]
    block: jax.Array
    wg: jax.Array
    part: Index
    all_rows: Slice

    def place(self, turn: jax.Array) -> tuple[jax.Array, Slice, jax.Array]:
        """Return a turn's tile, its part of the depth, and its slot."""
        sizes, tuning = self.sizes, self.sizes.tuning
        tile = sizes.tile(self.block, lax.div(turn, sizes.steps))
        step = self.step_of_cta(lax.rem(turn, sizes.steps))
        return tile, self.depth_of(step), self.wg * tuning.stages + lax.rem(turn, tuning.stages)

    def step_of_cta(self, step: jax.Array) -> jax.Array:
        """Return the place of this warpgroup's step among all steps of the CTA."""
        count = self.sizes.steps_a_stripe
        stripe = lax.div(step, count) * self.sizes.tuning.warpgroups + self.wg
        return stripe * count + lax.rem(step, count)

    def resident_step(self, step: Index) -> Index:
        """Return the place of this warpgroup's step in a resident x: a warpgroup's lie together."""
        return self.wg * self.sizes.steps + step

    def depth_of(self, step: jax.Array) -> Slice:
        """Return the part of the depth of a step, counted over the CTA's warpgroups."""
        tile_k = self.sizes.tuning.tile_k
        return pl.ds(self.part * self.sizes.part_depth + step * tile_k, tile_k)

    def load_weights(self, turn: jax.Array) -> None:
        tile, k, slot = self.place(turn)
        weights = self.operands.weights
        if self.sizes.product.swiglu:
            self._copy_weight(weights[0], tile, k, slot, 0)
            self._copy_weight(weights[1], tile, k, slot, 1)
            return
        if len(weights) == 1:
            self._copy_weight(weights[0], tile, k, slot, 0)
            return
        first = 0
        for ref, count in zip(weights, self.sizes.counts, strict=True):

            @pl.when((tile >= first) & (tile < first + count))
            def _copy(ref: Ref = ref, first: int = first) -> None:
                self._copy_weight(ref, tile - first, k, slot, 0)

            first += count

    def load_x(self, turn: jax.Array) -> None:
        _, k, slot = self.place(turn)
        source = self.operands.x.at[self.all_rows, k]
        plgpu.copy_gmem_to_smem(source, self.scratch.x.at[slot], self.scratch.full.at[slot])

    def fill_weights(self, turns: jax.Array) -> None:
        """Start the first copies of the weights."""
        for turn in range(self.sizes.tuning.stages):
            pl.when(turn < turns)(lambda turn=turn: self.load_weights(jnp.int32(turn)))

    def fill_x(self, turns: jax.Array) -> None:
        """Start the first copies of x, or all of them where x is resident."""
        if not self.sizes.resident:
            for turn in range(self.sizes.tuning.stages):
                pl.when(turn < turns)(lambda turn=turn: self.load_x(jnp.int32(turn)))
            return

        # A warpgroup loads and multiplies the same steps: warpgroups need not wait for each other.
        @pl.loop(0, self.sizes.steps)
        def _load(i: jax.Array) -> None:
            source = self.operands.x.at[self.all_rows, self.depth_of(self.step_of_cta(i))]
            barrier = self.scratch.x_ready.at[self.wg]
            plgpu.copy_gmem_to_smem(source, self.scratch.x.at[self.resident_step(i)], barrier)

    def await_x(self) -> None:
        """Wait for a resident x."""
        if self.sizes.resident:
            plgpu.barrier_wait(self.scratch.x_ready.at[self.wg])

    def refill(self, turn: jax.Array) -> None:
        self.load_weights(turn)
        if not self.sizes.resident:
            self.load_x(turn)

    def _copy_weight(
        self, ref: Ref, column: jax.Array, k: Slice, slot: jax.Array, product: int
    ) -> None:
        n = pl.ds(column * TILE_N, TILE_N)
        source = ref.at[n, k] if self.sizes.product.transposed else ref.at[k, n]
        target = self.scratch.w.at[slot, product]
        plgpu.copy_gmem_to_smem(source, target, self.scratch.full.at[slot])
