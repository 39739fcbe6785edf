"""When results are read: as soon as the device has them, and first tokens before the next round."""

from __future__ import annotations

import random

import jax
import pytest

from jaxspec import SamplingParams
from jaxspec.cache.pool_sizes import steps_ahead
from jaxspec.config import CacheGroup
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import SchedulerConfig
from tests.support.fake_runner import VOCAB, FakeRunner, engine_of

DEPTH = steps_ahead(1)


def runner_of(*, tokens: int = 64) -> FakeRunner:
    config = SchedulerConfig(
        max_num_seqs=4,
        buckets=(4,),
        max_model_len=256,
        max_tiles=tokens // 8,
        prefill_tile=8,
        block_size=8,
        head_room=1,
    )
    return FakeRunner(config, [CacheGroup(8, 256)], [256], seed=0, caching=False)


def request(length: int, max_tokens: int = 20) -> Request:
    prompt = random.Random(length).choices(range(VOCAB), k=length)
    return Request(prompt, SamplingParams(0.0, max_tokens=max_tokens), max_tokens=max_tokens)


@pytest.mark.parametrize("at_once", [False, True])
def test_first_tokens_of_an_idle_engine_are_handed_out_before_any_round_is_launched(
    at_once: bool,
) -> None:
    """at_once: the device has finished them when their prefill is launched."""
    runner = runner_of()
    runner.finishes = lambda _: at_once
    engine, requests = engine_of(runner, depth=DEPTH), [request(20), request(9)]
    for each in requests:
        engine.add(each)
    engine.step()
    assert [r.num_generated for r in requests] == [1, 1] and not runner.rounds
    engine.step()
    assert len(runner.rounds) == 1


@pytest.mark.parametrize("what", ["a longer prompt", "others that generate", "a waiting request"])
def test_no_first_token_holds_up_other_work(what: str) -> None:
    """A device that has more to do is not left idle."""
    runner = runner_of(tokens=16)
    runner.finishes = lambda _: False
    engine, short = engine_of(runner, depth=DEPTH), request(9)
    if what == "others that generate":
        engine.add(request(5))
        engine.step()
        engine.step()
    engine.add(short)
    if what == "a longer prompt":
        engine.add(request(30))
    elif what == "a waiting request":
        for _ in range(4):
            engine.add(request(2))
    rounds = len(runner.rounds)
    engine.step()
    assert short.num_generated == 0 and len(runner.rounds) == rounds + 1


def beside_another(runner: FakeRunner) -> tuple[Engine, Request, Request]:
    """Return an engine whose first request generates, and a second one that arrives."""
    engine, first, second = engine_of(runner, depth=DEPTH), request(5), request(9)
    engine.add(first)
    engine.step()
    engine.step()
    engine.add(second)
    return engine, first, second


def test_first_tokens_are_read_as_soon_as_the_device_has_them() -> None:
    """Rounds that are ready are read in their turn, when the next ones are launched."""
    runner = runner_of()
    runner.finishes = lambda _: True
    engine, first, second = beside_another(runner)
    assert first.num_unread == 1
    engine.step()
    assert (first.num_unread, second.num_unread) == (1, 1) and second.num_generated == 1
    for ahead in (2, 2):
        engine.step()
        assert (first.num_unread, second.num_unread) == (ahead, ahead)


def test_several_processes_do_not_go_by_their_own_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    runner = runner_of()
    runner.finishes = lambda _: True
    engine, _, second = beside_another(runner)
    engine.step()
    assert second.num_generated == 0
