"""The scheduler and the engine's loop, over a runner that remembers what every cache slot holds
and checks all that a program reads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.cache.block_pool import BlockPool, hash_blocks
from jaxspec.cache.group_blocks import GroupBlocks
from jaxspec.cache.pool_sizes import PoolDemand, demand, steps_ahead
from jaxspec.config import CacheGroup
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.request import Request
from jaxspec.engine.round_configs import GREEDY
from jaxspec.engine.scheduler import Scheduler, SchedulerConfig
from jaxspec.sampling.params import SamplingParams
from tests.support.fake_runner import VOCAB, FakeRunner, engine_of, next_token

pytestmark = pytest.mark.once

STOP = 0


def alone(request: Request) -> list[int]:
    text = list(request.prompt_token_ids)
    while len(text) < len(request.prompt_token_ids) + request.max_tokens:
        text.append(next_token(text))
        if text[-1] in request.stop_token_ids:
            break
    return text[len(request.prompt_token_ids) :]


@dataclass(frozen=True)
class Workload:
    """Requests, and when they come and go.

    arrivals[i]: the step before which request i comes; None: all come before the first
    cancelled: step -> request
    """

    requests: list[Request]
    arrivals: list[int] | None = None
    cancelled: dict[int, int] = field(default_factory=dict)


def runner_of(
    config: SchedulerConfig,
    num_blocks: int | list[int],
    sights: tuple[dict[str, int], ...] = ({},),
    *,
    seed: int = 0,
    caching: bool = True,
) -> FakeRunner:
    """Return a runner whose groups see as far as `sights` say (nothing: everything).

    num_blocks: of each group
    """
    counts = num_blocks if isinstance(num_blocks, list) else [num_blocks] * len(sights)
    groups = [CacheGroup(config.block_size, config.max_model_len, **sight) for sight in sights]
    return FakeRunner(config, groups, counts, seed=seed, caching=caching)


def demand_of(config: SchedulerConfig, sight: dict[str, int]) -> PoolDemand:
    group = CacheGroup(config.block_size, config.max_model_len, **sight)
    return demand(
        group,
        max_model_len=config.max_model_len,
        head_room=config.head_room,
        max_chunk=config.max_chunk,
        rounds_per_step=config.rounds_per_step,
    )


def check_holdings(scheduler: Scheduler, generating: list[Request]) -> None:
    """No request holds more than its group's demand says.

    Those that generate hold no block that the next round does not see.
    """
    for request in scheduler.running:
        for blocks, held in zip(scheduler.groups, request.blocks, strict=True):
            sight = {
                k: v for k in ("window", "chunk") if (v := getattr(blocks.group, k)) is not None
            }
            most = demand_of(scheduler.config, sight)
            assert len(held.blocks) <= (most.running if request in generating else most.least), (
                blocks.group,
                held,
            )
            if request in generating:
                assert (
                    held.first
                    == blocks.group.first_seen(request.num_consumed) // blocks.group.block_size
                )


def run(workload: Workload, runner: FakeRunner, *, depth: int = 0) -> Scheduler:
    """Step the engine until no request is left, and return its scheduler."""
    engine = engine_of(runner, depth=depth)
    scheduler, config = engine.scheduler, runner.sizes
    runner.before_rounds = lambda generating: check_holdings(scheduler, generating)
    requests, cancelled = workload.requests, workload.cancelled
    arrivals = workload.arrivals or [0] * len(requests)
    for at in range(5000):
        for request, arrival in zip(requests, arrivals, strict=True):
            if arrival == at:
                engine.add(request)
        if at in cancelled and arrivals[cancelled[at]] <= at:
            engine.cancel(requests[cancelled[at]])
        engine.step()
        check_holdings(scheduler, [])
        assert (
            sum(1 for _ in scheduler.running) <= config.max_num_seqs
            and len(scheduler.rows) in config.buckets
        )
        if not engine.has_requests and at >= max(arrivals):
            assert not scheduler.has_requests
            for r in requests:
                # The engine drops what is in flight when the last running request ends.
                assert (r.num_unread, r.num_unread_rounds) == runner.num_unread(r)
                assert depth > 0 or r.num_unread == r.num_unread_rounds == 0
            return scheduler
    raise AssertionError("the scheduler hangs")


def request(
    prompt: list[int], max_tokens: int = 8, stops: tuple[int, ...] = (), draft_limit: int = 3
) -> Request:
    return Request(
        list(prompt),
        SamplingParams(temperature=0, max_tokens=max_tokens),
        max_tokens,
        stops,
        draft_limit=draft_limit,
        metrics=SpecDecodeMetrics(draft_limit),
    )


def settings_of(**changes: Any) -> SchedulerConfig:
    values: dict[str, Any] = {
        "max_num_seqs": 4,
        "buckets": (1, 2, 4),
        "max_model_len": 64,
        "max_tiles": 4,
        "prefill_tile": 4,
        "block_size": 4,
        "head_room": 4,
        "lookahead": 1,
        "lag": 4,
    }
    return SchedulerConfig(**(values | changes))


PREFIX = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]


SIGHTS: list[tuple[dict[str, int], ...]] = [
    ({},),
    ({}, {"window": 5}),
    ({"chunk": 8}, {}),
    ({}, {"window": 1}, {"chunk": 6}, {"window": 9}),
]


# K, lookahead and lag: EAGLE heads, independent models, drafts without caches, no draft.
DRAFTERS = [(3, 1, 4), (1, 1, 2), (3, 0, 1), (1, 0, 1), (3, 0, 0), (0, 0, 0)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_mixture_of_requests_gives_each_its_own_text_and_all_blocks_back(
    data: st.DataObject,
) -> None:
    """Shared prefixes, pools that are far too small, arrivals and cancellations at any time,
    results read late, several KV-cache groups, several rounds a step, rounds without a token,
    batches that are larger than need be."""
    K, lookahead, lag = data.draw(st.sampled_from(DRAFTERS))
    size, sights = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from(SIGHTS))
    rounds, tiles = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 4]))
    config = settings_of(
        head_room=K + 1,
        lookahead=lookahead,
        lag=lag,
        block_size=size,
        max_tiles=tiles,
        rounds_per_step=rounds,
        may_wait=data.draw(st.booleans()),
    )
    requests = []
    for _ in range(data.draw(st.integers(1, 12))):
        prompt = PREFIX[: data.draw(st.integers(0, 12))] + data.draw(
            st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=12)
        )
        stops = data.draw(st.sampled_from([(), (STOP,)]))
        requests.append(request(prompt, data.draw(st.integers(1, 20)), stops, draft_limit=K))
    most = len(requests) - 1
    num_blocks = [
        demand_of(config, sight).least + data.draw(st.integers(0, 10)) for sight in sights
    ]
    cancelled = data.draw(st.dictionaries(st.integers(0, 30), st.integers(0, most), max_size=2))
    depth = data.draw(st.integers(0, steps_ahead(rounds)))
    seed = data.draw(st.integers(0, 99))
    arrivals = data.draw(st.lists(st.integers(0, 10), min_size=most + 1, max_size=most + 1))
    runner = runner_of(config, num_blocks, sights, seed=seed, caching=data.draw(st.booleans()))
    if data.draw(st.booleans()):
        sizes = random.Random(seed)
        runner.batch_of = lambda least: sizes.choice([b for b in config.buckets if b >= least])
    scheduler = run(Workload(requests, arrivals, cancelled), runner, depth=depth)
    assert [g.pool.num_free for g in scheduler.groups] == num_blocks
    for r in requests:
        assert r.finish_reason in ("stop", "length", "cancelled")
        assert alone(r)[: r.num_generated] == r.token_ids
        assert r.finish_reason == "cancelled" or r.token_ids == alone(r)


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
    runner = runner_of(config, [100, few], ({}, sight))
    scheduler = run(Workload(requests), runner, depth=steps_ahead(rounds))
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]
    assert [g.pool.num_free for g in scheduler.groups] == [100, few]


def test_a_window_needs_the_end_of_a_prefix_only_and_ends_it_where_that_is_gone() -> None:
    """Window 6 in blocks of 4: after a prefix of 12 tokens the row at 12 sees from 7 on, blocks 1
    and 2."""
    for gone, shared in (((), 12), ((0,), 12), ((2,), 8), ((1,), 4), ((0, 1), 0), ((0, 2), 0)):
        scheduler, runner = started(sights=({}, {"window": 6}))
        prefill(scheduler, runner, request([*PREFIX, 3, 3], 1))
        window = scheduler.groups[1].pool
        for page in gone:
            block = window.find(request_hashes([*PREFIX, 3, 3])[page])
            assert block is not None
            window._forget(block)
        second = request([*PREFIX, 3, 1])
        assert prefill(scheduler, runner, second) == shared, gone
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
    config = settings_of(max_model_len=200, max_tiles=3)
    assert demand_of(config, {"window": 9}).least == 7
    requests = [request([*PREFIX * 8, i], 20) for i in (1, 2)]
    runner = runner_of(config, [150, 7], ({}, {"window": 9}), caching=False)
    scheduler = run(Workload(requests), runner)
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]
    assert scheduler.counts.num_preemptions > 0


def test_who_is_prefilled_waits_for_blocks_where_another_is_before_him() -> None:
    """He takes nobody's, and goes on when the first generates."""
    config = settings_of(max_model_len=200, max_tiles=3)
    requests = [request([*PREFIX * 8, i], 20) for i in (1, 2)]
    runner = runner_of(config, [150, 8], ({}, {"window": 9}), caching=False)
    scheduler = run(Workload(requests), runner)
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]
    assert scheduler.counts.num_preemptions == 0


