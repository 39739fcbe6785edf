"""The scheduler against a fake device that remembers what every cache slot holds and checks all
that a program reads."""

from __future__ import annotations

import itertools
import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache.block_pool import BlockPool, hash_blocks
from jaxspec.cache.group_blocks import GroupBlocks
from jaxspec.cache.pool_sizes import PoolDemand, demand, steps_ahead
from jaxspec.config import CacheGroup
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Rounds, Scheduler, SchedulerConfig, Step
from jaxspec.sampling.params import SamplingParams

pytestmark = pytest.mark.once

VOCAB, STOP = 7, 0


def next_token(text: list[int]) -> int:
    """The language: a function of the text, so that equal prefixes stay equal."""
    return (3 * text[-1] + 5 * text[len(text) // 2] + len(text)) % VOCAB


def alone(request: Request) -> list[int]:
    text = list(request.prompt_token_ids)
    while len(text) < len(request.prompt_token_ids) + request.max_tokens:
        text.append(next_token(text))
        if text[-1] in request.stop_token_ids:
            break
    return text[len(request.prompt_token_ids) :]


@dataclass
class Row:
    """What the device knows of a slot: the text with its last token, which is not cached, and from
    where on the draft is behind."""

    request: Request
    text: list[int]
    draft_from: int
    active: bool = True


@dataclass
class FakeDevice:
    """Runs programs at once, and hands out their results later. target[group, block, offset] is the
    token whose key lies there, draft[...] that token and the one after it."""

    config: SchedulerConfig
    rng: random.Random
    scheduler: Scheduler
    rows: dict[int, Row] = field(default_factory=dict)
    target: dict[tuple[int, int, int], int] = field(default_factory=dict)
    draft: dict[tuple[int, int, int], tuple[int, int]] = field(default_factory=dict)

    def places(self, request: Request, position: int) -> list[tuple[int, int, int]]:
        """Of a row that is written, in every group."""
        return [self.place(request, i, position) for i in range(len(request.blocks))]

    def place(self, request: Request, group: int, position: int) -> tuple[int, int, int]:
        page, offset = divmod(position, self.config.block_size)
        assert page < request.blocks[group].num_pages, f"position {position} has no block"
        return group, request.blocks[group].at(page), offset

    def check_context(
        self, request: Request, text: list[int], num_cached: int, drafted: int
    ) -> None:
        """Everything that attention would read of rows from num_cached on, the draft's from drafted
        on, holds what it should."""
        for i, blocks in enumerate(self.scheduler.groups):
            for p in range(blocks.group.first_seen(num_cached), num_cached):
                assert self.target[self.place(request, i, p)] == text[p], (
                    f"the target's row {p} is another request's"
                )
            for p in range(
                blocks.group.first_seen(drafted), drafted if self.config.lookahead else 0
            ):
                assert self.draft[self.place(request, i, p)] == (text[p], text[p + 1]), (
                    f"the draft's row {p} is another request's"
                )

    def write(self, request: Request, position: int, token: int) -> None:
        self.target |= dict.fromkeys(self.places(request, position), token)

    def write_draft(self, request: Request, position: int, tokens: tuple[int, int]) -> None:
        if self.config.lookahead:
            self.draft |= dict.fromkeys(self.places(request, position), tokens)

    def apply(self, step: Step) -> list[tuple[Request, list[int]]]:
        for slot in step.cleared:
            self.rows.pop(slot, None)
        if step.sources is not None:
            self.rows = {to: self.rows[at] for to, at in enumerate(step.sources) if at in self.rows}
        for request in step.admitted:
            assert request.slot is not None
            self.rows.pop(request.slot, None)
        results = []
        tile = self.config.prefill_tile
        assert sum(-(-len(c.token_ids) // tile) for c in step.chunks) * tile <= max(
            tile, self.config.max_num_batched_tokens
        )
        for chunk in step.chunks:
            request, end = chunk.request, chunk.start + len(chunk.token_ids)
            text = request.all_token_ids
            assert chunk.token_ids == text[chunk.start : end]
            self.check_context(request, text, chunk.start, chunk.start)
            for p in range(chunk.start, end):
                self.write(request, p, text[p])
                if p + 1 < end or not chunk.ends:
                    self.write_draft(request, p, (text[p], text[p + 1]))
            if chunk.ends:
                assert request.slot is not None
                known = text[:end]
                first = next_token(known)
                self.rows[request.slot] = Row(request, [*known, first], end - 1)
                assert not request.num_generated or text[end:] == [first], (
                    "a request that goes on is not sampled anew"
                )
                if not request.num_generated:
                    results.append((request, [first]))
                    self.end(self.rows[request.slot], 1)
        return results

    def end(self, row: Row, num_new: int) -> None:
        generated = len(row.text) - len(row.request.prompt_token_ids)
        row.active = generated < row.request.max_tokens and not set(row.text[-num_new:]) & set(
            row.request.stop_token_ids
        )

    def round(self, found: Rounds) -> list[tuple[Request, list[int]]]:
        for slot in found.cleared:
            self.rows.pop(slot, None)
        results = []
        K = self.config.head_room - 1
        for request in found.requests:
            assert request.slot is not None
            row = self.rows[request.slot]
            assert row.request is request
            if not row.active:
                results.append((request, []))
                continue
            text, cached = row.text, len(row.text) - 1
            self.check_context(request, text, cached, row.draft_from)
            for p in range(row.draft_from, cached):
                self.write_draft(request, p, (text[p], text[p + 1]))
            for p in range(
                cached, min(cached + K + 1, self.config.max_model_len)
            ):  # drafts and their verification: rows to be overwritten
                self.write(request, p, -1)
                self.write_draft(request, p, (-1, -1))
            new: list[int] = []
            for _ in range(self.rng.randint(0, K) + 1):
                new.append(next_token([*text, *new]))
            row.draft_from = cached
            for p, token in enumerate([text[-1], *new[:-1]], start=cached):
                if p < self.config.max_model_len:
                    self.write(request, p, token)
            text += new
            self.end(row, len(new))
            results.append((request, new))
        for slot, row in self.rows.items():
            assert not row.active or self.owner(slot) is row.request, (
                "a row that nobody waits for still generates"
            )
        return results

    def owner(self, slot: int) -> Any:
        return self.scheduler.rows[slot] if slot < len(self.scheduler.rows) else None


def groups_of(
    config: SchedulerConfig,
    num_blocks: int | list[int],
    sights: tuple[dict[str, int], ...] = ({},),
    *,
    caching: bool = True,
) -> list[GroupBlocks]:
    """Groups that see as far as these say (nothing: everything), each with so many blocks."""
    counts = num_blocks if isinstance(num_blocks, list) else [num_blocks] * len(sights)
    groups = [CacheGroup(config.block_size, config.max_model_len, **sight) for sight in sights]
    return [
        GroupBlocks(g, BlockPool(n, enable_prefix_caching=caching))
        for g, n in zip(groups, counts, strict=True)
    ]


def demand_of(config: SchedulerConfig, sight: dict[str, int]) -> PoolDemand:
    group = CacheGroup(config.block_size, config.max_model_len, **sight)
    return demand(
        group,
        max_model_len=config.max_model_len,
        head_room=config.head_room,
        max_chunk=config.max_chunk,
        rounds_per_step=config.rounds_per_step,
    )


def check_holdings(scheduler: Scheduler, found: Rounds) -> None:
    """Nobody holds more than his group's demand says; who generates, nothing that the next round
    does not see."""
    for request in scheduler.running:
        for blocks, held in zip(scheduler.groups, request.blocks, strict=True):
            sight = {
                k: v for k in ("window", "chunk") if (v := getattr(blocks.group, k)) is not None
            }
            most = demand_of(scheduler.config, sight)
            assert len(held.blocks) <= (
                most.running if request in found.requests else most.least
            ), (blocks.group, held)
            if request in found.requests:
                assert (
                    held.first
                    == blocks.group.first_seen(request.num_consumed) // blocks.group.block_size
                )


def run(
    requests: list[Request],
    config: SchedulerConfig,
    num_blocks: int | list[int],
    *,
    sights: tuple[dict[str, int], ...] = ({},),
    depth: int = 0,
    seed: int = 0,
    arrivals: list[int] | None = None,
    cancelled: dict[int, int] | None = None,
    caching: bool = True,
) -> Scheduler:
    """Until nothing is left, as the engine does it. arrivals[i]: the step before which request i
    comes; cancelled: step -> request."""
    scheduler = Scheduler(config, groups_of(config, num_blocks, sights, caching=caching))
    device = FakeDevice(config, random.Random(seed), scheduler)
    in_flight: deque[tuple[bool, list[list[tuple[Request, list[int]]]]]] = (
        deque()
    )  # whether it is of rounds, and of each its results
    arrivals = arrivals or [0] * len(requests)

    def read() -> None:
        is_round, parts = in_flight.popleft()
        for request, tokens in itertools.chain(*parts):
            scheduler.read(request, tokens, is_round=is_round)

    def launch(is_round: bool, parts: list[list[tuple[Request, list[int]]]]) -> None:
        in_flight.append((is_round, parts))
        while len(in_flight) > depth:
            read()

    for at in range(5000):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == at:
                scheduler.add(request)
        if cancelled and at in cancelled and arrivals[cancelled[at]] <= at:
            scheduler.finish(requests[cancelled[at]], "cancelled")
        step = scheduler.schedule()
        assert (
            sum(1 for _ in scheduler.running) <= config.max_num_seqs
            and len(scheduler.rows) in config.buckets
        )
        results = device.apply(step)
        if step.chunks:
            launch(False, [results])
        found = scheduler.schedule_rounds()
        while found.wait:
            assert in_flight, "waits for results when none are on their way"
            read()
            found = scheduler.schedule_rounds()
        check_holdings(scheduler, found)
        if found.requests:
            launch(True, [device.round(found) for _ in range(config.rounds_per_step)])
        elif not step.chunks and in_flight:
            read()
        if not scheduler.has_requests and not in_flight and at >= max(arrivals):
            return scheduler
    raise AssertionError("the scheduler hangs")


def request(prompt: list[int], max_tokens: int = 8, stops: tuple[int, ...] = ()) -> Request:
    return Request(
        list(prompt), SamplingParams(temperature=0, max_tokens=max_tokens), max_tokens, stops
    )


def settings_of(**changes: Any) -> SchedulerConfig:
    values = {
        "max_num_seqs": 4,
        "buckets": (1, 2, 4),
        "max_model_len": 64,
        "max_num_batched_tokens": 16,
        "prefill_tile": 4,
    }
    return SchedulerConfig(**(values | {"block_size": 4, "head_room": 4, "lookahead": 1} | changes))


PREFIX = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]


SIGHTS: list[tuple[dict[str, int], ...]] = [
    ({},),
    ({}, {"window": 5}),
    ({"chunk": 8}, {}),
    ({}, {"window": 1}, {"chunk": 6}, {"window": 9}),
]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_mixture_of_requests_gives_each_its_own_text_and_all_blocks_back(
    data: st.DataObject,
) -> None:
    """Shared prefixes, pools that are far too small, arrivals and cancellations at any time,
    results read late, several KV-cache groups, several rounds a step."""
    K, lookahead = data.draw(st.sampled_from([(3, 1), (1, 1), (3, 0), (0, 0)]))
    size, sights = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from(SIGHTS))
    rounds, tokens = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([4, 16]))
    config = settings_of(
        head_room=K + 1,
        lookahead=lookahead,
        block_size=size,
        max_num_batched_tokens=tokens,
        rounds_per_step=rounds,
    )
    requests = []
    for _ in range(data.draw(st.integers(1, 12))):
        prompt = PREFIX[: data.draw(st.integers(0, 12))] + data.draw(
            st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12)
        )
        stops = data.draw(st.sampled_from([(), (STOP,)]))
        requests.append(request(prompt, data.draw(st.integers(1, 20)), stops))
    most = len(requests) - 1
    num_blocks = [
        demand_of(config, sight).least + data.draw(st.integers(0, 10)) for sight in sights
    ]
    cancelled = data.draw(st.dictionaries(st.integers(0, 30), st.integers(0, most), max_size=2))
    scheduler = run(
        requests,
        config,
        num_blocks,
        sights=sights,
        depth=data.draw(st.integers(0, steps_ahead(rounds))),
        seed=data.draw(st.integers(0, 99)),
        arrivals=data.draw(st.lists(st.integers(0, 10), min_size=most + 1, max_size=most + 1)),
        cancelled=cancelled,
        caching=data.draw(st.booleans()),
    )
    assert [g.pool.num_free for g in scheduler.groups] == num_blocks
    for r in requests:
        assert r.finish_reason in ("stop", "length", "cancelled")
        assert alone(r)[: r.num_generated] == r.token_ids
        assert r.finish_reason == "cancelled" or r.token_ids == alone(r)
        assert r.num_unread == r.num_unread_rounds == 0


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize(("sight", "reach"), [({"window": 6}, 5), ({"chunk": 8}, 7)])
def test_a_long_text_needs_a_windows_worth_of_blocks_only(
    sight: dict[str, int], reach: int, rounds: int
) -> None:
    """Prompt and text of 200 tokens, in pools that hold a window, and the chunk of prefill or the
    rounds: three in flight or launched and the pending rows of one, or two steps of four."""
    config = settings_of(max_model_len=200, rounds_per_step=rounds)
    few = demand_of(config, sight).least
    assert few == -(-(reach + {1: 16, 4: 36}[rounds] - 1) // 4) + 1
    requests = [request([*PREFIX * 8, i], 100) for i in (1, 2)]
    scheduler = run(requests, config, [100, few], sights=({}, sight), depth=steps_ahead(rounds))
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]
    assert [g.pool.num_free for g in scheduler.groups] == [100, few]


