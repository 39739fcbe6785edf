"""How a launch of decode attention is divided among CTAs.

A plan chooses the clusters that share a row's keys, the KV heads of a CTA and the tiles in flight.
Short CTAs that do not fit the GPU at once become fewer CTAs of several KV heads, with tiles of the
next head in flight while one ends: a second wave would begin like the first, with none in flight.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels.attention.bounds import KEYS, NARROW
from pallas_kernels.attention.inputs import Inputs
from pallas_kernels.attention.mosaic_gpu.tile_order import CLASSES
from pallas_kernels.attention.sizes import Sizes, sizes_of
from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.packing import packed_size


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    slots:   tiles in flight in a CTA; None: one to three, see Plan.slots
    fill:    CTAs that run at once: with up to 24 columns a thread has 110 to 240 registers, so two
             CTAs fit an SM
    cluster: CTAs that share a row's keys: 1, 2, 4 or 8; None: as many as `fill` has room for
    heads:   KV heads that a CTA does one after another; None: so many that all CTAs run at once
    """

    slots: int | None = None
    fill: int = 2 * NUM_SMS
    cluster: int | None = None
    heads: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """Sizes and division of one launch. window, num_out_rows: see Inputs."""

    window: int | None
    tuning: Tuning
    num_out_rows: int | None = None

    @classmethod
    def of(cls, inputs: Inputs, tuning: Tuning) -> Plan:
        return cls(
            **vars(sizes_of(inputs)),
            window=inputs.window,
            num_out_rows=inputs.num_out_rows,
            tuning=tuning,
        )

    @property
    def tile_rows(self) -> int:
        """Query rows in one row tile."""
        return min(self.rows, NARROW // self.queries_per_kv)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def columns(self) -> int:
        """The narrow side: row * queries_per_kv + head of the KV head, padded."""
        return packed_size(self.tile_rows * self.queries_per_kv)

    @property
    def tall(self) -> tuple[int, int]:
        """Shape of values."""
        return self.head_dim, self.columns

    @property
    def square(self) -> tuple[int, int]:
        """Shape of a tile's scores."""
        return KEYS, self.columns

    @property
    def tiles(self) -> int:
        """Tiles of keys that the block table can hold."""
        return -(-self.pages * self.block_size // KEYS)

    @property
    def _seen(self) -> int:
        """Most tiles of keys that a row tile sees."""
        if self.window is None:
            return self.tiles
        return min(self.tiles, max(self.window + self.tile_rows - 3, 0) // KEYS + 2)

    @property
    def _pairs(self) -> int:
        """Row tiles x KV heads: a CTA or a cluster takes one or more of them."""
        return self.batch * self.row_tiles * self.num_kv_heads

    @property
    def _short(self) -> bool:
        """Whether no CTA has many tiles: starts and ends then cost as much as the stream."""
        return self._seen <= 16 * self.cluster

    @property
    def slots(self) -> int:
        """Tiles in flight in a CTA.

        One where CTAs are many and short: with two, a CTA's last two tiles arrive late, together,
        and are then used one after the other.
        """
        if self.tuning.slots is not None:
            return self.tuning.slots
        if self.is_fp8:  # its tiles are half as large
            return 2 if self._short else 3
        many = self._pairs * self.cluster > NUM_SMS
        # The code for one slot takes 20 registers more: 32 columns would spill.
        return 1 if many and self._short and self.columns <= 16 else 2

    @property
    def cluster(self) -> int:
        """CTAs that share the keys of one row tile."""
        if self.tuning.cluster is not None:
            return self.tuning.cluster
        tiles, ctas = self._seen, self._pairs
        # One CTA for the whole tree has no registers left for more than 16 columns.
        cluster = 1 if self.columns <= 16 else 2
        # The states that the first CTA receives must fit beside its ring.
        largest = 4 if self.columns > 24 and self.head_dim > 64 else CLASSES
        while cluster < min(tiles, largest) and 2 * cluster * ctas <= self.tuning.fill:
            cluster *= 2
        return cluster

    @property
    def classes(self) -> int:
        """Classes of tiles that one CTA folds: each CTA of a cluster has a subtree."""
        return CLASSES // self.cluster

    @property
    def heads(self) -> int:
        """KV heads of a CTA.

        So many that the longest chain of heads on any SM is shortest; of equal choices, the most.
        One where a context can be long: batches of unequal lengths are faster with small CTAs that
        start when others end.
        """
        if self.tuning.heads is not None:
            return self.tuning.heads
        if self.cluster > 1 or not self._short:
            return 1
        pairs = self._pairs
        # The queries of more than 4 heads leave no room for a second CTA.
        choices = [heads for heads in (4, 3, 2, 1) if self.num_kv_heads % heads == 0]
        return min(choices, key=lambda heads: heads * -(-pairs // (heads * self.tuning.fill)))