def test_a_pool_too_small_for_all_preempts_and_loses_nothing() -> None:
    requests = [request([i, 1, 2], 40) for i in range(1, 6)]
    scheduler = run(Workload(requests), runner_of(settings_of(), 18), depth=2)
    assert scheduler.counts.num_preemptions > 0
    assert [r.token_ids for r in requests] == [alone(r) for r in requests]


def test_a_preempted_request_is_the_next_to_be_admitted() -> None:
    scheduler, runner = started()
    requests = [request([i, 1, 2, 3], 30) for i in (1, 2, 3)]
    for r in requests[:2]:
        prefill(scheduler, runner, r)
    scheduler.add(requests[2])
    scheduler._preempt_last()
    assert list(scheduler.waiting) == [requests[1], requests[2]]


def test_a_long_prompt_stalls_nobody_for_more_than_a_chunk() -> None:
    """Between two of its chunks the others have a round."""
    runner = runner_of(settings_of(), 64)
    engine = engine_of(runner)
    short, long = request([1, 2], 30), request(list(range(1, 7)) * 9)
    engine.add(short)
    engine.step()
    engine.add(long)
    for count in range(3):
        steps = len(runner.prefills), len(runner.rounds)
        engine.step()
        assert (len(runner.prefills), len(runner.rounds)) == (steps[0] + 1, steps[1] + 1)
        assert [(c.request, len(c.token_ids)) for c in runner.prefills[-1]] == [(long, 16)]
        assert runner.rounds[-1] == [short]
        assert short.num_generated > count + 1


