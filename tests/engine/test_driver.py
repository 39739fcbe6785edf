"""Calls of several threads on one LLM: each has its own text and its own error, and an interrupt
ends the requests of its own call alone."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from jaxspec import LLM, ConfigError, Increment, Interrupted, SamplingParams
from jaxspec.engine import engine as engine_module
from tests.engine.test_engine_requests import VOCAB, all_free, make, random_requests

ENGINE_FOLDER = str(Path(engine_module.__file__).parent)
GREEDY = SamplingParams(0.0, max_tokens=16, ignore_eos=True)
NUM_CASES = 24


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make(rounds_per_step=1)


@pytest.fixture
def quick_switches() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


class Caller:
    """A thread's calls, drawn at random, each compared with what its requests get alone."""

    def __init__(self, llm: LLM, cases: list[tuple[list[int], SamplingParams]], seed: int) -> None:
        self.llm, self.cases, self.random = llm, cases, random.Random(seed)
        self.expected: list[Any] = []
        self.first_kind = seed  # so that every kind occurs, however slow the machine is
        self.calls: Counter[str] = Counter()

    def generate(self) -> None:
        chosen = self.random.sample(range(len(self.cases)), self.random.randint(1, 3))
        prompts, params = zip(*(self.cases[i] for i in chosen), strict=True)
        outputs = self.llm.generate(list(prompts), list(params))
        for i, output in zip(chosen, outputs, strict=True):
            expected = self.expected[i]
            assert (output.token_ids, output.text) == (expected.token_ids, expected.text)
            assert output.finish_reason == expected.finish_reason and output.error is None

    def call_back(self) -> None:
        """One of two callbacks raises, after a few increments."""
        prompts, params = zip(*self.random.sample(self.cases, 2), strict=True)
        thread, text, fails_at = threading.get_ident(), ["", ""], self.random.randint(1, 3)
        error = RuntimeError("mine")

        def callback(increment: Increment) -> None:
            assert threading.get_ident() == thread
            text[increment.index] += increment.text
            nonlocal fails_at
            fails_at -= increment.index == 1
            if increment.index == 1 and fails_at == 0:
                raise error

        first, second = self.llm.generate(list(prompts), list(params), callback=callback)
        expected = self.expected[self.cases.index((prompts[0], params[0]))]
        assert (first.token_ids, text[0]) == (expected.token_ids, expected.text)
        assert (second.error is error) == (fails_at <= 0)
        assert (second.finish_reason == "error") == (fails_at <= 0)

    def stream(self, most: int = 1000) -> None:
        i = self.random.randrange(len(self.cases))
        tokens, text = [], ""
        for count, increment in enumerate(self.llm.stream([self.cases[i][0]], self.cases[i][1])):
            tokens += increment.token_ids
            text += increment.text
            if count == most:
                break
        expected = self.expected[i]
        assert tokens == expected.token_ids[: len(tokens)] and expected.text.startswith(text)
        assert most < 1000 or (tokens, text) == (expected.token_ids, expected.text)

    def abandon(self) -> None:
        self.stream(self.random.randint(0, 3))

    def ask_wrongly(self) -> None:
        wrong: Callable[[], Any] = self.random.choice(
            [
                lambda: self.llm.generate([[VOCAB]]),
                lambda: self.llm.stream([[1], []]),
                lambda: self.llm.generate([[1]], SamplingParams(min_tokens=2**31, max_tokens=None)),
                lambda: self.llm.generate([[1]], SamplingParams(banned_token_ids=[VOCAB])),
            ]
        )
        with pytest.raises(ConfigError):
            wrong()

    def run(self, until: float, errors: list[BaseException]) -> None:
        try:
            while time.monotonic() < until and not errors:
                kinds = [self.generate, self.call_back, self.stream, self.abandon, self.ask_wrongly]
                call = kinds[(self.first_kind + self.calls.total()) % len(kinds)]
                call()
                self.calls[call.__name__] += 1
        except BaseException as e:
            errors.append(e)


@pytest.mark.once
@pytest.mark.parametrize("seconds", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("quick_switches")
def test_calls_of_8_threads_have_their_own_texts_and_errors(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    cases = list(zip(*random_requests(NUM_CASES, seed=21), strict=True))
    callers = [Caller(llm, cases, seed) for seed in range(8)]
    expected = [llm.generate([prompt], params)[0] for prompt, params in cases]
    shared: Counter[int] = Counter()  # rounds by the number of threads whose requests they have
    owners: dict[Any, int] = {}
    make_requests = llm._inputs.make_requests

    def owned(*args: Any, **kwargs: Any) -> Any:
        requests = make_requests(*args, **kwargs)
        owners.update(dict.fromkeys(requests, threading.get_ident()))
        return requests

    monkeypatch.setattr(llm._inputs, "make_requests", owned)
    monkeypatch.setattr(
        llm.engine, "on_rounds", lambda _, rows: shared.update([len({owners[r] for r, _ in rows})])
    )
    errors: list[BaseException] = []
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=caller.run, args=(until, errors), daemon=True) for caller in callers
    ]
    for caller, thread in zip(callers, threads, strict=True):
        caller.expected = expected
        thread.start()
    for thread in threads:
        thread.join(max(0, until + 40 - time.monotonic()))
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
    calls = sum((caller.calls for caller in callers), Counter())
    assert len(calls) == 5 and min(calls.values()) >= 2, calls
    assert sum(count for number, count in shared.items() if number > 1) > 5, shared
    assert all_free(llm)