def test_a_window_needs_the_end_of_a_prefix_only_and_ends_it_where_that_is_gone() -> None:
    """Window 6 in blocks of 4: after a prefix of 12 tokens the row at 12 sees from 7 on, blocks 1
    and 2."""
    for gone, shared in (((), 12), ((0,), 12), ((2,), 8), ((1,), 4), ((0, 1), 0), ((0, 2), 0)):
        scheduler, device = started(sights=({}, {"window": 6}))
        prefill(scheduler, device, request([*PREFIX, 3, 3], 1))
        window = scheduler.groups[1].pool
        for page in gone:
            block = window.find(request_hashes([*PREFIX, 3, 3])[page])
            assert block is not None
            window._forget(block)
        second = request([*PREFIX, 3, 1])
        assert prefill(scheduler, device, second) == shared, gone
        assert (
            second.blocks[0].first == 0
            and second.blocks[1].first == {12: 1, 8: 0, 4: 0, 0: 0}[shared]
        )


def request_hashes(text: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    hash_blocks(text, 4, hashes, lookahead=1)
    return hashes


def test_of_two_long_prompts_that_need_each_others_blocks_the_first_gets_them() -> None:
    """A window's pool of 7 blocks: each has 3 for its first chunk, and neither 5 for its second."""
    config = settings_of(max_model_len=200, max_num_batched_tokens=12)
    assert demand_of(config, {"window": 9}).least == 7
    requests = [request([*PREFIX * 8, i], 20) for i in (1, 2)]
    scheduler = run(requests, config, [150, 7], sights=({}, {"window": 9}), caching=False)
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]
    assert scheduler.counts.num_preemptions > 0


