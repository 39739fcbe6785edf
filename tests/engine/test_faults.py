"""A fault in one request, at each stage of its way, ends that request alone; a fault of the engine
ends all that run, and the engine goes on."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from jaxspec import LLM, ConfigError, EngineError, Increment, SamplingParams
from jaxspec.decode import mailboxes
from jaxspec.engine import engine as engine_module
from jaxspec.engine import request_rows
from jaxspec.engine.block_tables import BlockTables
from jaxspec.engine.detokenizer import Detokenizer
from jaxspec.engine.input_processor import InputProcessor
from jaxspec.engine.runner import ModelRunner
from jaxspec.engine.scheduler import Scheduler
from tests.engine.test_engine_requests import all_free, make

pytestmark = pytest.mark.once

GREEDY = SamplingParams(0.0, max_tokens=20, ignore_eos=True)
LONG = SamplingParams(0.0, max_tokens=40, ignore_eos=True)
VICTIM = [20, 21, 22]
# A stop string that never comes, so that the victim's detokenizer can be told from the others'.
PARAMS = SamplingParams(0.0, max_tokens=20, ignore_eos=True, stop="~~", logprobs=1, seed=777)
OTHERS = [[9], [10, 11]]


class MineError(Exception):
    """The fault."""


def is_victim(request: Any) -> bool:
    return request.prompt_token_ids == VICTIM


# Stage: the function that fails, and whether a call of it works for the victim.
STAGES: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "input": (InputProcessor, "_encode", lambda _s, _i, prompt, _chat: list(prompt) == VICTIM),
    "admission": (Scheduler, "_give_blocks", lambda _s, request, **_: is_victim(request)),
    "sampling state": (
        request_rows,
        "sampling_rows",
        lambda _layout, requests, **_: any(r.params.seed == 777 for r in requests),
    ),
    "prefill": (
        ModelRunner,
        "prefill",
        lambda _s, _f, chunks: any(is_victim(c.request) for c in chunks),
    ),
    "round": (
        ModelRunner,
        "round",
        lambda _s, _f, requests, **_: any(map(is_victim, requests)),
    ),
    "block table": (
        BlockTables,
        "update",
        lambda _s, requests: any(is_victim(r) and r.num_generated > 4 for r in requests),
    ),
    "reservation": (
        Scheduler,
        "_reserve",
        lambda _s, request: is_victim(request) and request.num_generated > 4,
    ),
    "log-probabilities": (engine_module, "logprobs_of", lambda *_: True),
    "detokenising": (Detokenizer, "push", lambda self, *_, **__: bool(self._stop)),
    "stop": (Detokenizer, "_find_stop", lambda self, _: bool(self._stop)),
}
# Stages at which the request is known, so that the others' caches stay.
HANDED_OUT = {"log-probabilities", "detokenising", "stop"}


@pytest.fixture(scope="module", params=[1, 4], ids=["a_round_a_step", "4_rounds_a_step"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return make(rounds_per_step=request.param)


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make a stage fail for the victim."""

    def inject(stage: str) -> None:
        owner, name, concerns = STAGES[stage]
        usual = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            if concerns(*args, **kwargs):
                raise MineError("mine")
            return usual(*args, **kwargs)

        monkeypatch.setattr(owner, name, failing)

    yield inject


def tokens_of(increments: list[Increment]) -> list[int]:
    return [t for increment in increments for t in increment.token_ids]


