"""Rows of a vocabulary cut into pieces, one for each warpgroup, and the argmax of a row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import load
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout

LANES = 128  # threads of a warpgroup, and the most pieces of a vocabulary row
NO_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Pieces:
    """A row of `vocab` entries cut into `count` pieces of `size`.

    The last piece is moved back to end with the row.
    """

    vocab: int
    size: int
    vector: int  # entries of one load

    @property
    def count(self) -> int:
        return -(-self.vocab // self.size)

    @property
    def layout(self) -> Layout:
        return plgpu.Layout.WG_STRIDED((self.size,), vec_size=self.vector)

    def start(self, piece: jax.Array) -> jax.Array:
        return jnp.minimum(piece * self.size, self.vocab - self.size)

    def load(self, ref: Ref, piece: jax.Array, first: jax.Array | None = None) -> jax.Array:
        """Load a piece of a row ref [vocab].

        first: index in ref of the row's entry 0, a multiple of `vocab`; None: 0.
        """
        start = self.start(piece) if first is None else self.start(piece) + first
        return load(ref.at[pl.ds(start, self.size)], self.layout)

    def indices(self, piece: jax.Array, first: jax.Array | None = None) -> jax.Array:
        """Return the ids of a piece's entries; first: the id of the row's entry 0, None for 0."""
        offsets = plgpu.broadcasted_iota(jnp.int32, (self.size,), 0, layout=self.layout)
        return offsets + (self.start(piece) if first is None else self.start(piece) + first)


def cut(vocab: int, size: int) -> Pieces:
    """Return pieces of at most `size` entries, a multiple of LANES.

    Every row of a dense [rows, vocab] array can load them in aligned vectors.
    """
    vector = next(
        v for v in (4, 2, 1) if vocab % v == 0 and (v == 1 or min(vocab, size) >= LANES * v)
    )
    unit = LANES * vector
    return Pieces(vocab, min(size, vocab // unit * unit), vector)


def store_maximum(
    scores: jax.Array,
    indices: jax.Array,
    best_ref: Ref,
    index_ref: Ref,
    row: jax.Array,
    piece: jax.Array,
) -> None:
    """Store the highest score and its first index; NaN (noise of a padding row) counts as -inf."""
    scores = jnp.where(scores == scores, scores, -jnp.inf)
    best = jnp.max(scores)
    best_ref[row, piece] = best
    index_ref[row, piece] = jnp.min(jnp.where(scores == best, indices, NO_INDEX))


def load_lanes(ref: Ref, row: jax.Array, first: int = 0) -> jax.Array:
    """Load LANES partial results of a row, from the first one given."""
    return load(ref.at[row, pl.ds(first, LANES)], plgpu.Layout.WG_STRIDED((LANES,), vec_size=1))


def used_lanes(count: int) -> jax.Array:
    """Return which lanes of a partial result were written."""
    return (
        plgpu.broadcasted_iota(
            jnp.int32, (LANES,), 0, layout=plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
        )
        < count
    )


def combine_maximum(
    best_ref: Ref, index_ref: Ref, row: jax.Array, count: int
) -> tuple[jax.Array, jax.Array]:
    """Return the highest score of a row's `count` partial results, and its lowest index."""
    return combine_maxima(best_ref, index_ref, row, 1, count)[0]


def combine_maxima(
    best_ref: Ref, index_ref: Ref, first_row: jax.Array, rows: int, count: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Return combine_maximum of several rows.

    All are loaded before the first is reduced: a reduction waits for all warps, and a load behind
    it for memory once more.
    """

    def loaded(row: jax.Array, first: int) -> tuple[jax.Array, jax.Array]:
        best, index = load_lanes(best_ref, row, first), load_lanes(index_ref, row, first)
        used = used_lanes(count - first)
        return jnp.where(used, best, -jnp.inf), jnp.where(used, index, NO_INDEX)

    starts = range(0, count, LANES)
    partials = [[loaded(first_row + row, first) for first in starts] for row in range(rows)]
    return [_highest(of_row) for of_row in partials]


def _highest(partials: list[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """Return the highest score of a row's lanes, and its lowest index."""
    highest = reduce(jnp.maximum, [jnp.max(best) for best, _ in partials])
    lowest = [jnp.min(jnp.where(best == highest, index, NO_INDEX)) for best, index in partials]
    return highest, reduce(jnp.minimum, lowest)