def test_who_is_prefilled_waits_for_blocks_where_another_is_before_him() -> None:
    """He takes nobody's, and goes on when the first generates."""
    config = settings_of(max_model_len=200, max_num_batched_tokens=12)
    requests = [request([*PREFIX * 8, i], 20) for i in (1, 2)]
    scheduler = run(requests, config, [150, 8], sights=({}, {"window": 9}), caching=False)
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]
    assert scheduler.counts.num_preemptions == 0


def test_a_pool_too_small_for_all_preempts_and_loses_nothing() -> None:
    requests = [request([i, 1, 2], 40) for i in range(1, 6)]
    scheduler = run(requests, settings_of(), 18, depth=2)
    assert scheduler.counts.num_preemptions > 0
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]


def test_a_preempted_request_is_the_next_to_be_admitted() -> None:
    scheduler, device = started()
    requests = [request([i, 1, 2, 3], 30) for i in (1, 2, 3)]
    for r in requests[:2]:
        prefill(scheduler, device, r)
    scheduler.add(requests[2])
    scheduler._preempt_last()
    assert list(scheduler.waiting) == [requests[1], requests[2]]


def test_a_long_prompt_stalls_nobody_for_more_than_a_chunk() -> None:
    """Between two of its chunks the others have a round."""
    scheduler, device = started()
    short, long = request([1, 2], 30), request(list(range(1, 7)) * 9)
    scheduler.add(short)
    device.apply(scheduler.schedule())
    scheduler.read(short, [next_token([1, 2])], is_round=False)
    scheduler.add(long)
    for count in range(3):
        step = scheduler.schedule()
        assert [(c.request, len(c.token_ids)) for c in step.chunks] == [(long, 16)]
        device.apply(step)
        found = scheduler.schedule_rounds()
        assert found.requests == [short]
        for r, tokens in device.round(found):
            scheduler.read(r, tokens, is_round=True)
        assert short.num_generated > count


