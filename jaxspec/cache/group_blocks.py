"""The blocks that requests hold of one KV-cache group. No jax.

A request holds the blocks that attention may still read, and the blocks to write next. A group that
sees everything keeps all blocks of a request. A group with a window or chunks frees the blocks that
no later row sees (vLLM's SlidingWindowManager). The block table has NULL_BLOCK in their place,
which is never read. A freed block's next owner writes it in a program launched later. Programs run
in the order of their launch, so those already launched read the old contents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxspec.cache.block_pool import BlockPool
from jaxspec.config import CacheGroup

NULL_BLOCK = 0  # stands for a page that no row sees: any existing block, since its keys are masked


@dataclass
class RequestBlocks:
    """A request's blocks in one group.

    first:  the first page that has a block; earlier pages are freed, or never need one
    blocks: the blocks of the pages from `first` on
    """

    first: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Number of columns of the block table up to the last one held."""
        return self.first + len(self.blocks)

    def at(self, page: int) -> int:
        """Return the block of a page."""
        assert self.first <= page, f"page {page} was freed"
        return self.blocks[page - self.first]


class GroupBlocks:
    """A KV-cache group with its pool of blocks."""

    def __init__(self, group: CacheGroup, pool: BlockPool) -> None:
        self.group, self.pool = group, pool

    def first_page(self, position: int) -> int:
        """Return the first page that rows from this position on see."""
        return self.group.first_seen(position) // self.group.block_size

    def pages_of_prefix(self, count: int) -> range:
        """Return the pages of a prefix of `count` blocks that the rows after it see."""
        return range(self.first_page(count * self.group.block_size), count)

    def last_missing(self, hashes: Sequence[bytes], count: int) -> int:
        """Return the last page of pages_of_prefix that is not cached, -1 if all are."""
        return next(
            (
                page
                for page in reversed(self.pages_of_prefix(count))
                if self.pool.find(hashes[page]) is None
            ),
            -1,
        )

    def cached(self, hashes: Sequence[bytes], count: int) -> list[int]:
        """Return the blocks of pages_of_prefix, all of which are cached, without taking them."""
        return self.pool.match([hashes[page] for page in self.pages_of_prefix(count)])

    def has_room(self, hashes: Sequence[bytes], count: int, num_pages: int, spare: int) -> bool:
        """Return whether a request that starts from `count` cached blocks can have num_pages pages.

        `spare` blocks must stay free.
        """
        return (
            self.pool.num_free - self.pool.num_idle(self.cached(hashes, count))
            >= num_pages - count + spare
        )

    def start(self, hashes: Sequence[bytes], count: int, num_pages: int) -> RequestBlocks:
        """Take such a request's blocks: shared ones for its prefix, and new ones."""
        shared = self.cached(hashes, count)
        self.pool.take(shared)
        held = RequestBlocks(self.pages_of_prefix(count).start, shared)
        has_room = self.extend(held, num_pages)
        assert has_room
        return held

    def extend(self, held: RequestBlocks, num_pages: int) -> bool:
        """Add new blocks up to num_pages; False, and nothing changes, if too few are free."""
        if num_pages > held.num_pages:
            new = self.pool.allocate(num_pages - held.num_pages)
            if new is None:
                return False
            held.blocks += new
        return True

    def free_unseen(self, held: RequestBlocks, position: int) -> None:
        """Free the blocks that rows from this position on do not see."""
        count = self.first_page(position) - held.first
        if count > 0:
            self.pool.free(held.blocks[:count])
            del held.blocks[:count]
            held.first += count

    def free(self, held: RequestBlocks) -> None:
        """Free all blocks of a request that ends."""
        self.pool.free(held.blocks)


def longest_prefix(groups: Sequence[GroupBlocks], hashes: Sequence[bytes]) -> int:
    """Return the length in blocks of the longest prefix that every group has cached.

    A group that sees everything needs every block of the prefix; a group with a window needs the
    last few, which the rows after the prefix see.
    """
    count = min(
        (len(g.pool.match(hashes)) for g in groups if g.group.reach is None), default=len(hashes)
    )
    windowed = [g for g in groups if g.group.reach is not None]
    while (missing := max((g.last_missing(hashes, count) for g in windowed), default=-1)) >= 0:
        count = missing  # every prefix that ends between sees the missing block too
    return count
