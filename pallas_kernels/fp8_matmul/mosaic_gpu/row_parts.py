"""How warps reduce whole rows: in two halves, of which each warp of a warpgroup has a part.

The kernel that quantises rows and the products that do so themselves reduce rows alike. So sums of
squares have one order, and the norm of a row the same bits, whichever of them runs. The same holds
for what the product before has found in pieces of them: each warp reduces some of the pieces.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import WARPS
from pallas_kernels.matmul.plan import PIECE, num_pieces
from pallas_kernels.mosaic import load
from pallas_kernels.types import Barrier, Index, Ref

HALVES = 2
PARTS = HALVES * WARPS
LANES = 32
ROWS = 8  # whose pieces a warp reduces at once
SQUARES, MAGNITUDES = 0, 1
KINDS = 2


def divides(depth: int) -> bool:
    """Return whether rows of this depth have parts that a warp reads."""
    return depth % (PARTS * LANES * 2) == 0


def in_parts(x: jax.Array) -> jax.Array:
    """Return x [..., depth] as [..., HALVES, WARPS, depth / PARTS]."""
    return x.reshape(*x.shape[:-1], HALVES, WARPS, -1)


def layout_of(depth: int):
    """Return the layout of a half [WARPS, depth / PARTS] of rows of this depth."""
    vector = next(v for v in (8, 4, 2) if depth // PARTS % (LANES * v) == 0)
    return plgpu.Layout.TILED(
        fa.Tiling(((WARPS, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


@dataclass(frozen=True)
class RowReductions:
    """Reductions over whole rows, shared by the warps of a CTA.

    shared: float32 [KINDS or more, rows or more, PARTS], in shared memory
    halves: those that this warpgroup reduces
    seen:   completes when all warpgroups have stored their results; None if there is one, whose
            stores end with a barrier of its own
    """

    shared: Ref
    halves: Sequence[Index]
    seen: Barrier | None

    def norm_factor(self, halves: Iterable[jax.Array], depth: int, eps: float) -> jax.Array:
        """Return what an RMS norm multiplies a row by. halves: this warpgroup's halves of it"""
        [parts] = self._share(SQUARES, [halves], lambda half: jnp.sum(half * half, axis=1))
        return norm_factor(parts, depth, eps)

    def largest(self, rows: Sequence[Iterable[jax.Array]]) -> list[jax.Array]:
        """Return the largest magnitude of each row. rows: this warpgroup's halves of each"""
        by_part = self._share(MAGNITUDES, rows, lambda half: jnp.max(jnp.abs(half), axis=1))
        return [functools.reduce(jnp.maximum, parts) for parts in by_part]

    def _share(
        self,
        kind: int,
        rows: Sequence[Iterable[jax.Array]],
        reduce: Callable[[jax.Array], jax.Array],
    ) -> list[list[jax.Array]]:
        """Return the results of all warps for each row, in the order of its parts."""
        for row, halves in enumerate(rows):
            for half, values in zip(self.halves, halves, strict=True):
                place = pl.ds(half * WARPS, WARPS)
                self.shared.at[kind, row, place][...] = reduce(values.astype(jnp.float32))
        if self.seen is not None:
            plgpu.barrier_arrive(self.seen)
            plgpu.barrier_wait(self.seen)
        return [[self.shared[kind, row, part] for part in range(PARTS)] for row in range(len(rows))]


def norm_factor(parts: Iterable[jax.Array], depth: int, eps: float) -> jax.Array:
    """Return what an RMS norm multiplies a row by, from sums of the squares of its parts."""
    total = functools.reduce(jnp.add, parts)
    # A sum after the division would be fused with it in one lowering, and not in the other.
    return lax.rsqrt((total + depth * eps) / depth)


def divides_pieces(depth: int) -> bool:
    """Return whether warps can share out the pieces of rows of this depth."""
    return depth // PIECE == num_pieces(depth)


def by_warp(pieces: jax.Array) -> jax.Array:
    """Return float32 [pieces, padded rows] as [WARPS, pieces / WARPS, padded rows]."""
    return pieces.reshape(WARPS, -1, pieces.shape[1])


def read_pieces(pieces: Ref) -> jax.Array:
    """Return float32 [WARPS, pieces, ROWS] in registers: each warp has its own pieces."""
    return load(pieces, _PIECES_LAYOUT, optimized=False)


def share_between_warps(
    found: jax.Array, shared: Ref, rows: Iterable[Index]
) -> list[list[jax.Array]]:
    """Return what each warp has found in its pieces of some rows, in the warps' order.

    found:  float32 [WARPS, ROWS], of each warp: read_pieces reduced along the pieces
    shared: float32 [WARPS, ROWS], shared memory
    rows:   their places among ROWS
    """
    shared[...] = found
    return [[shared[warp, row] for warp in range(WARPS)] for row in rows]


_PIECES_LAYOUT = plgpu.Layout.TILED(  # of [WARPS, pieces, ROWS]: each warp has some of them
    fa.Tiling(((WARPS, LANES // ROWS, ROWS), (1,))),
    warp_dims=(-4,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def normed(values: jax.Array, gain: jax.Array, factor: jax.Array) -> jax.Array:
    """Return the RMS norm of some values of a row as float32, rounded as its dtype has it."""
    scaled = (values.astype(jnp.float32) * factor).astype(values.dtype)
    return (scaled * gain).astype(jnp.float32)
