"""A request with a new sampling feature: the others go on while its programs compile, it has the
text that it has alone, and after warmup() nothing compiles at all."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.engine import background_compiler
from jaxspec.engine.rehearsal import Rehearsal
from jaxspec.engine.request import Request
from tests.engine.test_engine_requests import all_free
from tests.support.compilations import counting_compilations
from tests.support.slow import slow
from tests.support.soak import soak
from tests.support.toys import ToyDraft, ToyTarget

V, EOS = 24, 7
TABLE = jnp.asarray(2 * np.random.default_rng(0).normal(size=(V, V)), jnp.float32)

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("toy_families")]

LONG = SamplingParams(0.0, max_tokens=90, ignore_eos=True)
NEW = SamplingParams(
    0.0, max_tokens=5, ignore_eos=True, presence_penalty=1.0, bad_words_token_ids=[[5]]
)


def engine(**config: Any) -> LLM:
    """One shape of rounds and one of prefill, so that only features differ."""
    settings = {
        "max_model_len": 128,
        "max_num_seqs": 2,
        "batch_buckets": (2,),
        "block_size": 16,
        "max_num_batched_tokens": 32,
    } | config
    target: Any = ToyTarget(V)
    return LLM(
        (target, {"table": TABLE}),
        (ToyDraft(V), {"table": TABLE}),
        SpeculativeConfig(method="eagle", num_speculative_tokens=2),
        eos_token_ids=(EOS,),
        config=EngineConfig(**settings),
    )


class SlowCompiler:
    """Rehearsals wait until `go` is set, then compile, or fail."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.error: Exception | None = None
        self.started = self.ended = 0
        self._run = Rehearsal.run

    def run(self, rehearsal: Rehearsal) -> Any:
        self.started += 1
        assert self.go.wait(60)
        try:
            if self.error is not None:
                raise self.error
            return self._run(rehearsal)
        finally:
            self.ended += 1


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCompiler]:
    slow = SlowCompiler()
    monkeypatch.setattr(Rehearsal, "run", lambda self: slow.run(self))
    yield slow
    slow.go.set()


def add(llm: LLM, prompt: list[int], params: SamplingParams) -> Request:
    (request,) = llm.make_requests([prompt], params)
    llm.engine.add(request)
    return request


def step_until(llm: LLM, done: Any, most: int = 1000) -> None:
    for _ in range(most):
        if done():
            return
        llm.engine.step()
    raise AssertionError(f"expected an end within {most} steps")


def wait_for(done: Any) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_others_go_on_while_the_programs_of_a_new_feature_compile(compiler: SlowCompiler) -> None:
    llm = engine()
    old = add(llm, [1, 2], LONG)
    step_until(llm, lambda: old.num_generated > 5)
    new = add(llm, [3], NEW)
    passing = add(llm, [4], SamplingParams(0.0, max_tokens=4, ignore_eos=True))
    before = old.num_generated
    with counting_compilations() as compiled:
        step_until(llm, lambda: passing.finish_reason == "length")
    assert old.num_generated > before and new.num_generated == 0 and new.slot is None
    assert compiler.started == 1 and not compiled, "the others waited"
    compiler.go.set()
    wait_for(lambda: compiler.ended == 1)
    with counting_compilations() as compiled:
        step_until(llm, lambda: new.finish_reason is not None)
    assert not compiled, "the rehearsal left something out"
    assert old.finish_reason is None, "the new request ran beside the old one"
    step_until(llm, lambda: old.finish_reason == "length")
    assert all_free(llm)
    for request, params in ((old, LONG), (new, NEW)):  # in programs of just its features
        alone = engine().generate([request.prompt_token_ids], params)[0]
        assert request.token_ids == alone.token_ids
    assert 5 not in new.token_ids


def test_a_request_whose_programs_do_not_compile_ends_alone(compiler: SlowCompiler) -> None:
    llm = engine()
    old = add(llm, [1, 2], LONG)
    step_until(llm, lambda: old.num_generated > 2)
    compiler.error = ValueError("no such instruction\nat line 3")
    compiler.go.set()
    new = add(llm, [3], NEW)
    while new.finish_reason is None:
        llm.engine.step()
    assert isinstance(new.error, ConfigError) and str(new.error) == (
        "sampling_params: expected programs for the request's features that compile, "
        "got ValueError: no such instruction"
    )
    assert new.finish_reason == "error" and new.num_generated == 0
    step_until(llm, lambda: old.finish_reason == "length")
    assert all_free(llm) and old.error is None