def test_a_prefix_is_shared_up_to_the_token_before_the_last() -> None:
    """With a draft and without: blocks of a text that goes on alike, and one token at least is left
    to compute."""
    for lookahead in (1, 0):
        for length, shared in ((9, 8), (8, 4), (12, 8), (13, 12)):
            scheduler, device = started(lookahead=lookahead)
            first = request([*PREFIX, 3, 3], 1)
            prefill(scheduler, device, first)
            second = request([*PREFIX, 3][:length])
            assert (
                prefill(scheduler, device, second) == shared == scheduler.counts.num_prefix_hits
            ), (lookahead, length)


@pytest.mark.parametrize(("lookahead", "shared"), [(1, 4), (0, 8)])
def test_with_a_draft_a_block_is_shared_only_where_the_next_token_is_the_same(
    lookahead: int, shared: int
) -> None:
    """The draft's row p depends on token p + 1, so the last row of a block belongs to one
    continuation."""
    scheduler, device = started(lookahead=lookahead)
    prefill(scheduler, device, request([*PREFIX[:8], 1, 1], 1))
    assert prefill(scheduler, device, request([*PREFIX[:8], 2, 2])) == shared


def test_blocks_of_two_continuations_are_not_put_together() -> None:
    """The first text's block 0 and the second text's block 1 both match the third text; the draft's
    last row of that block 0 does not."""
    scheduler, device = started()
    prefill(scheduler, device, request([1, 2, 3, 4, 1, 1, 1, 1, 1], 1))
    prefill(scheduler, device, request([1, 2, 3, 4, 2, 2, 2, 2, 2], 1))
    assert prefill(scheduler, device, request([1, 2, 3, 4, 2, 2, 2, 2, 3])) == 4


