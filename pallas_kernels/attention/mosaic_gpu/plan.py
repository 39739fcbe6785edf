"""How a launch of decode attention is divided among CTAs.

A plan chooses the clusters that share a row's keys, the parts of its queries, the KV heads of a CTA
and the tiles in flight. docs/notes/decode-attention.md has the times that the choices follow.

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

LONG = 64  # tiles: in longer block tables, the reads of keys set the time
PARTS = {16: (2,), 24: (3,), 32: (4, 2)}  # columns of a row tile -> parts to try, the best first


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    slots:   tiles in flight in a CTA; None: one to three, see Plan.slots
    fill:    CTAs that run at once with two on an SM: with up to 24 columns a thread has 110 to 240
             registers
    cluster: CTAs that share a row's keys: 1, 2, 4 or 8; None: see Plan.cluster
    heads:   KV heads that a CTA does one after another; None: so many that all CTAs run at once
    parts:   CTAs or clusters that share the queries of one row tile; None: see Plan.parts
    """

    slots: int | None = None
    fill: int = 2 * NUM_SMS
    cluster: int | None = None
    heads: int | None = None
    parts: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """Sizes and division of one launch. window, num_out_rows: see Inputs."""

    window: int | None
    tuning: Tuning
    num_out_rows: int | None = None

    @classmethod
    def of(cls, inputs: Inputs, tuning: Tuning) -> Plan:
        plan = cls(
            **vars(sizes_of(inputs)),
            window=inputs.window,
            num_out_rows=inputs.num_out_rows,
            tuning=tuning,
        )
        if not plan.divides(plan.parts):
            got = f"{plan.parts} of {plan.packed_columns} columns"
            raise ValueError(f"parts: expected them to have whole rows and 8 columns, got {got}")
        return plan

    @property
    def tile_rows(self) -> int:
        """Query rows in one row tile."""
        return min(self.rows, NARROW // self.queries_per_kv)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def packed_columns(self) -> int:
        """Queries of a row tile: row * queries_per_kv + head of the KV head, padded."""
        return packed_size(self.tile_rows * self.queries_per_kv)

    @property
    def parts(self) -> int:
        """Parts of a row tile's queries, each for CTAs of its own, which read all of its keys.

        CTAs of fewer columns start and end sooner, and leave the next kernel more shared memory. So
        there are parts where the SMs have room for clusters of two of each. In long tables there
        are none where clusters of eight read the keys once, and no more than two elsewhere. Halves
        of 32 columns of 128 values pay without that room too: two of their CTAs fit an SM.
        """
        if self.tuning.parts is not None:
            return self.tuning.parts
        columns, places = self.packed_columns, self._row_tiles_of_heads
        if self._is_long and columns < NARROW and CLASSES * places <= NUM_SMS:
            return 1
        for parts in PARTS.get(columns, ()):
            if not self.divides(parts) or (self._is_long and parts > 2):
                continue
            are_halves = parts == 2 and columns == NARROW and self.head_dim > 64
            if 2 * parts * places <= NUM_SMS or (are_halves and not self._is_long):
                return parts
        return 1

    def divides(self, parts: int) -> bool:
        """Return whether so many parts have whole rows and columns that wgmma takes."""
        columns = self.packed_columns // parts
        is_whole = self.packed_columns % (8 * parts) == 0 and columns % self.queries_per_kv == 0
        return parts == 1 or is_whole

    @property
    def part_rows(self) -> int:
        """Query rows of a CTA."""
        return self.tile_rows if self.parts == 1 else self.columns // self.queries_per_kv

    @property
    def columns(self) -> int:
        """The narrow side: queries of a CTA."""
        return self.packed_columns // self.parts

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
    def _is_long(self) -> bool:
        return self._seen > LONG

    @property
    def _row_tiles_of_heads(self) -> int:
        """Row tiles x KV heads."""
        return self.batch * self.row_tiles * self.num_kv_heads

    @property
    def _pairs(self) -> int:
        """Parts of row tiles x KV heads: a CTA or a cluster takes one or more of them."""
        return self._row_tiles_of_heads * self.parts

    @property
    def _short(self) -> bool:
        """Whether no CTA has many tiles: starts and ends then cost as much as the stream."""
        return self._seen <= 16 * self.cluster

    @property
    def slots(self) -> int:
        """Tiles in flight in a CTA.

        One where CTAs are many and short: with two, a CTA's last two tiles arrive late, together,
        and are then used one after the other. And one where CTAs of parts have a few tiles: with
        little shared memory they leave more SMs to the next product, whose weights arrive then.
        """
        if self.tuning.slots is not None:
            return self.tuning.slots
        if self.is_fp8:  # its tiles are half as large
            return 2 if self._short else 3
        many = self._pairs * self.cluster > NUM_SMS and self._short
        few = self.parts > 1 and self._seen <= 4 * self.cluster
        # The code for one slot takes 20 registers more: 32 columns would spill.
        return 1 if (many or few) and self.columns <= 16 else 2

    @property
    def cluster(self) -> int:
        """CTAs that share the keys of one row tile, or of one part of it."""
        if self.tuning.cluster is not None:
            return self.tuning.cluster
        # One CTA for the whole tree has no registers left for more than 16 columns.
        cluster = 1 if self.columns <= 16 else 2
        # The states that the first CTA receives must fit beside its ring.
        is_wide = self.columns > 24 and self.head_dim > 64
        largest = 4 if is_wide or self.parts > 1 else CLASSES
        while cluster < min(self._seen, largest) and self._has_room(2 * cluster):
            cluster *= 2
        return cluster

    def _has_room(self, cluster: int) -> bool:
        """Return whether so many CTAs may share the keys of each row tile or part.

        Clusters of two: two CTAs an SM. Of four: one CTA an SM, or two in long tables without
        parts. Of eight: half of the SMs, or all in long tables.
        """
        ctas = cluster * self._pairs
        if cluster == CLASSES:
            return ctas <= NUM_SMS // (1 if self._is_long else 2)
        two_an_sm = cluster == 2 or (self._is_long and self.parts == 1)
        return ctas <= (self.tuning.fill if two_an_sm else NUM_SMS)

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
