"""The blocks that requests hold of one KV-cache group: what its attention may still read, and what is about to be written. No jax.

A group that sees everything keeps all blocks of a request. One with a window or chunks gives back the blocks that no row to come sees
(vLLM's SlidingWindowManager); where they were, the block table says NULL_BLOCK, which nobody reads. A freed block goes to somebody who
writes it in a program launched later, and programs run in the order in which they were launched: those on their way read what they should.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxspec.cache.block_pool import BlockPool
from jaxspec.config import CacheGroup

NULL_BLOCK = (
    0  # of a page that no row sees any more: any block that there is, since its keys are masked
)


@dataclass
class Held:
    """A request's blocks of one group: those of its pages from `first` on. The pages before were given back, or never needed."""

    first: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def num_pages(self) -> int:
        """Columns of the block table up to the last one held."""
        return self.first + len(self.blocks)

    def at(self, page: int) -> int:
        assert self.first <= page, f"page {page} was given back"
        return self.blocks[page - self.first]


class GroupBlocks:
    """A group and its pool."""

    def __init__(self, group: CacheGroup, pool: BlockPool) -> None:
        self.group, self.pool = group, pool

    def first_page(self, position: int) -> int:
        """The first page that rows from this position on see."""
        return self.group.first_seen(position) // self.group.block_size

    def pages_of_prefix(self, count: int) -> range:
        """Of a prefix of `count` blocks, those that the rows after it see."""
        return range(self.first_page(count * self.group.block_size), count)

    def last_missing(self, hashes: Sequence[bytes], count: int) -> int:
        """The last of those pages that is not cached, -1 if all are."""
        return next(
            (
                page
                for page in reversed(self.pages_of_prefix(count))
                if self.pool.find(hashes[page]) is None
            ),
            -1,
        )

    def cached(self, hashes: Sequence[bytes], count: int) -> list[int]:
        """The blocks of those pages, all of which are cached; nothing is taken."""
        return self.pool.match([hashes[page] for page in self.pages_of_prefix(count)])

    def has_room(self, hashes: Sequence[bytes], count: int, num_pages: int, spare: int) -> bool:
        """Whether a request that starts from `count` cached blocks can have all up to num_pages, and leave `spare` free."""
        return (
            self.pool.num_free - self.pool.num_idle(self.cached(hashes, count))
            >= num_pages - count + spare
        )

    def start(self, hashes: Sequence[bytes], count: int, num_pages: int) -> Held:
        """Such a request's blocks: shared ones for what it sees of its prefix, and new ones."""
        shared = self.cached(hashes, count)
        self.pool.take(shared)
        held = Held(self.pages_of_prefix(count).start, shared)
        has_room = self.extend(held, num_pages)
        assert has_room
        return held

    def extend(self, held: Held, num_pages: int) -> bool:
        """New blocks up to num_pages; False, and nothing changes, if too few are free."""
        if num_pages > held.num_pages:
            new = self.pool.allocate(num_pages - held.num_pages)
            if new is None:
                return False
            held.blocks += new
        return True

    def free_unseen(self, held: Held, position: int) -> None:
        """Give back what rows from this position on do not see."""
        count = self.first_page(position) - held.first
        if count > 0:
            self.pool.free(held.blocks[:count])
            del held.blocks[:count]
            held.first += count

    def free(self, held: Held) -> None:
        self.pool.free(held.blocks)


def longest_prefix(groups: Sequence[GroupBlocks], hashes: Sequence[bytes]) -> int:
    """How many blocks of a text a request can start after: the most of which every group has cached all that the next rows see. That is
    every block of a group that sees everything, and the last few of one with a window; those of before need not be there any more."""
    count = min(
        (len(g.pool.match(hashes)) for g in groups if g.group.reach is None), default=len(hashes)
    )
    windowed = [g for g in groups if g.group.reach is not None]
    while (missing := max((g.last_missing(hashes, count) for g in windowed), default=-1)) >= 0:
        count = missing  # every prefix that ends between sees the missing block too
    return count