def test_a_request_that_waits_runs_once_it_is_alone(compiler: SlowCompiler) -> None:
    """The last of the others ends before the programs are compiled."""
    llm = engine()
    old = add(llm, [1, 2], LONG)
    step_until(llm, lambda: old.num_generated > 2)
    new = add(llm, [3], NEW)
    step_until(llm, lambda: old.finish_reason == "length")
    threading.Timer(0.2, compiler.go.set).start()
    step_until(llm, lambda: new.finish_reason == "length")
    assert compiler.ended == 1 and all_free(llm)


def test_a_mixture_that_lasts_gets_programs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greedy request after one with penalties runs in that one's programs at once."""
    llm = engine()
    monkeypatch.setattr(background_compiler, "EXACT_AFTER", 4)
    llm.generate([[3]], NEW)
    with counting_compilations() as compiled:
        first = add(llm, [1, 2], LONG)
        step_until(llm, lambda: first.num_generated > 2)
    assert not compiled and llm.runner.resident.state.sampling.processors
    wait_for(lambda: not llm.engine.step() and not llm.runner.resident.state.sampling.processors)
    step_until(llm, lambda: first.finish_reason == "length")
    assert first.token_ids == engine().generate([[1, 2]], LONG)[0].token_ids


def test_a_batch_shrinks_once_the_programs_of_its_features_are_compiled(
    compiler: SlowCompiler,
) -> None:
    """The smaller batch is compiled for greedy requests alone."""
    llm = engine(batch_buckets=(1, 2))
    old = add(llm, [1, 2], LONG)
    step_until(llm, lambda: old.num_generated > 2)
    compiler.go.set()
    new = add(llm, [3], replace(NEW, max_tokens=80))
    step_until(llm, lambda: compiler.started == 1)
    wait_for(lambda: compiler.ended == 1)
    step_until(llm, lambda: new.num_generated > 0)
    assert llm.runner.resident.num_slots == 2
    compiler.go.clear()
    llm.engine.cancel(old)
    before, started = new.num_generated, compiler.started
    with counting_compilations() as compiled:
        step_until(llm, lambda: new.num_generated > before + 9)
    assert not compiled and llm.runner.resident.num_slots == 2 and compiler.started == started + 1
    compiler.go.set()
    wait_for(lambda: compiler.ended == started + 1)
    with counting_compilations() as compiled:
        step_until(llm, lambda: new.finish_reason is not None)
    assert not compiled and llm.runner.resident.num_slots == 1
    alone = engine().generate([[3]], replace(NEW, max_tokens=80))[0]
    assert new.token_ids == alone.token_ids and all_free(llm)


@pytest.mark.parametrize("count", [200, slow(10_000)])
def test_random_requests_compile_nothing_after_warmup_and_leave_nothing(count: int) -> None:
    """Memory stays flat. Steps are timed by the processor's time, for other processes' sake."""
    llm = engine(num_gpu_blocks_override=8)
    llm.warmup()
    soak(llm, V, 50, seed=0)
    with counting_compilations() as compiled:
        found = soak(llm, V, count, seed=1)
    print(count, {k: v for k, v in vars(found).items() if k != "step_seconds"})
    print(len(found.step_seconds), "steps, longest over median", found.longest_over_median)
    assert not compiled and all_free(llm)
    assert sum(found.reasons.values()) == count and {"stop", "length"} <= set(found.reasons)
    assert "error" not in found.reasons and llm.scheduling.num_preemptions > 0
    assert max(found.device_bytes[1:]) < 1.05 * min(found.device_bytes[1:])
    # The longest of 38,000 steps took 4 to 15 medians of 4 ms. A round compiles in 1.3 s.
    assert count < 10_000 or found.longest_over_median < 30
    assert found.host_bytes[-1] < found.host_bytes[0] + (32 << 20)
