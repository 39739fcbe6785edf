"""The block allocator: against a small model of it, and its rules one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.cache.block_pool import BlockPool, hash_blocks
from jaxspec.config import ConfigError

BLOCKS = 6


class PoolModel(RuleBasedStateMachine):
    """The same calls on a pool and on plain sets: who holds what, and which digests may still be
    found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS)
        self.held: list[list[int]] = []  # a request's blocks each, each block one reference
        self.digests: dict[
            int, bytes
        ] = {}  # what a block was registered as, until it is given out anew

    def references(self, block: int) -> int:
        return sum(blocks.count(block) for blocks in self.held)

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = {b for b in range(BLOCKS) if not self.references(b)}
        blocks = self.pool.allocate(count)
        if count > len(free):
            assert blocks is None
            return
        assert blocks is not None and len(set(blocks)) == count and set(blocks) <= free
        uncached = free - set(self.digests)
        assert set(blocks) <= uncached or uncached <= set(blocks), (
            "a cached block was given out while others were left"
        )
        for block in blocks:
            self.digests.pop(block, None)
        self.held.append(blocks)

    @precondition(lambda self: any(self.held))
    @rule(data=st.data(), digest=st.binary(min_size=1, max_size=1))
    def register(self, data: st.DataObject, digest: bytes) -> None:
        block = data.draw(st.sampled_from([b for blocks in self.held for b in blocks]))
        self.pool.register(block, digest)
        if digest not in self.digests.values():
            self.digests.setdefault(block, digest)

    @rule(digest=st.binary(min_size=1, max_size=1))
    def take(self, digest: bytes) -> None:
        blocks = self.pool.match([digest])
        assert blocks == [b for b, d in self.digests.items() if d == digest]
        assert self.pool.num_idle(blocks) == sum(self.references(b) == 0 for b in blocks)
        self.pool.take(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def free_blocks_are_those_that_nobody_holds(self) -> None:
        assert self.pool.num_free == sum(not self.references(b) for b in range(BLOCKS))


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def digests(token_ids: list[int], size: int = 2, *, lookahead: int = 0) -> list[bytes]:
    found: list[bytes] = []
    hash_blocks(token_ids, size, found, lookahead=lookahead)
    return found


def test_a_hash_covers_all_tokens_up_to_its_blocks_end() -> None:
    a = digests([1, 2, 3, 4, 5])
    assert len(a) == 2, "of full blocks only"
    assert digests([1, 2, 3, 4, 9, 9])[:2] == a
    assert digests([9, 2, 3, 4])[1] != a[1], "the same two tokens after others"
    assert digests([12, 3, 4, 5])[0] != digests([1, 23, 4, 5])[0]


def test_with_a_draft_a_hash_covers_the_token_after_the_block() -> None:
    one, other = digests([1, 2, 3, 4, 5], lookahead=1), digests([1, 2, 3, 4, 6], lookahead=1)
    assert len(one) == 2 and one[0] == other[0] and one[1] != other[1]
    assert len(digests([1, 2, 3, 4], lookahead=1)) == 1, (
        "the token after the second block is not known"
    )


@pytest.mark.parametrize("lookahead", [0, 1])
def test_hashes_grow_with_the_text(lookahead: int) -> None:
    grown: list[bytes] = []
    for end in range(8):
        hash_blocks(list(range(end)), 2, grown, lookahead=lookahead)
    assert grown == digests(list(range(7)), lookahead=lookahead)


def test_the_least_recently_used_text_goes_first_and_of_one_text_its_end() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(2), pool.allocate(2)
    assert first and second
    for block, digest in zip([*first, *second], [b"a", b"b", b"c", b"d"], strict=True):
        pool.register(block, digest)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(1) == [first[1]]
    assert pool.match([b"a", b"b"]) == [first[0]] and pool.match([b"c", b"d"]) == second
    pool.take([first[0]])  # used again: now it is the last to go
    pool.free([first[0]])
    assert pool.allocate(2) == [second[1], second[0]]


def test_of_two_blocks_with_the_same_tokens_one_is_the_cached_one() -> None:
    pool = BlockPool(2)
    (one,), (other,) = pool.allocate(1) or [], pool.allocate(1) or []
    pool.register(one, b"x")
    pool.register(other, b"x")
    assert pool.match([b"x"]) == [one]


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, enable_prefix_caching=False)
    blocks = pool.allocate(1)
    assert blocks
    pool.register(blocks[0], b"x")
    assert pool.match([b"x"]) == []


def test_a_pool_has_blocks() -> None:
    with pytest.raises(ConfigError, match="num_blocks: expected at least 1, got 0"):
        BlockPool(0)
