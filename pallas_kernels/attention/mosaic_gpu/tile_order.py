"""The order in which a CTA streams tiles of keys, which is the order of its sums.

KV heads follow each other, and within one its classes. Tile t belongs to class t mod 8, wherever a
row's first key lies. One class of one KV head is a pass of the CTA.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.types import Index

CLASSES = 8  # of key tiles; also the largest portable cluster

Place = tuple[jax.Array, jax.Array]  # (pass, tile)


@dataclasses.dataclass(frozen=True)
class TileOrder:
    """Order of one CTA, in the kernel. Its row tile sees the tiles start .. stop - 1."""

    start: jax.Array
    stop: jax.Array
    first_class: jax.Array
    passes: int
    tiles: int  # that the block table can hold

    def first_of(self, key_class: Index) -> jax.Array:
        """Return a class's first tile."""
        return self.start + lax.rem(key_class - self.start + self.tiles * CLASSES, CLASSES)

    def class_length(self, first: jax.Array) -> jax.Array:
        """Return the number of tiles of a class whose first tile is given."""
        return lax.div(jnp.maximum(self.stop - first, 0) + (CLASSES - 1), CLASSES)

    def in_class(self, first: jax.Array, i: jax.Array) -> jax.Array:
        """Return tile i of a class, counted from its first one."""
        return first + i * CLASSES

    def after(self, number: jax.Array, tile: jax.Array) -> Place:
        """Return the place after a place; a tile at or past `stop` means none."""
        return self._settle(number, tile + CLASSES)

    def first_places(self, count: int) -> Iterator[Place]:
        """Yield the first places.

        The caller can look up the pages of each while the next one is computed.
        """
        number, tile = self._settle(jnp.int32(0), self.first_of(self.first_class))
        for i in range(count):
            yield number, tile
            if i + 1 < count:
                number, tile = self.after(number, tile)

    def _settle(self, number: jax.Array, tile: jax.Array) -> Place:
        """Return the place, moved on to the next pass while its pass has ended."""
        if self.passes == 1:
            return number, tile
        return lax.while_loop(
            lambda place: (place[1] >= self.stop) & (place[0] + 1 < self.passes),
            lambda place: (place[0] + 1, self.first_of(self.first_class + place[0] + 1)),
            (number, tile),
        )
