"""The blocks of one KV-cache group: reference counts, and prefix caching by content hash.

A block without references is free. A free block may still be cached: it holds the keys and values
of a known run of tokens from position 0 on. The next request that starts with these tokens reuses
it. Cached blocks are given out for other contents only when no other free block is left, the least
recently used first. Nothing here touches the device.
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
    """Append the missing hashes of the full blocks of token_ids to `hashes`.

    A block's hash covers every token up to its end, by a chain over the preceding block. It is
    SHA-256, so that no two texts share a block.

    The hash covers the `lookahead` tokens after the block as well, and a block has no hash until
    they are known. A draft's row at position p may be made of token p + 1 (Drafter.lookahead). vLLM
    leaves out the last matching block instead. That costs a block each time, and it is not enough.
    If two texts differ right after block i, one may have cached block i and the other
    block i + 1. A third text, equal to the second, then finds both.
    """
    for i in range(len(hashes), (len(token_ids) - lookahead) // block_size):
        digest = hashlib.sha256(hashes[-1] if hashes else b"")
        covered = token_ids[i * block_size : (i + 1) * block_size + lookahead]
        digest.update(np.asarray(covered, np.int64).tobytes())
        hashes.append(digest.digest())


class BlockPool:
    """A pool of num_blocks blocks of one KV-cache group, with ids 0 .. num_blocks - 1.

    A group of layers that needs its own block table has its own pool.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        if num_blocks < 1:
            raise ConfigError(f"num_blocks: expected at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._references = [0] * num_blocks
        # Blocks are given out from the front.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can give out, cached ones included."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` blocks to overwrite, each with one reference.

        Returns None, and nothing changes, if fewer are free.
        """
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._references[block] = 1
        return blocks

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest prefix of `hashes`, without taking them."""
        blocks: list[int] = []
        for digest in hashes:
            block = self.find(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, digest: bytes) -> int | None:
        """Return the cached block with this hash, without taking it."""
        return self._block_of.get(digest)

    def num_idle(self, blocks: Sequence[int]) -> int:
        """Return how many of these blocks are free; taking them lowers num_free by this number."""
        return sum(self._references[block] == 0 for block in blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """Add a reference to each of these cached blocks."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def register(self, block: int, digest: bytes) -> None:
        """Record that this block, which has a reference, holds the contents of `digest`.

        If another block is registered with this digest, that one stays the cached block.
        """
        assert self._references[block] > 0, f"block {block} is free"
        if (
            self.enable_prefix_caching
            and digest not in self._block_of
            and block not in self._hash_of
        ):
            self._block_of[digest], self._hash_of[block] = block, digest

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each block of a request.

        The blocks are in the order of the request's tokens. The end of a text is evicted first.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was freed twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def forget(self) -> None:
        """Forget what all blocks hold; blocks that requests have stay theirs."""
        self._hash_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
