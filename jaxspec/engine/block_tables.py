"""Block tables of the running requests, on the host and on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.sharding import NamedSharding

from jaxspec.cache.group_blocks import NULL_BLOCK, RequestBlocks
from jaxspec.engine.request import Request
from jaxspec.parallel.layout import put


class BlockTables:
    """A block table per KV-cache group, with a row per slot. Programs take them as a tuple.

    sharding: where the programs read them; None for the default device
    """

    def __init__(
        self, num_groups: int, max_pages: int, sharding: NamedSharding | None = None
    ) -> None:
        self.num_groups, self.max_pages, self.sharding = num_groups, max_pages, sharding
        self.reset(0)

    def reset(self, num_rows: int) -> None:
        """Start with empty rows."""
        self._tables = [self._blank(num_rows, self.max_pages) for _ in range(self.num_groups)]
        # Per row: (admission number of its request, pages copied so far). A freed block is not
        # read, so that alone needs no new table.
        self._rows = [[(0, 0)] * num_rows for _ in range(self.num_groups)]
        self._on_device: list[Any] = [None] * self.num_groups

    @staticmethod
    def _blank(num_rows: int, pages: int) -> np.ndarray:
        return np.full((num_rows, pages), NULL_BLOCK, np.int32)

    def update(self, requests: Iterable[Request]) -> None:
        """Take over the blocks that these requests hold."""
        for request in requests:
            assert request.slot is not None
            for group, held in enumerate(request.blocks):
                row = (request.admitted, held.num_pages)
                if self._rows[group][request.slot] != row:
                    write_row(self._tables[group][request.slot], held)
                    self._rows[group][request.slot], self._on_device[group] = row, None

    def changed(self, pages: int) -> dict[int, np.ndarray]:
        """Return the tables that the device does not have: all rows, the first `pages` columns.

        By group. A copy to the device costs as much as a small model's round, so only these are
        copied. The arrays are copies, since the device may read them later.
        """
        return {
            group: table[:, :pages].copy()
            for group, table in enumerate(self._tables)
            if (copied := self._on_device[group]) is None or copied.shape != (table.shape[0], pages)
        }

    def on_device(self, changed: Mapping[int, np.ndarray]) -> Any:
        """Return the tables of all groups on the device, after copying those that have changed."""
        for group, table in changed.items():
            self._on_device[group] = put(table, self.sharding)
        return tuple(self._on_device)

    def for_prefill(self, owners: Sequence[Request], num_rows: int, pages: int) -> Any:
        """Return a row for each tile of a prefill call, whose requests are `owners`.

        The rows after them are blank.
        """
        tables = [self._blank(num_rows, pages) for _ in range(self.num_groups)]
        for row, request in enumerate(owners):
            for table, held in zip(tables, request.blocks, strict=True):
                write_row(table[row], held)
        return tuple(tables)

    def idle(self, num_rows: int, pages: int) -> Any:
        """Return blank rows."""
        return tuple(self._blank(num_rows, pages) for _ in range(self.num_groups))


def write_row(row: np.ndarray, held: RequestBlocks) -> None:
    """Write a request's blocks into its row of a block table."""
    row[: held.first] = NULL_BLOCK
    row[held.first : held.num_pages] = held.blocks
