"""Pieces of a tile's result on their way to memory, in products of any number of rows.

A warpgroup has places for SLOTS of them in shared memory. The residual's piece comes to its place
first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import load
from pallas_kernels.swiglu import swiglu
from pallas_kernels.types import Barrier, Ref, Slice

LAYOUT = plgpu.Layout.WGMMA
SLOTS = 2


@dataclass(frozen=True)
class ResultPieces:
    """The pieces of a warpgroup's part of a tile.

    count:    number of pieces
    slots:    their places in shared memory, [SLOTS, ...]
    out:      the result
    residual: what is added to it; None for nothing
    arrived:  barriers of the residual's pieces, SLOTS for each warpgroup
    first:    number of the warpgroup's first barrier
    place:    returns the place of a piece in the result and in the residual
    turned:   whether values are transposed in relation to their places
    """

    count: int
    slots: Ref
    out: Ref
    residual: Ref | None
    arrived: Barrier
    first: jax.Array
    place: Callable[[int], tuple[Any, ...]]
    turned: bool = False

    def begin(self) -> None:
        """Wait until the tile before has left, and start the residual's first copies."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for piece in range(min(SLOTS, self.count)):
            self._load_residual(piece)

    def write(self, piece: int, value: jax.Array) -> None:
        """Add the residual to a piece's value, and start its copy. All are written in turn."""
        slot = self.slots.at[piece % SLOTS]
        target = slot.transpose((1, 0)) if self.turned else slot
        if self.residual is not None:
            plgpu.barrier_wait(self.arrived.at[self.first + piece % SLOTS])
            residual = target[...].astype(jnp.float32)
            value = (residual + value.astype(jnp.float32)).astype(jnp.bfloat16)
        elif piece >= SLOTS:
            plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        target[...] = value
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, self.out.at[self.place(piece)])
        if self.residual is not None and piece + SLOTS < self.count:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._load_residual(piece + SLOTS)

    def _load_residual(self, piece: int) -> None:
        if self.residual is None:
            return
        slot = piece % SLOTS
        plgpu.copy_gmem_to_smem(
            self.residual.at[self.place(piece)],
            self.slots.at[slot],
            self.arrived.at[self.first + slot],
        )


def finished(sums: list[jax.Array], bias: Ref | None, columns: Slice, *, axis: int) -> jax.Array:
    """Return a piece of the result in bfloat16, before a residual: with bias or SwiGLU.

    axis: of the columns
    """
    if bias is not None:
        (total,) = sums
        piece = load(bias.at[columns], LAYOUT.reduce(1 - axis), optimized=False)
        sums = [total + lax.broadcast_in_dim(piece.astype(jnp.float32), total.shape, [axis])]
    rounded = [total.astype(jnp.bfloat16) for total in sums]
    if len(rounded) == 1:
        return rounded[0]
    gate, up = (value.astype(jnp.float32) for value in rounded)
    return swiglu(gate, up)
