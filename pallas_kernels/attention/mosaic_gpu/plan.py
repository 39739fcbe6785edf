"""How one call of decode attention is divided among CTAs: clusters that share a row's keys, KV heads of a CTA, tiles in flight.

Short CTAs that do not fit the GPU at once become fewer CTAs of several KV heads, with tiles of the next head in flight while one ends: a
second wave would begin like the first, with nothing in flight.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.attention.bounds import KEYS, NARROW
from pallas_kernels.attention.mosaic_gpu.tile_order import CLASSES
from pallas_kernels.packing import packed_size

SMS = 132


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits."""

    slots: int | None = None  # tiles in flight a CTA; None: one or two, see Plan.slots
    fill: int = (
        2 * SMS
    )  # CTAs that run at once: with up to 24 columns a thread has 110 to 240 registers, so two CTAs an SM
    cluster: int | None = (
        None  # CTAs that share a row's keys: 1, 2, 4 or 8; None: as many as `fill` has room for
    )
    heads: int | None = (
        None  # KV heads that a CTA does one after another; None: enough that all CTAs run at once
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call."""

    batch: int
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    pages: int
    window: int | None
    scale: float
    tuning: Tuning
    has_sinks: bool
    interpreted: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tile_rows(self) -> int:
        """Query rows in one row tile."""
        return min(self.rows, NARROW // self.group)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def columns(self) -> int:
        """The narrow side: row * group + head in the group, padded."""
        return packed_size(self.tile_rows * self.group)

    @property
    def tall(self) -> tuple[int, int]:
        """The shape of values."""
        return self.head_dim, self.columns

    @property
    def square(self) -> tuple[int, int]:
        """The shape of a tile's scores."""
        return KEYS, self.columns

    @property
    def tiles(self) -> int:
        """Tiles of keys that the block table can hold."""
        return -(-self.pages * self.block_size // KEYS)

    @property
    def _seen(self) -> int:
        """Tiles of keys that a row tile sees at most."""
        return (
            self.tiles
            if self.window is None
            else min(self.tiles, max(self.window + self.tile_rows - 3, 0) // KEYS + 2)
        )

    @property
    def _pairs(self) -> int:
        """Row tiles x KV heads: what a CTA or a cluster can do for itself."""
        return self.batch * self.row_tiles * self.num_kv_heads

    @property
    def _short(self) -> bool:
        """Whether no CTA has many tiles, so that starts and ends weigh as much as the stream between them."""
        return self._seen <= 16 * self.cluster

    @property
    def slots(self) -> int:
        """Tiles in flight a CTA. One where CTAs are many and short: with two, a CTA's last two tiles come late, together, and are then used
        one after the other.
        """
        if self.tuning.slots is not None:
            return self.tuning.slots
        many = self._pairs * self.cluster > SMS
        return (
            1 if many and self._short and self.columns <= 16 else 2
        )  # the code for one takes 20 registers more: 32 columns would spill

    @property
    def cluster(self) -> int:
        """CTAs that share the keys of one row tile."""
        if self.tuning.cluster is not None:
            return self.tuning.cluster
        tiles = self._seen
        cluster = (
            1 if self.columns <= 16 else 2
        )  # one CTA for the whole tree has no registers left for more than 16 columns
        ctas = self._pairs
        largest = (
            4 if self.columns > 24 and self.head_dim > 64 else CLASSES
        )  # what the first CTA receives must fit beside its ring
        while cluster < min(tiles, largest) and 2 * cluster * ctas <= self.tuning.fill:
            cluster *= 2
        return cluster

    @property
    def classes(self) -> int:
        """Classes of tiles that one CTA folds: of a cluster's CTAs, each has a subtree."""
        return CLASSES // self.cluster

    @property
    def heads(self) -> int:
        """KV heads of a CTA: as many as make the longest chain of them on any place of the GPU shortest, and of those choices the most.

        One where a context can be long: batches of unequal lengths are faster with small CTAs that come when others end.
        """
        if self.tuning.heads is not None:
            return self.tuning.heads
        if self.cluster > 1 or not self._short:
            return 1
        pairs = self._pairs
        choices = [
            heads for heads in (4, 3, 2, 1) if self.num_kv_heads % heads == 0
        ]  # the queries of more leave no room for a second CTA
        return min(choices, key=lambda heads: heads * -(-pairs // (heads * self.tuning.fill)))