def started(
    *, sights: tuple[dict[str, int], ...] = ({},), **changes: Any
) -> tuple[Scheduler, FakeDevice]:
    config = settings_of(**changes)
    scheduler = Scheduler(config, groups_of(config, 64, sights))
    return scheduler, FakeDevice(config, random.Random(0), scheduler)


def prefill(scheduler: Scheduler, device: FakeDevice, request: Request) -> int:
    """Admit and prefill a request whose prompt is one chunk, and read its first token; how much of
    it was there already."""
    scheduler.add(request)
    step = scheduler.schedule()
    device.apply(step)
    scheduler.read(request, [next_token(request.prompt_token_ids)], is_round=False)
    return step.chunks[0].start


def test_a_block_is_not_shared_before_the_draft_has_consumed_it() -> None:
    """The last rows of a round wait as pending ones: they are the draft's only after the next."""
    scheduler, _ = started(block_size=1, max_model_len=32)
    one = request([1, 2, 3], 12)
    scheduler.add(one)
    scheduler.schedule()
    assert one.num_registered == 2, "the prompt's last row is pending"
    scheduler.read(one, [4], is_round=False)
    assert one.num_registered == 2
    scheduler.schedule_rounds()
    scheduler.read(one, [5, 6], is_round=True)
    assert one.num_registered == 3
    scheduler.schedule_rounds()
    scheduler.read(one, [1], is_round=True)
    assert one.num_registered == 5


