"""Replicas share one queue: each request runs on one of them, and what happens to it there is its
own affair."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.config import CacheGroup
from jaxspec.engine import replicas as replicas_module
from jaxspec.engine.engine import Commands
from jaxspec.engine.metrics import SpecDecodeMetrics
from jaxspec.engine.replicas import Replicas
from jaxspec.engine.request import FinishReason, Request
from jaxspec.engine.scheduler import SchedulerConfig
from tests.support.fake_runner import VOCAB, FakeRunner, engine_of, next_token

pytestmark = pytest.mark.once

SLOTS, BLOCK, LIMIT = 2, 4, 64
SIZES = SchedulerConfig(
    max_num_seqs=SLOTS,
    buckets=(1, 2),
    max_model_len=LIMIT,
    max_tiles=4,
    prefill_tile=4,
    block_size=BLOCK,
    head_room=3,
    lookahead=1,
    lag=3,
)


def make(
    count: int, *, slots: int = SLOTS, blocks: int = 40, depth: int = 0
) -> tuple[Replicas, list[FakeRunner]]:
    sizes = replace(SIZES, max_num_seqs=slots, buckets=(1, slots))
    groups = [CacheGroup(BLOCK, LIMIT)]
    runners = [FakeRunner(sizes, groups, [blocks], seed=i, caching=True) for i in range(count)]
    return Replicas([engine_of(runner, depth=depth) for runner in runners]), runners


def request(prompt: Sequence[int], max_tokens: int) -> Request:
    params = SamplingParams(0.0, max_tokens=max_tokens)
    K = SIZES.head_room - 1
    metrics = SpecDecodeMetrics(K)
    return Request(list(prompt), params, max_tokens, draft_limit=K, metrics=metrics)


def text_of(prompt: Sequence[int], max_tokens: int) -> list[int]:
    text = list(prompt)
    for _ in range(max_tokens):
        text.append(next_token(text))
    return text


def finish(replicas: Replicas, most: int = 2000) -> None:
    for _ in range(most):
        if not replicas.has_requests:
            return
        replicas.step()
    raise AssertionError("expected every request to end")


def advance_to_the_end(replicas: Replicas, commands: Commands, most: int = 2000) -> None:
    for _ in range(most):
        if not (replicas.has_requests or commands or replicas.failed):
            return
        replicas.advance(commands)
    raise AssertionError("expected every request to end")


def ran_on(runners: Sequence[FakeRunner], one: Request) -> list[int]:
    """The replicas that prefilled a request."""
    return [
        i
        for i, runner in enumerate(runners)
        if any(chunk.request is one for chunks in runner.prefills for chunk in chunks)
    ]


@pytest.mark.parametrize(("count", "blocks", "depth"), [(2, 40, 0), (3, 18, 0), (2, 18, 2)])
def test_requests_spread_and_each_has_its_text(count: int, blocks: int, depth: int) -> None:
    """With few blocks, requests are preempted; they stay on their replica."""
    replicas, runners = make(count, blocks=blocks, depth=depth)
    rng, requests = random.Random(count), []
    for _ in range(30):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        requests.append(request(prompt, rng.randint(10, 40)))
        replicas.add(requests[-1])
        for _ in range(rng.randint(0, 3)):
            replicas.step()
            # What waits on a replica has no blocks there; the others wait in front of all of them.
            assert blocks < 40 or not any(e.scheduler.waiting for e in replicas.engines)
    finish(replicas)
    for each in requests:
        assert each.all_token_ids == text_of(each.prompt_token_ids, each.max_tokens)
    homes = [ran_on(runners, each) for each in requests]
    assert all(len(home) == 1 for home in homes)
    shares = Counter(home[0] for home in homes)
    assert min(shares[i] for i in range(count)) >= 30 // count // 2, shares
    assert replicas.stats.timings.num_output_tokens == sum(r.num_generated for r in requests)
    assert (replicas.stats.scheduling.num_preemptions > 0) == (blocks < 40)
    assert replicas.stats.latency.num_requests == 30


def test_one_queue_serves_a_replica_as_soon_as_it_is_free() -> None:
    """Short requests behind two long ones do not wait for these."""
    replicas, _ = make(2)
    long = [request([1], 60) for _ in range(SLOTS)]
    short = [request([2], 4) for _ in range(6)]
    for each in (long[0], short[0], long[1], short[1], *short[2:]):
        replicas.add(each)
    for _ in range(100):
        if not all(each.finish_reason for each in short):
            replicas.step()
    assert all(each.finish_reason for each in short)
    assert not any(each.finish_reason for each in long)


def test_a_request_goes_to_the_replica_that_has_its_prefix() -> None:
    replicas, runners = make(3, slots=4, blocks=60)
    prefix = [random.Random(7).randrange(VOCAB) for _ in range(20)]
    for i, each in enumerate([request([i], 30) for i in range(2)] + [request(prefix, 4)]):
        replicas.add(each)
        replicas.step()
        assert ran_on(runners, each) == [i]
    finish(replicas)
    follower = request([*prefix, 1], 30)
    replicas.add(follower)
    replicas.step()
    assert ran_on(runners, follower) == [2]
    hits = replicas.stats.scheduling.num_prefix_hits
    assert hits >= 16
    # A replica that is busier by more than the prefix is worth does not get the request.
    replicas.add(again := request([*prefix, 2], 30))
    replicas.step()
    replicas.add(last := request([*prefix, 3], 30))
    replicas.step()
    assert ran_on(runners, again) == [2] and ran_on(runners, last) != [2]
    finish(replicas)


def test_a_fault_in_one_request_ends_it_alone_and_leaves_the_other_replica_in_peace() -> None:
    replicas, runners = make(2)
    requests = [request([i], 20) for i in range(4)]
    victim = requests[2]

    def fail(running: list[Request]) -> None:
        if victim in running:
            raise ValueError("the victim's")

    for runner in runners:
        runner.before_rounds = fail
    commands: Any = deque(lambda r=r: replicas.add(r) for r in requests)
    advance_to_the_end(replicas, commands)
    [home] = ran_on(runners, victim)
    assert victim.finish_reason == "error" and str(victim.error) == "the victim's"
    for each in requests:
        if each is not victim:
            assert each.all_token_ids == text_of(each.prompt_token_ids, 20)
            assert each.error is None
    mine, other = ([len(c) for c in runners[i].prefills] for i in (home, 1 - home))
    assert len(other) <= 2 < len(mine), "only the victim's replica prefills again"


def test_a_request_that_waits_is_cancelled_in_the_queue() -> None:
    replicas, runners = make(2)
    requests = [request([i], 20) for i in range(6)]
    for each in requests:
        replicas.add(each)
    replicas.step()
    for each in (requests[5], requests[0]):
        replicas.cancel(each)
        assert each.finish_reason == "cancelled"
    finish(replicas)
    assert ran_on(runners, requests[5]) == []
    assert [r.num_generated for r in requests[1:5]] == [20] * 4
    replicas.add(one := request([1], 30))
    replicas.step()
    replicas.reset()
    assert one.finish_reason == "cancelled" and not replicas.has_requests


@pytest.mark.parametrize("line", ["add", "homes"])
def test_an_interrupt_between_queue_and_replica_loses_no_request(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas, _ = make(2)
    requests = [request([i], 12) for i in range(5)]
    for each in requests:
        replicas.add(each)
    scheduler, engine = replicas.engines[1].scheduler, replicas.engines[1]
    owner = scheduler if line == "add" else engine

    def interrupted(_: Request) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replicas.advance(deque())
    assert replicas.failed
    advance_to_the_end(replicas, deque())
    for each in requests:
        assert each.all_token_ids == text_of(each.prompt_token_ids, 12)


def test_an_interrupt_of_a_cancellation_ends_the_request_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas, _ = make(2)
    victim, other = request([1], 36), request([2], 12)
    replicas.add(victim)
    replicas.add(other)
    replicas.step()
    scheduler = replicas._homes[victim].scheduler
    usual = scheduler.finish

    def interrupted(request: Request, reason: FinishReason) -> None:
        usual(request, reason)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(scheduler, "finish", interrupted)
    commands: Commands = deque([lambda: replicas.cancel(victim)])
    with pytest.raises(KeyboardInterrupt):
        replicas.advance(commands)
    advance_to_the_end(replicas, commands)
    assert victim.finish_reason == "cancelled" and victim.num_generated < 36
    assert other.all_token_ids == text_of([2], 12)


def test_a_replica_whose_result_is_not_ready_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, runners = make(2, depth=2)
    slow, quick = request([1], 40), request([2], 20)
    runners[0].is_slow = True
    replicas.add(slow)
    replicas.add(quick)
    for _ in range(100):
        if quick.finish_reason is None:
            replicas.step()
    assert quick.finish_reason == "length"
    assert ran_on(runners, slow) == [0] and len(runners[0].rounds) <= 2
    assert slow.num_generated == 0  # nothing was read
    monkeypatch.setattr(replicas_module, "LONGEST", 0.01)
    finish(replicas)  # and with no other to step, its result is waited for
    assert slow.all_token_ids == text_of([1], 40)


@pytest.mark.parametrize(("max_tokens", "blocks"), [(1, 40), (40, 16)], ids=["ends", "few blocks"])
def test_a_replica_without_work_before_a_result_is_passed_by(
    max_tokens: int, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has a prompt of one token to generate, or no block for a round before others are read."""
    replicas, runners = make(2, depth=9, blocks=blocks)
    slow, quick = [request([i] * 20, max_tokens) for i in range(2)], request([2], 20)
    runners[0].is_slow = True
    runners[1].finishes = lambda _: True
    engine = replicas.engines[0]
    for each in slow:
        engine.add(each)
    replicas.add(quick)
    for _ in range(100):
        if quick.finish_reason is None:
            replicas.step()
    assert quick.finish_reason == "length" and ran_on(runners, quick) == [1]
    assert not any(each.num_generated for each in slow)  # nothing was read
    assert engine.would_wait
    monkeypatch.setattr(replicas_module, "LONGEST", 0.01)
    finish(replicas)  # and with no other to step, its result is waited for
    assert [each.all_token_ids for each in slow] == [
        text_of(each.prompt_token_ids, max_tokens) for each in slow
    ]