@pytest.mark.parametrize("streams", [False, True], ids=["generate", "stream"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_of_one_request_ends_that_request_alone(
    llm: LLM,
    fails: Callable[[str], None],
    stage: str,
    streams: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = [o.token_ids for o in llm.generate(OTHERS, GREEDY)]
    (whole,) = llm.generate([VICTIM], PARAMS)
    other = llm.stream([OTHERS[0]], GREEDY)
    taken = [next(other)]
    fails(stage)
    restarts: list[int] = []
    restart = llm.engine._restart
    monkeypatch.setattr(llm.engine, "_restart", lambda: (restarts.append(1), restart()))
    if stage == "input":
        with pytest.raises(MineError, match="mine"):
            llm.generate([OTHERS[1], VICTIM], [GREEDY, PARAMS])
    elif streams:
        increments = list(llm.stream([OTHERS[1], VICTIM], [GREEDY, PARAMS]))
        own = [i for i in increments if i.index == 1]
        assert tokens_of([i for i in increments if i.index == 0]) == alone[1]
        assert own[-1].finish_reason == "error" and str(own[-1].error) == "mine"
        assert whole.token_ids[: len(tokens_of(own))] == tokens_of(own) != whole.token_ids
    else:
        good, bad = llm.generate([OTHERS[1], VICTIM], [GREEDY, PARAMS])
        assert (good.token_ids, good.finish_reason, good.error) == (alone[1], "length", None)
        assert bad.finish_reason == "error" and isinstance(bad.error, MineError)
        assert whole.token_ids[: len(bad.token_ids)] == bad.token_ids != whole.token_ids
    assert tokens_of([*taken, *other]) == alone[0] and all_free(llm)
    assert bool(restarts) == (stage not in {"input", *HANDED_OUT}), "the others were disturbed"


def test_a_text_that_cannot_be_decoded_is_the_only_one_lost(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = llm.generate([OTHERS[0], VICTIM], GREEDY)
    assert llm.tokenizer is not None
    decode: Callable[..., str] = llm.tokenizer.decode

    def failing(ids: Any) -> str:
        if list(ids) == alone[1].token_ids:
            raise MineError("mine")
        return decode(ids)

    monkeypatch.setattr(llm.tokenizer, "decode", failing)
    good, bad = llm.generate([OTHERS[0], VICTIM], GREEDY)
    assert (good.text, good.finish_reason) == (alone[0].text, "length")
    assert (bad.finish_reason, bad.token_ids) == ("error", alone[1].token_ids)
    assert isinstance(bad.error, MineError)


def fail_once(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception) -> None:
    """Make the next call of a ModelRunner's method raise."""
    usual, calls = getattr(ModelRunner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise error
        return usual(*args, **kwargs)

    monkeypatch.setattr(ModelRunner, name, failing)


@pytest.mark.parametrize("name", ["round", "prefill", "admit"])
def test_an_xla_error_ends_all_that_run_and_none_that_waits(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each has an error of its own; the fifth request has no slot yet."""
    (alone,) = llm.generate([VICTIM], GREEDY)
    requests = llm.make_requests([[9], [10], [11], [12], VICTIM], GREEDY)
    for request in requests:
        llm.engine.add(request)
    fail_once(monkeypatch, name, jax.errors.JaxRuntimeError("INTERNAL: the device is gone\nmore"))
    llm.engine.advance(deque())
    errors = [r.error for r in requests[:4]]
    assert len({id(e) for e in errors}) == 4 and all(isinstance(e, EngineError) for e in errors)
    assert (
        str(errors[0])
        == "engine: expected prefill and rounds that run, got JaxRuntimeError: INTERNAL: the "
        "device is gone; the requests that ran have ended"
    )
    while llm.engine.has_requests:
        llm.engine.advance(deque())
    assert (requests[4].token_ids, requests[4].error) == (alone.token_ids, None)
    assert all_free(llm)


def test_an_xla_error_is_raised_in_each_call_and_the_llm_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [o.token_ids for o in llm.generate(OTHERS, LONG)]
    stream = llm.stream([VICTIM], LONG)
    next(stream)
    with monkeypatch.context() as patch:
        fail_once(patch, "round", jax.errors.JaxRuntimeError("INTERNAL: the device is gone"))
        with pytest.raises(EngineError, match="INTERNAL: the device is gone") as first:
            llm.generate(OTHERS, LONG)
        with pytest.raises(EngineError, match="INTERNAL: the device is gone") as second:
            list(stream)
    assert first.value is not second.value
    assert [o.token_ids for o in llm.generate(OTHERS, LONG)] == alone and all_free(llm)


def test_a_silent_device_is_named_in_each_call_and_the_llm_goes_on(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its result comes late, without an error of XLA's: the kernel bounds its waits."""
    alone = [o.token_ids for o in llm.generate(OTHERS, GREEDY)]
    stream = llm.stream([VICTIM], LONG)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "SUSPICIOUS_SECONDS", -1.0)
        errors = ["expected device 1 to answer 0"]
        patch.setattr(mailboxes, "num_failures", lambda _: len(errors))
        patch.setattr(mailboxes, "silent_rank", lambda _, seen: next(iter(errors[seen:]), None))
        with pytest.raises(EngineError, match="expected device 1 to answer 0"):
            llm.generate(OTHERS, GREEDY)
        with pytest.raises(EngineError, match="expected device 1 to answer 0"):
            list(stream)
        assert [o.token_ids for o in llm.generate(OTHERS, GREEDY)] == alone and all_free(llm)
        llm.engine.reset()
    assert [o.token_ids for o in llm.generate(OTHERS, GREEDY)] == alone and all_free(llm)


class Silence:
    """An error word of the devices that a check has not read yet, and the host's clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.errors: list[str] = []
        self.slept, self.checks = 0.0, 0
        clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + self.slept)
        monkeypatch.setattr(engine_module, "time", clock)
        monkeypatch.setattr(mailboxes, "num_failures", lambda _: 0)
        monkeypatch.setattr(mailboxes, "silent_rank", self.read)

    def read(self, cfg: Any, seen: int) -> str | None:
        self.checks += 1
        return self.errors.pop() if self.errors else None


def test_no_token_follows_a_failed_program_whose_result_was_dropped(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the wait for it; every later program returns at once, with meaningless tokens."""
    alone = [o.token_ids for o in llm.generate(OTHERS, GREEDY)]
    with monkeypatch.context() as patch:
        silence, usual = Silence(patch), engine_module.Engine._read

        def interrupted(self: Any) -> None:
            silence.slept = 12.0
            silence.errors.append("expected device 1 to answer 0")
            patch.setattr(engine_module.Engine, "_read", usual)
            raise KeyboardInterrupt

        patch.setattr(engine_module.Engine, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(OTHERS, GREEDY)
        with pytest.raises(EngineError, match="expected device 1 to answer 0"):
            llm.generate(OTHERS, GREEDY)
        assert [o.token_ids for o in llm.generate(OTHERS, GREEDY)] == alone and all_free(llm)
        llm.engine.reset()
    llm.engine._answered_at = -math.inf  # by the real clock


def test_no_token_follows_a_failed_program_of_another_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that has read nothing looks before its first token, and not again at once."""
    silence = Silence(monkeypatch)
    llm.engine.reset()
    engine = engine_module.Engine(llm.engine.runner)
    for errors in (["expected device 1 to answer 0"], []):
        silence.errors += errors
        silence.checks = 0
        requests = llm.make_requests(OTHERS, GREEDY)
        for request in requests:
            engine.add(request)
        while engine.has_requests:
            engine.advance(deque())
        ended = [str(r.error) for r in requests if r.error is not None]
        assert len(ended) == (len(requests) if errors else 0)
        assert all("expected device 1 to answer 0" in error for error in ended)
        assert all(bool(r.token_ids) != bool(errors) for r in requests)
        assert silence.checks == 1
    engine.reset()


def test_a_fault_of_no_single_request_ends_all_that_run(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each passes its trial, so the fault comes back and has no owner."""
    usual = ModelRunner.round

    def failing(self: Any, features: Any, requests: Any, **kwargs: Any) -> Any:
        if len(requests) > 1:
            raise MineError("together")
        return usual(self, features, requests, **kwargs)

    alone = [o.token_ids for o in llm.generate(OTHERS, GREEDY)]
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "round", failing)
        outputs = llm.generate(OTHERS, GREEDY)
    ended = [o for o in outputs if o.error is not None]
    assert ended and all(isinstance(o.error, MineError) for o in ended)
    assert [o.token_ids for o in llm.generate(OTHERS, GREEDY)] == alone and all_free(llm)


def test_a_fault_that_does_not_come_back_ends_no_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = [o.token_ids for o in llm.generate([*OTHERS, VICTIM], GREEDY)]
    fail_once(monkeypatch, "round", MineError("once"))
    outputs = llm.generate([*OTHERS, VICTIM], GREEDY)
    assert [o.token_ids for o in outputs] == alone and all_free(llm)
    assert all(o.error is None for o in outputs)


def test_too_small_a_pool_is_the_error_of_each_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(_: Any) -> Any:
        raise ConfigError("KV cache: expected more")

    llm.engine.reset()
    with monkeypatch.context() as patch:
        patch.setattr(engine_module.Engine, "_make_scheduler", small)
        for _ in range(2):
            with pytest.raises(ConfigError, match="KV cache: expected more"):
                llm.generate([[9]], GREEDY)
    assert len(llm.generate([[9]], GREEDY)[0].token_ids) == 20