def test_rows_are_kept_compact_when_requests_leave() -> None:
    scheduler, _ = started()
    requests = [request([i], 10) for i in (1, 2, 3, 4)]
    for r in requests:
        scheduler.add(r)
    assert scheduler.schedule().sources == [-1, -1, -1, -1]
    for r in requests[:3]:
        scheduler.finish(r, "cancelled")
    step = scheduler.schedule()
    assert sorted(step.cleared) == [0, 1, 2] and step.sources == [3] and requests[3].slot == 0


def test_a_request_placed_in_blocks_of_the_callers_choice_goes_on_from_there() -> None:
    """In every group the same blocks, as a benchmark gives them; those before the window go back at
    once."""
    scheduler, _ = started(sights=({}, {"window": 6}))
    one = request([1] * 20, 8)
    scheduler.place(one, 0, [[3, 4, 5, 6, 7, 8]] * 2)
    assert [g.pool.num_free for g in scheduler.groups] == [58, 58]
    for tokens in ([2, 3, 4], [5, 6, 1, 2], [3]):
        assert scheduler.schedule_rounds().requests == [one]
        assert one.blocks[1].first == (one.num_consumed - 5) // 4 and one.blocks[0].first == 0
        scheduler.read(one, tokens, is_round=True)
    assert one.finish_reason == "length" and [g.pool.num_free for g in scheduler.groups] == [64, 64]


def test_a_request_of_one_token_ends_after_prefill() -> None:
    scheduler, _ = started()
    scheduler.add(request([1, 2], 1))
    assert scheduler.schedule().chunks and scheduler.schedule_rounds().requests == []


def test_prompt_logprobs_need_the_whole_prompt() -> None:
    scheduler, _ = started()
    for params in (SamplingParams(0), SamplingParams(0, prompt_logprobs=1)):
        scheduler.add(Request(list(PREFIX), params, 1))
        step = scheduler.schedule()
        assert step.chunks[0].start == 0
        scheduler.read(step.chunks[0].request, [1], is_round=False)


def test_suspects_run_one_after_the_other_beside_those_that_are_cleared() -> None:
    """And no request that has not failed is admitted beside a suspect that may fail again."""
    config = SchedulerConfig(4, (4,), 32, 32, 4, 4)
    group = CacheGroup(4, 32)
    scheduler = Scheduler(config, [GroupBlocks(group, BlockPool(40))])
    requests = [Request([1, 2, 3], SamplingParams(), 20) for _ in range(4)]
    for request in requests[:2]:
        request.standing = "suspect"
    for request in requests:
        scheduler.add(request)
    admitted = []
    for _ in range(4):
        step = scheduler.schedule()
        admitted.append([requests.index(r) for r in step.admitted])
        for chunk in step.chunks:
            scheduler.read(chunk.request, [1], is_round=False)
        is_over = scheduler.is_trial_over()
        assert is_over == (len(admitted) > 2)
        for request in scheduler.schedule_rounds().requests:
            scheduler.read(request, [1], is_round=True)
    assert admitted == [[0], [1], [2, 3], []]
    assert [r.standing for r in requests] == ["cleared", "cleared", "trusted", "trusted"]
