"""The blocks of one KV-cache group: reference counts, and prefix caching by the hash of what a block holds.

A block is free (nobody refers to it), and then perhaps still cached: it holds the keys and values of a known run of tokens from
position 0 on, and the next request that starts with these tokens takes it as it is. Cached blocks are given out anew only when no
other free block is left, the least recently used first. Nothing here touches the device.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from jaxspec.config import ConfigError


def hash_blocks(
    token_ids: Sequence[int], block_size: int, hashes: list[bytes], *, lookahead: int = 0
) -> None:
    """Append to `hashes` those of the full blocks of token_ids that it lacks.

    A block's hash covers every token up to its end (a chain over the block before). SHA-256, so that
    no two texts share a block.

    It covers the `lookahead` tokens after the block as well, and a block has no hash before they are
    known: a draft's row at position p may be made of token p + 1 (Drafter.lookahead). vLLM leaves out
    the last block that matches instead. That costs a block each time, and is not enough: of two texts
    that part right after block i, one may have cached block i, the other block i + 1, and a third
    text that equals the other finds both.
    """
    for i in range(len(hashes), (len(token_ids) - lookahead) // block_size):
        digest = hashlib.sha256(hashes[-1] if hashes else b"")
        covered = token_ids[i * block_size : (i + 1) * block_size + lookahead]
        digest.update(np.asarray(covered, np.int64).tobytes())
        hashes.append(digest.digest())


class BlockPool:
    """num_blocks blocks of one KV-cache group, ids 0 .. num_blocks - 1. A group of layers that needs its own table has its own pool."""

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks: expected at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(
            range(num_blocks)
        )  # given out from the front
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give out, cached ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks whose contents count for nothing, each with one reference; None, and nothing changes, if there are fewer."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of `hashes`; nothing is taken."""
        blocks: list[int] = []
        for digest in hashes:
            block = self.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, digest: bytes) -> int | None:
        """The cached block with this hash; nothing is taken."""
        return self._block_of.get(digest)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """How many of them nobody refers to: taking those makes so many fewer free."""
        return sum(self._references[block] == 0 for block in blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """One reference more to each of these cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def register(self, block: int, digest: bytes) -> None:
        """This block, which somebody refers to, holds what `digest` says. Another block that does so already stays the cached one."""
        assert self._references[block] > 0, f"block {block} is free"
        if (
            self.enable_prefix_caching
            and digest not in self._block_of
            and block not in self._hash_of
        ):
            self._block_of[digest], self._hash_of[block] = block, digest

    def free(self, blocks: Sequence[int]) -> None:
        """One reference fewer to each block of a request, given in the order of its tokens: the end of a text is forgotten first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