def test_a_prefix_is_shared_up_to_the_token_before_the_last() -> None:
    """With a draft and without: blocks of a text that goes on alike, and one token at least is left
    to compute."""
    for lookahead in (1, 0):
        for length, shared in ((9, 8), (8, 4), (12, 8), (13, 12)):
            scheduler, runner = started(lookahead=lookahead)
            first = request([*PREFIX, 3, 3], 1)
            prefill(scheduler, runner, first)
            second = request([*PREFIX, 3][:length])
            assert (
                prefill(scheduler, runner, second) == shared == scheduler.counts.num_prefix_hits
            ), (lookahead, length)


@pytest.mark.parametrize(("lookahead", "shared"), [(1, 4), (0, 8)])
def test_with_a_draft_a_block_is_shared_only_where_the_next_token_is_the_same(
    lookahead: int, shared: int
) -> None:
    """The draft's row p depends on token p + 1, so the last row of a block belongs to one
    continuation."""
    scheduler, runner = started(lookahead=lookahead)
    prefill(scheduler, runner, request([*PREFIX[:8], 1, 1], 1))
    assert prefill(scheduler, runner, request([*PREFIX[:8], 2, 2])) == shared


def test_blocks_of_two_continuations_are_not_put_together() -> None:
    """The first text's block 0 and the second text's block 1 both match the third text; the draft's
    last row of that block 0 does not."""
    scheduler, runner = started()
    prefill(scheduler, runner, request([1, 2, 3, 4, 1, 1, 1, 1, 1], 1))
    prefill(scheduler, runner, request([1, 2, 3, 4, 2, 2, 2, 2, 2], 1))
    assert prefill(scheduler, runner, request([1, 2, 3, 4, 2, 2, 2, 2, 3])) == 4


def started(
    *, sights: tuple[dict[str, int], ...] = ({},), **changes: Any
) -> tuple[Scheduler, FakeRunner]:
    runner = runner_of(settings_of(**changes), 64, sights)
    return engine_of(runner).scheduler, runner


def prefill(scheduler: Scheduler, runner: FakeRunner, request: Request) -> int:
    """Admit and prefill a request whose prompt is one chunk, and read its first token.

    Returns how much of the prompt was in the cache already. No round follows, as it does in a step
    of the engine: the tests look at the blocks that the prompt holds.
    """
    scheduler.add(request)
    step = scheduler.schedule()
    runner.deactivate(step.cleared)
    if step.sources is not None:
        runner.move(step.sources)
    runner.admit(step.admitted, list(scheduler.running))
    runner.prefill(GREEDY, step.chunks)
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


def test_requests_move_to_the_batch_that_serves_them_and_back() -> None:
    """Those admitted in a step count too. The second needs a batch of four."""
    scheduler, _ = started()
    requests = [request([i], 10) for i in (1, 2)]
    asked: list[tuple[int, list[Request]]] = []

    def batch_for(least: int, admitted: Sequence[Request]) -> int:
        asked.append((least, list(admitted)))
        return 4 if requests[1] in (*admitted, *scheduler.running) else least

    scheduler.add(requests[0])
    assert scheduler.schedule(batch_for=batch_for).sources is None
    scheduler.add(requests[1])
    assert scheduler.schedule(batch_for=batch_for).sources == [0, -1, -1, -1]
    assert scheduler.schedule(batch_for=batch_for).sources is None, "it stays there"
    scheduler.finish(requests[1], "cancelled")
    assert scheduler.schedule(batch_for=batch_for).sources == [0]
    assert asked == [(1, requests[:1]), (2, requests[1:]), (2, []), (1, [])]


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
