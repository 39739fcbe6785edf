"""Static sizes of one launch, and the memory that its kernel works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper import interpreting
from pallas_kernels.matmul.plan import TILE_N, Product, Tuning, is_resident, padded_rows
from pallas_kernels.types import Barrier, Index

T = TypeVar("T")  # an array, its type, or the kernel's ref


class Operands(NamedTuple, Generic[T]):
    """Inputs of the kernel; see matmul.Inputs."""

    x: T
    weights: tuple[T, ...]
    squares: T | None
    bias: T | None
    residual: T | None
    gain: T | None


class Results(NamedTuple, Generic[T]):
    """Outputs of the kernel.

    out:     [rows, width]
    scaled:  [rows, width], out times the gain; with a gain
    squares: float32 [num_pieces, padded rows], sums of out's squares; with a gain
    largest: float32 [num_pieces, padded rows], largest magnitudes of scaled, or of out without a
             gain; of a product that measures
    shares:  of cluster_sum.outputs; in the interpreter
    """

    out: T
    scaled: T | None
    squares: T | None
    largest: T | None
    shares: T | None


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    x:        a ring of x's steps, or all of x where it is resident
    w:        rings of the weights' steps
    out:      a tile of the result
    partial:  sums of all warpgroups but the first
    halves:   upper and lower halves of a float32 result
    residual, gain: a tile of each
    scale:    the norm's factor of each row
    scaled:   a tile of the result times the gain
    by_row:   of a product that quantises: each warp's reductions of the rows, and their scales; see
              fp8_matmul's own_rows.with_scratch

    full:           for each slot of the rings: its copies have arrived
    x_ready:        for each warpgroup: its part of a resident x has arrived
    seen:           all warps have reduced the rows
    done, taken:    partial sums are there; and may be overwritten
    residual_ready, gain_ready: the tile has arrived
    received:       of cluster_sum.scratch
    """

    x: T
    w: T
    out: T
    partial: T | None
    halves: T | None
    residual: T | None
    scale: T | None
    gain: T | None
    scaled: T | None
    by_row: T | None
    full: Barrier
    x_ready: Barrier
    seen: Barrier
    done: Barrier
    taken: Barrier
    residual_ready: Barrier
    gain_ready: Barrier
    received: list[Barrier]


@dataclass(frozen=True)
class Sizes:
    """Static sizes of one launch."""

    product: Product
    tuning: Tuning

    def __post_init__(self) -> None:
        tuning, depth = self.tuning, self.product.depth
        whole = self.steps * tuning.tile_k * tuning.warpgroups * tuning.split
        assert tuning.stages > 1 and whole == depth, (depth, tuning)
        assert tuning.stripe_k % tuning.tile_k == 0 == self.steps % self.steps_a_stripe, (
            depth,
            tuning,
        )
        assert tuning.split == 1 or self.blocks == self.num_tiles, tuning

    @property
    def padded(self) -> int:
        """Rows, padded for wgmma."""
        return padded_rows(self.product.rows)

    @property
    def part_depth(self) -> int:
        """Depth of a CTA."""
        return self.product.depth // self.tuning.split

    @property
    def steps(self) -> int:
        """Steps of a warpgroup through the depth of a tile."""
        return self.part_depth // self.tuning.tile_k // self.tuning.warpgroups

    @property
    def steps_a_stripe(self) -> int:
        """Steps of a warpgroup through one stripe of the depth."""
        return self.tuning.stripe_k // self.tuning.tile_k

    @property
    def counts(self) -> list[int]:
        """Tiles of each weight."""
        return [n // TILE_N for n in self.product.widths]

    @property
    def num_tiles(self) -> int:
        """Tiles of the result: with swiglu a tile has the same columns of gate and up."""
        return self.counts[0] if self.product.swiglu else sum(self.counts)

    @property
    def blocks(self) -> int:
        return min(self.tuning.blocks, self.num_tiles)

    def tiles_of(self, block: jax.Array) -> jax.Array:
        """Return how many tiles a block makes, one after the other."""
        return lax.div(self.num_tiles - 1 - block, self.blocks) + 1

    def tile(self, block: jax.Array, index: Index) -> jax.Array:
        """Return which of all tiles is a block's tile `index`."""
        return block + index * self.blocks

    @property
    def slots(self) -> int:
        """Slots of all rings of a CTA."""
        return self.tuning.warpgroups * self.tuning.stages

    @property
    def resident(self) -> bool:
        """Whether all of x stays in shared memory."""
        return is_resident(self.product, self.part_depth)

    @property
    def share(self) -> tuple[int, int, int]:
        """Shape of a warpgroup's sums of a tile: [products, columns, rows]."""
        return self.product.accumulators, TILE_N, self.padded

    @property
    def senders(self) -> int:
        """Warpgroups of a cluster that send their sums to the first CTA."""
        return (self.tuning.split - 1) * self.tuning.warpgroups

    @property
    def pdl(self) -> bool:
        return self.tuning.pdl and not interpreting()

    @property
    def is_wide(self) -> bool:
        """Whether the result is float32."""
        return self.product.out_dtype == jnp.float32
