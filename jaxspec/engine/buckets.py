"""The few shapes that programs compile for: pages of block tables, tiles of prefill. No jax.

On a CPU pages are bucketed too, since attention over padding doubles the time there. On a GPU the
table is whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxspec.config import EngineConfig

MIN_PAGES_TOKENS = 128  # page tables are bucketed in powers of two from here up
MIN_PREFILL_TOKENS = 192  # of a prefill call's bucket on a GPU, where fewer take as long


@dataclass(frozen=True)
class Buckets:
    """The shapes of one engine.

    prefill_tile: rows of a tile of prefill
    """

    config: EngineConfig
    prefill_tile: int
    on_gpu: bool

    @property
    def max_pages(self) -> int:
        """Columns of a block table for max_model_len tokens."""
        return -(-self.config.max_model_len // self.config.block_size)

    @property
    def max_tiles(self) -> int:
        """Tiles of a prefill call at most."""
        return self.config.prefill_tiles(self.prefill_tile)

    @property
    def max_chunk(self) -> int:
        """Tokens of a prefill call at most."""
        return self.max_tiles * self.prefill_tile

    @property
    def max_ending(self) -> int:
        """Prompts that end in a prefill call at most."""
        return min(self.max_tiles, self.config.max_num_seqs)

    def pages(self, num_blocks: int) -> int:
        """Return the columns of the block table for requests of at most so many blocks."""
        if self.on_gpu:
            return self.max_pages
        size = self.config.block_size
        return min(
            -(-power_of_two(max(num_blocks * size, MIN_PAGES_TOKENS)) // size), self.max_pages
        )

    def pages_of(self, num_blocks: Iterable[int]) -> int:
        """Return the columns of the block table for requests of these numbers of blocks."""
        return self.max_pages if self.on_gpu else self.pages(max(num_blocks))

    def tiles(self, num_tiles: int) -> int:
        """Return the tiles of the smallest prefill call that holds so many.

        Calls have powers of two, on a GPU also three quarters of these.
        """
        if self.config.batch_invariant:
            return self.max_tiles
        if not self.on_gpu:
            return min(power_of_two(num_tiles), self.max_tiles)
        size = power_of_two(max(num_tiles, -(-MIN_PREFILL_TOKENS // self.prefill_tile)))
        return min(size * 3 // 4 if num_tiles <= size * 3 // 4 else size, self.max_tiles)

    def every_pages(self, shortest: int, longest: int) -> list[int]:
        """Return every bucket of requests that hold from shortest to longest tokens."""
        size = self.config.block_size
        return sorted(
            {
                self.pages(n)
                for n in range(
                    -(-shortest // size), -(-min(longest, self.config.max_model_len) // size) + 1
                )
            }
        )

    def every_tiles(self, fewest: int, most: int) -> list[int]:
        """Return every bucket of prefill calls of that many tiles."""
        return sorted(
            {
                self.tiles(n)
                for n in range(min(fewest, self.max_tiles), min(most, self.max_tiles) + 1)
            }
        )


@dataclass(frozen=True)
class Shapes:
    """The buckets that programs are compiled for.

    batches: requests that run together
    pages: columns of their block tables
    tiles: tiles of a prefill call
    """

    batches: Sequence[int]
    pages: Sequence[int]
    tiles: Sequence[int]


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def buckets_between(buckets: Sequence[int], start: int, end: int) -> list[int]:
    """Return the buckets after `start` on the way to `end`."""
    at, to = buckets.index(start), buckets.index(end)
    step = 1 if to > at else -1
    return [buckets[i] for i in range(at + step, to + step, step)] if at != to else []
