"""What a request holds of a group with a window, against a small model of it: just the pages that
its rows to come see."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jaxspec.cache.block_pool import BlockPool
from jaxspec.cache.group_blocks import GroupBlocks, RequestBlocks, longest_prefix
from jaxspec.cache.pool_sizes import PoolDemand, demand, fit, most_pages
from jaxspec.config import CacheGroup

SIZE, BLOCKS, LENGTH = 3, 14, 60
DIGESTS = [
    bytes([i]) for i in range(LENGTH // SIZE)
]  # of the pages of the one text that everybody writes


def seen_from(group: CacheGroup, position: int) -> set[int]:
    """Pages of all positions that rows from this one on see behind them, by the definitions."""
    seen: set[int] = set()
    for row in range(position, LENGTH):
        for key in range(row):
            if (group.window is not None and key > row - group.window) or (
                group.chunk is not None and key // group.chunk == row // group.chunk
            ):
                seen.add(key // group.block_size)
    return seen


class GroupModel(RuleBasedStateMachine):
    """Requests write one text, from some cached prefix on, a few tokens at a time, and end; each
    checks what it holds."""

    group = CacheGroup(SIZE, LENGTH, window=5)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = GroupBlocks(self.group, BlockPool(BLOCKS))
        self.running: list[
            tuple[RequestBlocks, list[int]]
        ] = []  # what it holds; [position of its next row, end of what it has blocks for]
        self.written: dict[int, int] = {}  # block -> page whose content it has

    @rule(data=st.data(), tokens=st.integers(1, 9))
    def start(self, data: st.DataObject, tokens: int) -> None:
        longest = longest_prefix([self.blocks], DIGESTS[: (LENGTH - 10) // SIZE])
        missing = [
            p
            for p in seen_from(self.group, longest * SIZE)
            if p < longest and self.blocks.pool.find(DIGESTS[p]) is None
        ]
        assert not missing, "a prefix was found of which a page that is seen is gone"
        count = data.draw(st.sampled_from([longest, 0]))
        end = count * SIZE + tokens
        if not self.blocks.has_room(DIGESTS, count, -(-end // SIZE), spare=0):
            return
        held = self.blocks.start(DIGESTS, count, -(-end // SIZE))
        for page in range(held.first, count):
            assert self.written[held.at(page)] == page, "a shared block holds another page"
        self.running.append((held, [count * SIZE, end]))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), kept=st.integers(0, 4), more=st.integers(1, 9))
    def advance(self, data: st.DataObject, kept: int, more: int) -> None:
        """Write up to the end; go on from `kept` tokens before it (the others were rejected), with
        blocks for `more`."""
        held, text = data.draw(st.sampled_from(self.running))
        position, end = text
        for page in range(position // SIZE, -(-end // SIZE)):
            self.written[held.at(page)] = page
        for page in range(position // SIZE, (end - min(kept, end - position)) // SIZE):
            self.blocks.pool.register(held.at(page), DIGESTS[page])
        text[0] = end - min(kept, end - position)
        self.blocks.free_unseen(held, text[0])
        more = min(text[0] + more, LENGTH)
        if self.blocks.extend(held, -(-more // SIZE)):
            text[1] = max(end, more)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        held, _ = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.blocks.free(held)

    @invariant()
    def everybody_holds_what_he_sees_and_nothing_more(self) -> None:
        references: dict[int, int] = {}
        for held, (position, end) in self.running:
            needed = {p for p in seen_from(self.group, position) if p < position // SIZE} | set(
                range(position // SIZE, -(-end // SIZE))
            )
            assert set(range(held.first, held.num_pages)) == needed
            assert len(held.blocks) <= most_pages(self.group, max(1, end - position))
            for page in needed:
                if page * SIZE < position:
                    assert self.written[held.at(page)] == page, (
                        "a block that is seen was given to somebody else"
                    )
                references[held.at(page)] = references.get(held.at(page), 0) + 1
        assert self.blocks.pool.num_free == BLOCKS - len(references)

    def teardown(self) -> None:
        for held, _ in self.running:
            self.blocks.free(held)
        assert self.blocks.pool.num_free == BLOCKS


@pytest.mark.parametrize(
    "sight", [{"window": 5}, {"window": 1}, {"window": 3}, {"chunk": 4}, {"chunk": 6}]
)
def test_a_window_keeps_what_its_rows_see(sight: dict[str, int]) -> None:
    machine = type("Machine", (GroupModel,), {"group": CacheGroup(SIZE, LENGTH, **sight)})
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    machine.TestCase("runTest").runTest()


def test_a_group_that_sees_everything_keeps_everything() -> None:
    blocks = GroupBlocks(CacheGroup(4, 100), BlockPool(10))
    held = blocks.start([], 0, 5)
    blocks.free_unseen(held, 20)
    assert held == RequestBlocks(0, [0, 1, 2, 3, 4]) and blocks.pool.num_free == 5
    assert not blocks.extend(held, 11) and held.num_pages == 5


# ---- how many blocks a pool has


@pytest.mark.parametrize("sight", [{"window": 6}, {"chunk": 8}])
@pytest.mark.parametrize(("rows", "size"), [(1, 4), (16, 4), (7, 1), (5, 3)])
def test_no_run_of_rows_sees_and_writes_more_pages_than_that(
    sight: dict[str, int], rows: int, size: int
) -> None:
    group = CacheGroup(size, 400, **sight)
    counts = {-(-(p + rows) // size) - group.first_seen(p) // size for p in range(200)}
    assert max(counts) <= most_pages(group, rows) <= max(counts) + 1


def test_windows_get_what_those_who_run_hold_and_the_rest_is_for_whole_texts() -> None:
    full = demand(
        CacheGroup(64, 4096), max_model_len=4096, head_room=4, max_chunk=512, rounds_per_step=1
    )
    window = demand(
        CacheGroup(64, 4096, window=128),
        max_model_len=4096,
        head_room=4,
        max_chunk=512,
        rounds_per_step=1,
    )
    assert (full.least, window.running, window.prefilling) == (
        64,
        -(-(127 + 15) // 64) + 1,
        -(-(127 + 511) // 64) + 1,
    )
    for_eight = 8 * window.running + 2 * window.prefilling
    assert (
        window.of_requests(8, caching=False) == for_eight
        and window.of_requests(8, caching=True) == 2 * for_eight
    )
    fits = lambda room: fit([full, window], [10, 7], room, max_num_seqs=8, caching=False)  # noqa: E731
    assert fits(1 << 40) == (8 * 64, for_eight)
    assert fits(for_eight * 7 + 100 * 10 + 9) == (100, for_eight)
    few, windows = fits(for_eight * 7 + 63 * 10)
    assert few >= 64 and window.least <= windows < for_eight, (
        "with too little for one text the window has fewer"
    )
    assert fits(window.least * 7 + 64 * 10) == (64, window.least)
    assert min(fits(window.least * 7 + 64 * 10 - 1)) < 64


def test_one_group_gets_all_the_room_and_no_more_than_can_be_filled() -> None:
    assert fit([PoolDemand(10, 10, 10, False)], [8], 800, max_num_seqs=4, caching=True) == (40,)
    assert fit([PoolDemand(10, 10, 10, False)], [8], 165, max_num_seqs=4, caching=True) == (20,)
    assert fit([PoolDemand(10, 10, 10, False)], [8], 79, max_num_seqs=4, caching=True) == (9,)
