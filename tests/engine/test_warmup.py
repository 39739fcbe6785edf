"""Warm-up compiles its programs side by side, and shows how far it is."""

from __future__ import annotations

import gc
import itertools
import threading
from dataclasses import astuple, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.engine.background import side_by_side
from jaxspec.engine.rehearsal import RoundRehearsal
from jaxspec.engine.warmup_shapes import shapes_up_to
from tests.engine.test_features_while_running import engine
from tests.support.compilations import COMPILED, counting_compilations

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("toy_families")]

GREEDY = [SamplingParams(0.0)]
PROGRAMS = ("decode_round", "prefill")  # the large ones


def small_engine() -> LLM:
    """Batches of 1 and 2: a prefill and a round of each."""
    return engine(batch_buckets=(1, 2), max_model_len=32)


@pytest.fixture
def compilers() -> Any:
    """The name of the thread that compiled each of PROGRAMS; none is compiled before."""
    jax.clear_caches()
    found: list[str] = []

    def listen(event: str, _seconds: float, **details: object) -> None:
        if event == COMPILED and any(p in str(details.get("fun_name")) for p in PROGRAMS):
            found.append(threading.current_thread().name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_threads_compile_each_program_once(
    compilers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    llm = small_engine()
    assert llm.warmup(sampling_params=GREEDY, progress=True) == 3, "batches share prefills"
    assert len(compilers) == 3
    assert capsys.readouterr().err == "compiling 3 programs\n"
    assert all(name.startswith("jaxspec-warmup") for name in compilers), compilers
    with counting_compilations() as compiled:
        llm.generate([[1, 2], [3]], SamplingParams(0.0, max_tokens=9))
    assert not compiled
    assert not [t for t in threading.enumerate() if t.name.startswith("jaxspec-warmup")]


def test_threads_compile_the_small_programs_too() -> None:
    """Those between prefill and rounds; afterwards requests of any kind compile nothing."""
    jax.clear_caches()
    found: set[tuple[str, str]] = set()

    def listen(event: str, _seconds: float, **details: object) -> None:
        if event == COMPILED:
            found.add((threading.current_thread().name, str(details.get("fun_name"))))

    llm = small_engine()
    # Toys have no caches, which are what binds the results of other models' prefills.
    llm.runner.resident.params = jax.device_put(llm.runner.resident.params, jax.devices()[0])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        llm.warmup()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    alone = {name for thread, name in found if not thread.startswith("jaxspec-warmup")}
    assert alone == {"jit(_init_state)"}
    kinds = [
        SamplingParams(0.0),
        SamplingParams(0.0, presence_penalty=1.0),
        SamplingParams(1.0, top_p=0.9),
        SamplingParams(1.0, logprobs=2, logit_bias={1: 2.0}),
    ]
    with counting_compilations() as compiled:
        for first, second in itertools.permutations(kinds, 2):
            llm.generate([[1, 2], [3]], [first, second])
            llm.generate([1, 2], first)
    assert not compiled


def prefill_sizes_of(llm: LLM) -> dict[int, int]:
    """The tiles of the calls that ran, by those that their tokens take."""
    return {
        least.tiles: s.tiles
        for (_, least, _), s in llm.runner.program_choice._prefill_shapes.items()
    }


def test_rare_features_prefill_in_the_next_larger_call_and_have_their_own_text() -> None:
    """Calls have 1, 2, 4 and 5 tiles of 32 tokens; those of rare features 1 and 5."""
    kinds = [
        SamplingParams(0.0, max_tokens=6),
        SamplingParams(0.0, max_tokens=6, presence_penalty=1.0),
        SamplingParams(1.0, max_tokens=6, seed=3, logprobs=1),
    ]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(8, 24, n).tolist() for n in (3, 40, 100)]
    llm = engine(
        batch_buckets=(1, 3),
        max_num_seqs=3,
        max_num_batched_tokens=160,
        enable_prefix_caching=False,
    )
    llm.warmup()
    alone = {}
    with counting_compilations() as compiled:
        for kind in kinds:
            for i, prompt in enumerate(prompts):
                [output] = llm.generate(prompt, kind)
                alone[kind.logprobs, kind.presence_penalty, i] = output.outputs[0].token_ids
            sizes = prefill_sizes_of(llm)
            assert sizes == ({1: 1, 2: 2, 4: 4} if kind is kinds[0] else {1: 1, 2: 5, 4: 5})
            llm.runner.program_choice.forget_choices()
        for mixture in itertools.permutations(kinds):
            outputs = llm.generate(prompts, list(mixture))
            for i, (kind, output) in enumerate(zip(mixture, outputs, strict=True)):
                expected = alone[kind.logprobs, kind.presence_penalty, i]
                assert output.outputs[0].token_ids == expected
    assert not compiled


def test_a_size_that_was_not_warmed_compiles_although_a_larger_call_is_compiled() -> None:
    llm = engine(
        batch_buckets=(1,),
        max_num_seqs=1,
        max_num_batched_tokens=128,
        enable_prefix_caching=False,
    )
    llm.warmup(lengths=[20])
    for length in (110, 63):  # of 4 and of 2 tiles, and of 8 pages
        llm.generate([8] * length, SamplingParams(0.0, max_tokens=2))
    assert set(map(astuple, llm.runner.program_choice.variants.prefills())) >= {(4, 8), (2, 8)}


def test_the_state_is_bound_to_its_device_from_the_start() -> None:
    """A program with an exported kernel binds its results: a second prefill would compile anew."""
    llm = small_engine()
    assert all(x.committed for x in jax.tree.leaves(llm.runner.resident.state))
    llm.runner.set_state(jax.tree.map(jnp.copy, llm.runner.resident.take_state()))
    assert all(x.committed for x in jax.tree.leaves(llm.runner.resident.state))


def test_threads_have_the_callers_settings_of_jax(compilers: list[str]) -> None:
    """A program is compiled for the settings of its thread, and would compile again elsewhere."""
    with jax.default_matmul_precision("high"):
        small_engine().warmup(sampling_params=GREEDY)
    assert len(compilers) == 3


def test_a_program_that_fails_in_its_thread_compiles_alone(
    compilers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise MemoryError("beside others")

    monkeypatch.setattr(RoundRehearsal, "compile", fail)
    llm = small_engine()
    llm.warmup(sampling_params=GREEDY)
    assert len(compilers) == 3 and compilers.count("MainThread") == 2
    with counting_compilations() as compiled:
        llm.generate([1, 2], SamplingParams(0.0, max_tokens=9))
    assert not compiled


@pytest.mark.parametrize("compilation", ["round", "step"])
def test_a_line_says_how_many_programs_compile(
    compilation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Standard error is no terminal here."""
    llm = engine(max_model_len=32, compilation=compilation)
    number = llm.warmup(sampling_params=GREEDY, progress=True)
    assert capsys.readouterr() == ("", f"compiling {number} programs\n")
    llm.warmup(sampling_params=GREEDY)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("compilation", ["round", "step"])
def test_each_program_is_reported(compilation: str) -> None:
    llm = engine(max_model_len=32, compilation=compilation)
    reports: list[tuple[int, int]] = []
    llm.runner.on_compiled = lambda *counts: reports.append(counts)
    number = llm.engine.warm_levels(shapes_up_to(llm.runner, None, None))
    assert reports == [(i, number) for i in range(number + 1)]


@pytest.mark.parametrize("compilation", ["round", "step"])
def test_nothing_compiles_when_a_batch_of_several_kinds_shrinks(compilation: str) -> None:
    kinds = [SamplingParams(0.0), SamplingParams(0.0, presence_penalty=1.0)]
    jax.clear_caches()
    llm = engine(batch_buckets=(1, 2), max_model_len=32, compilation=compilation)
    llm.warmup(sampling_params=kinds)
    with counting_compilations() as compiled:
        llm.generate([[1, 2], [3]], [replace(kinds[0], max_tokens=n) for n in (3, 9)])
        llm.generate([[1, 2], [3]], [replace(kinds[1], max_tokens=n) for n in (3, 9)])
    assert not compiled


def test_no_garbage_is_collected_beside_the_threads() -> None:
    """It takes a fifth of the time of tracing and lowering, and finds none."""
    found: list[bool] = []

    def look() -> None:
        found.append(gc.isenabled())
        raise ValueError

    for on in (True, False):
        (gc.enable if on else gc.disable)()
        try:
            side_by_side([look], [], lambda *_: None)
            assert gc.isenabled() == on
        finally:
            gc.enable()
    assert found == [False, False]
