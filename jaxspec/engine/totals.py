"""Totals over the running requests, from which programs are chosen. No jax.

A step may admit hundreds of requests, and the programs of each depend on all of them. So totals are
counted once a step, and each admitted request is added.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from jaxspec.engine.request import Request


@dataclass
class Totals:
    """Totals over the requests that a batch will hold.

    prefill_tile:   rows of a tile of prefill
    count:          how many requests there are
    most_pages:     pages of the request that holds the most
    fewest_drafts:  the least draft limit; None without requests
    prefill_tiles:  tiles of prefill that the requests still need
    """

    prefill_tile: int
    count: int = 0
    most_pages: int = 0
    fewest_drafts: int | None = None
    prefill_tiles: int = 0

    @classmethod
    def of(cls, requests: Iterable[Request], prefill_tile: int) -> Self:
        totals = cls(prefill_tile)
        for request in requests:
            totals.add(request)
        return totals

    def add(self, request: Request) -> None:
        """Count a request that is admitted."""
        self.most_pages = max(self.most_pages, request.num_pages)
        self.expect(request)
        if not request.is_prefilled:
            self.prefill_tiles += self.tiles_of(request.num_known - request.num_prefilled)

    def expect(self, request: Request) -> None:
        """Count a waiting request, which holds no blocks yet."""
        self.count += 1
        limit, fewest = request.draft_limit, self.fewest_drafts
        self.fewest_drafts = limit if fewest is None else min(limit, fewest)

    def tiles_of(self, num_tokens: int) -> int:
        """Return the tiles that prefill so many tokens of one request."""
        return -(-num_tokens // self.prefill_tile)
