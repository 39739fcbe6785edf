"""The ring of a product of many rows: some warpgroups multiply, and one starts the TMA copies.

CTAs of a cluster may share an operand of a step: each loads a part of it and sends it to all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.types import Barrier, Index, Slice

TILE_ROWS = 128  # of a CTA
CONSUMERS = 2
CONSUMER_ROWS = TILE_ROWS // CONSUMERS

ROW_TILE = 8  # rows that a TMA copy swizzles together

Load = Callable[[jax.Array], None]  # starts the copies of a turn


def with_idle_rows(
    x: jax.Array, residual: jax.Array | None, tile: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return x and the residual with as many rows as copies take.

    TMA ends a copy where the array ends, and fills the rest with zeros. The interpreter does not.

    tile: rows of a tile
    """
    idle = -x.shape[0] % (tile if interpreting() else ROW_TILE)
    if not idle:
        return x, residual
    padding = (0, idle), (0, 0)
    return jnp.pad(x, padding), None if residual is None else jnp.pad(residual, padding)


@dataclass(frozen=True)
class TileTurns:
    """Division of a result's tiles among CTAs that stay.

    They take tiles in turn, and all rows of the same columns first.

    count: tiles
    rows:  tiles of the same columns
    most:  CTAs that run at once
    """

    count: int
    rows: int
    most: int

    @property
    def ctas(self) -> int:
        """CTAs. One may have a tile less than others."""
        return min(self.count, self.most)

    @property
    def fewest(self) -> int:
        """Tiles that each CTA has at least."""
        return self.count // self.ctas

    def here(self, cta: jax.Array) -> jax.Array:
        """Return how many tiles a CTA has."""
        return lax.div(self.count - cta + (self.ctas - 1), self.ctas)

    def place(self, cta: jax.Array, index: Index) -> tuple[jax.Array, jax.Array]:
        """Return the numbers of rows and columns of a CTA's n-th tile."""
        number = cta + index * self.ctas
        return lax.rem(number, self.rows), lax.div(number, self.rows)


@dataclass(frozen=True)
class ManyRowsRing:
    """Division of the ring. Turns count the steps of all passes or tiles.

    stages:    slots
    steps:     of the depth
    tile_k:    depth of a step
    consumers: warpgroups that multiply
    """

    stages: int
    steps: int
    tile_k: int
    consumers: int = CONSUMERS

    def consumed(self, cluster: int) -> Barrier:
        """Return the barriers of free slots.

        A slot is free when the warpgroups of every CTA that received a part have read it.
        """
        if cluster == 1:
            return plgpu.Barrier(num_barriers=self.stages, num_arrivals=self.consumers)
        return plgpu.ClusterBarrier(
            collective_axes=("rank",), num_barriers=self.stages, num_arrivals=self.consumers
        )

    def place(self, turn: jax.Array) -> tuple[jax.Array, Slice]:
        """Return the slot of a turn, and its depths."""
        depths = pl.ds(lax.rem(turn, self.steps) * self.tile_k, self.tile_k)
        return lax.rem(turn, self.stages), depths

    def produce(
        self,
        turns: Index,
        load_weights: Load,
        load_x: Load,
        consumed: Barrier,
        *,
        launches_next: bool = True,
    ) -> None:
        """Start all copies, and wait until they are read: the producer's work.

        Weights are copied before the kernel before has ended, so none of the program writes them.

        turns:         of the CTA, at least `stages`
        launches_next: see pallas_kernels/matmul/plan.py
        """
        pdl = not interpreting()
        pl.loop(0, self.stages)(load_weights)
        if pdl:
            plgpu.griddepcontrol_wait()  # x depends on the kernel before
        pl.loop(0, self.stages)(load_x)

        @pl.loop(self.stages, turns)
        def _refill(turn: jax.Array) -> None:
            plgpu.barrier_wait(consumed.at[lax.rem(turn, self.stages)])
            load_weights(turn)
            load_x(turn)

        if pdl and launches_next:
            # The last copy has started: the next kernel's CTAs do not compete with it.
            plgpu.griddepcontrol_launch_dependents()

        @pl.loop(turns, turns + self.stages)
        def _drain(turn: jax.Array) -> None:
            # The cluster's other CTA arrives here: this one must not end before.
            plgpu.barrier_wait(consumed.at[lax.rem(turn, self.stages)])