def test_an_interrupt_at_the_last_line_of_a_step_refuses_no_later_call(llm: LLM) -> None:
    expected = [o.token_ids for o in llm.generate([[9]], GREEDY)]
    llm.engine._stepping = True  # what the interrupt leaves
    assert [o.token_ids for o in llm.generate([[9]], GREEDY)] == expected
    assert not llm.engine._stepping


def test_a_thread_that_is_interrupted_while_it_steps_leaves_the_others_their_texts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [o.token_ids for o in llm.generate([[9], [10]], GREEDY)]
    step, found, stopped = engine_module.Engine._step, [], threading.Event()
    first = threading.get_ident()

    def interrupted(self: Any) -> None:
        step(self)
        if threading.get_ident() == first and not stopped.is_set():
            stopped.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(engine_module.Engine, "_step", interrupted)
    other = threading.Thread(
        target=lambda: found.extend(o.token_ids for o in llm.generate([[9], [10]], GREEDY))
    )
    stream = llm.stream([[11]], GREEDY)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        while not stopped.is_set():
            list(stream)
            stream = llm.stream([[11]], GREEDY)
    other.join(60)
    assert found == expected and all_free(llm)


class InterruptAtLine:
    """A trace function that raises KeyboardInterrupt at the n-th line that runs in the engine."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ENGINE_FOLDER):
            return None
        # The end of `_on_tokens` has no line at which Python would raise an interrupt.
        if frame.f_code.co_name == "_on_tokens":
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupt_at(llm: LLM, line: int, expected: list[list[int]], text: str) -> bool:
    """Interrupt a call of generate beside a stream; False if the call ended before that line."""
    stream = llm.stream([[12, 13]], GREEDY)
    taken = [next(stream)]
    trace = sys.gettrace()
    sys.settrace(InterruptAtLine(line))
    try:
        outputs = llm.generate([[9], [10]], GREEDY)
    except KeyboardInterrupt as e:
        sys.settrace(trace)
        outputs = e.outputs if isinstance(e, Interrupted) else []
        interrupted = True
    else:
        sys.settrace(trace)
        interrupted = False
    assert all(o.token_ids == expected[o.index] for o in outputs), line
    taken += stream
    assert [t for i in taken for t in i.token_ids] == expected[2], line
    assert "".join(i.text for i in taken) == text and taken[-1].finish_reason == "length", line
    assert all_free(llm), line
    return interrupted


@pytest.mark.parametrize("count", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_of_the_engine_ends_its_own_call_alone(
    llm: LLM, count: int
) -> None:
    outputs = llm.generate([[9], [10], [12, 13]], GREEDY)
    expected = [o.token_ids for o in outputs]
    lines = random.Random(count).sample(range(1, 2500), count)
    interrupted = [interrupt_at(llm, line, expected, outputs[2].text) for line in lines]
    assert sum(interrupted) > count // 2


def test_a_stream_dropped_while_another_thread_steps_gives_its_blocks_back(llm: LLM) -> None:
    (expected,) = llm.generate([[14]], GREEDY)
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.extend(llm.generate([[14]] * 6, GREEDY)))
    endless = SamplingParams(0.0, max_tokens=80, ignore_eos=True)
    streams = [llm.stream([[i]], endless) for i in range(6)]
    taken = [next(stream) for stream in streams]
    other.start()
    del streams
    other.join(60)
    assert len(taken) == 6 and [o.token_ids for o in found] == [expected.token_ids] * 6
    assert all_free(llm)


def test_one_caller_steps_in_its_own_thread(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread runs for it, then or later."""
    step, threads = engine_module.Engine._step, set()

    def seen(self: Any) -> None:
        threads.add(threading.get_ident())
        step(self)

    monkeypatch.setattr(engine_module.Engine, "_step", seen)
    before = threading.active_count()
    llm.generate([[9]], GREEDY)
    list(llm.stream([[9]], GREEDY))
    assert threads == {threading.get_ident()} and threading.active_count() == before


def test_warmup_waits_for_the_thread_that_steps(llm: LLM) -> None:
    """It runs between two calls, or says that requests run."""
    results: list[Any] = []

    def warm() -> None:
        try:
            results.append(llm.warmup_for([[9]], GREEDY))
        except ConfigError as e:
            results.append(str(e))

    other = threading.Thread(target=warm)
    stream = llm.stream([[9]], GREEDY)
    next(stream)
    other.start()
    tokens = [t for increment in stream for t in increment.token_ids]
    other.join(60)
    assert len(tokens) > 8 and len(results) == 1
    assert isinstance(results[0], int) or results[0].startswith("warmup: expected no requests")
    assert all_free(llm)