def test_a_request_that_comes_meanwhile_is_launched_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replicas, runners = make(2, depth=9)
    runners[0].is_slow = True
    replicas.add(request([1], 1))
    for _ in range(2):
        replicas.step()
    assert replicas.engines[0].would_wait
    monkeypatch.setattr(replicas_module.time, "sleep", lambda _: pytest.fail("waits"))
    replicas.engines[0].add(late := request([2], 20))
    replicas.step()
    assert ran_on(runners, late) == [0]


def test_a_replica_that_compiles_takes_no_more_than_twice_its_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others run on the replica whose programs are there."""
    replicas, runners = make(2)
    waiting: dict[Request, None] = {}

    def may_admit(one: Request, *_: object, **__: object) -> bool:
        waiting[one] = None
        monkeypatch.setattr(runners[1], "num_waiting", len(waiting))
        return False

    monkeypatch.setattr(runners[1], "may_admit", may_admit)
    requests = [request([i], 8) for i in range(12)]
    for each in requests:
        replicas.add(each)
    for _ in range(100):
        replicas.step()
    assert [len(ran_on(runners, each)) for each in requests].count(1) == 12 - 2 * SLOTS
    monkeypatch.undo()
    finish(replicas)
    assert all(each.num_generated == 8 for each in requests)


def test_too_small_a_pool_is_an_error_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, runners = make(2)
    replicas.engines[1].reset()  # the next use makes its pools anew

    def too_small() -> None:
        raise ConfigError("num_gpu_blocks_override: expected more")

    monkeypatch.setattr(runners[1], "check_room", too_small)
    one = request([1], 4)
    with pytest.raises(ConfigError, match="expected more"):
        replicas.add(one)
    assert not replicas.has_requests


def test_time_in_which_any_replica_works_is_counted_once() -> None:
    replicas, runners = make(2, depth=9)
    for runner in runners:
        runner.is_slow = True
    replicas.add(request([1], 40))
    replicas.step()
    began = replicas.stats.clock
    replicas.add(request([2], 40))
    replicas.step()  # the second replica starts while the first one has unread results
    assert replicas.stats.clock == began
    for runner in runners:
        runner.is_slow = False
    finish(replicas)
    timings = replicas.stats.timings
    spent = replicas.stats.clock - began
    assert timings.prefill_seconds + timings.decode_seconds == pytest.approx(spent)
