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

from jaxspec import LLM, SamplingParams, SpeculativeConfig
from jaxspec.config import SamplingFeatures
from jaxspec.engine import draft_choice, warmup_run
from jaxspec.engine.background import side_by_side
from jaxspec.engine.buckets import Buckets, Shapes
from jaxspec.engine.draft_choice import DraftCost
from jaxspec.engine.rehearsal import RoundRehearsal
from jaxspec.engine.round_configs import GREEDY as GREEDY_ROUNDS
from jaxspec.engine.variants import CHANGED, PROCESSED, SAMPLED, SCORED, TRUNCATED, PrefillShape
from jaxspec.engine.warmup_shapes import shapes_up_to
from tests.engine.test_compilation_count import toy
from tests.engine.test_engine_requests import all_free
from tests.engine.test_features_while_running import LONG, NEW, add, engine, step_until
from tests.support.compilations import COMPILED, counting_compilations
from tests.support.slow import slow
from tests.support.soak import soak
from tests.support.tiny import VOCAB

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("toy_families")]

GREEDY = [SamplingParams(0.0)]
PROGRAMS = ("decode_round", "prefill")  # the large ones
COMMON = [SamplingParams(0.0), SamplingParams(1.0, seed=3), SamplingParams(1.0, seed=3, top_p=0.9)]
RARE = [
    SamplingParams(0.0, presence_penalty=1.0),
    SamplingParams(0.0, num_speculative_tokens=1),
    SamplingParams(1.0, seed=3, logprobs=2),
    SamplingParams(1.0, seed=3, top_k=9, bad_words_token_ids=[[5]]),
    SamplingParams(0.0, logprobs=-1, prompt_logprobs=1),
]


def small_engine() -> LLM:
    """Batches of 1 and 2: a prefill and a round of each."""
    return engine(batch_buckets=(1, 2), max_model_len=32)


def few_levels(monkeypatch: pytest.MonkeyPatch, *levels: SamplingFeatures) -> None:
    """Let warm-ups for any request compile these levels alone, which a test's requests need.

    All levels take minutes; the tests of random and of rare requests have them.
    """
    of_prefill = dict.fromkeys(SAMPLED if each is GREEDY_ROUNDS else each for each in levels)
    monkeypatch.setattr(warmup_run, "ROUND_LEVELS", levels)
    monkeypatch.setattr(warmup_run, "PREFILL_LEVELS", tuple(of_prefill))


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
        for (least, *_), s in llm.runner.program_choice._shapes.items()
        if isinstance(s, PrefillShape)
    }


def test_rare_features_prefill_in_the_next_larger_call_and_have_their_own_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calls have 1, 2, 4 and 5 tiles of 32 tokens; those of rare features 1 and 5."""
    few_levels(monkeypatch, GREEDY_ROUNDS, CHANGED, SCORED, replace(PROCESSED, logprobs=True))
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


def test_a_size_that_was_not_warmed_compiles_although_a_larger_call_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_levels(monkeypatch, GREEDY_ROUNDS)
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


@pytest.mark.parametrize(("draft_max_model_len", "number"), [(None, 74), (64, 95)])
def test_a_full_warm_up_for_64_requests_on_a_gpu_compiles_few_programs(
    draft_max_model_len: int | None, number: int
) -> None:
    """Rounds: 3 levels in 7 batches, 5 in 4. Prefills: 2 levels in 9 sizes, 5 in 3. Where any text
    outgrows the draft, the 3 levels have limited drafts too."""
    speculative = SpeculativeConfig(
        method="eagle", num_speculative_tokens=2, draft_max_model_len=draft_max_model_len
    )
    # "step" reports the number before anything compiles.
    llm = toy(speculative=speculative, max_num_seqs=64, compilation="step")
    batches, buckets = llm.config.batch_buckets, Buckets(llm.config, prefill_tile=48, on_gpu=True)
    assert batches == (1, 2, 4, 8, 16, 32, 64)
    shapes = Shapes(batches, [buckets.max_pages], buckets.every_tiles(1, buckets.max_tiles))

    class Counted(Exception):
        """The number of programs."""

    def report(_: int, total: int) -> None:
        raise Counted(total)

    llm.runner.on_compiled = report
    with counting_compilations() as compiled, pytest.raises(Counted, match=f"^{number}$"):
        llm.engine.warm_levels(shapes)
    assert not compiled


def batches_of_rounds(llm: LLM) -> list[int]:
    """The slots of the batch of each step's rounds from now on."""
    found: list[int] = []
    llm.engine.on_rounds = lambda verification, _: found.append(len(verification.output_tokens))
    return found


# In a cold engine each kind has programs of its own; tests/sampling compares many more kinds.
@pytest.mark.parametrize(
    "compared",
    [(COMMON[2], RARE[0], RARE[4]), slow((*COMMON, *RARE))],
    ids=["some texts", "all texts"],
)
def test_a_rare_request_alone_runs_in_the_larger_batch_and_has_its_own_text(
    compared: tuple[SamplingParams, ...],
) -> None:
    llm, cold = small_engine(), small_engine()
    llm.warmup()
    batches = batches_of_rounds(llm)
    for kind in (*COMMON, *RARE):
        params = replace(kind, max_tokens=9, ignore_eos=True)
        batches.clear()
        with counting_compilations() as compiled:
            [output] = llm.generate([1, 2], params)
        assert not compiled and set(batches) == {1 if kind in COMMON else 2}, kind
        if kind not in compared:
            continue
        [expected] = cold.generate([1, 2], params)
        assert output.token_ids == expected.token_ids, kind
        assert output.outputs[0].logprobs == expected.outputs[0].logprobs, kind
    assert cold.runner.resident.num_slots == 1


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"adaptive": True, "fallback_method": "ngram"}, 0),
        ({"draft_max_model_len": 24}, 0),
        slow({"adaptive": True}, 30),
        slow({"fallback_method": "ngram"}, 30),
        slow({"draft_max_model_len": 24}, 30),
    ],
    ids=str,
)
def test_fewer_drafts_are_not_rare_where_all_rounds_may_limit_drafts(
    settings: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """count: of random requests, which need all levels"""
    if not count:
        few_levels(monkeypatch, GREEDY_ROUNDS, CHANGED, SAMPLED, TRUNCATED)
    monkeypatch.setattr(draft_choice, "draft_cost", lambda *_: DraftCost(0.0, 0.1))
    spec = SpeculativeConfig(method="eagle", num_speculative_tokens=2, **settings)
    llm = toy(
        speculative=spec,
        max_model_len=128,
        max_num_seqs=2,
        batch_buckets=(1, 2),
        block_size=16,
        max_num_batched_tokens=32,
    )
    llm.warmup()
    batches = batches_of_rounds(llm)
    with counting_compilations() as compiled:
        for kind, batch in (*((kind, 1) for kind in COMMON), (RARE[0], 2)):
            batches.clear()
            few = replace(kind, max_tokens=9, ignore_eos=True, num_speculative_tokens=1)
            llm.generate([1, 2], few)
            assert set(batches) == {batch}, kind
        if count:
            soak(llm, VOCAB, count, seed=1)
    assert not compiled and all_free(llm)


def test_a_batch_grows_for_a_rare_request_and_shrinks_when_that_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two requests need a batch of two. Rare ones have batches of one and of four."""
    few_levels(monkeypatch, GREEDY_ROUNDS, CHANGED)
    llm = engine(batch_buckets=(1, 2, 4), max_num_seqs=4)
    llm.warmup()
    batches = batches_of_rounds(llm)
    with counting_compilations() as compiled:
        olds = [add(llm, prompt, LONG) for prompt in ([1, 2], [4])]
        step_until(llm, lambda: olds[1].num_generated > 5)
        assert set(batches) == {2}
        llm.engine.cancel(olds[1])
        step_until(llm, lambda: batches[-1] == 1)
        batches.clear()
        new = add(llm, [3], NEW)
        step_until(llm, lambda: new.finish_reason is not None)
        assert set(batches) == {4} and olds[0].finish_reason is None
        batches.clear()
        step_until(llm, lambda: olds[0].finish_reason is not None)
        assert set(batches) == {1}
    assert not compiled and all_free(llm)
    for request, params in ((olds[0], LONG), (new, NEW)):
        [alone] = engine().generate([request.prompt_token_ids], params)
        assert request.token_ids == alone.token_ids


def test_a_batch_that_was_not_warmed_compiles_although_a_larger_one_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few_levels(monkeypatch, GREEDY_ROUNDS, CHANGED)
    llm = engine(
        batch_buckets=(1, 2, 3, 4),
        max_num_seqs=4,
        max_model_len=36,  # programs of its own
        max_num_batched_tokens=128,
    )
    llm.warmup(batch_sizes=[2])
    batches = batches_of_rounds(llm)
    params = replace(RARE[0], max_tokens=5, ignore_eos=True)
    for number, size, is_new in ((1, 2, False), (4, 4, True), (3, 3, True), (3, 3, False)):
        batches.clear()
        with counting_compilations() as compiled:
            llm.generate([[1]] * number, params)
        assert set(batches) == {size}
        assert any("decode_round" in name for name in compiled) == is_new


@pytest.mark.parametrize("count", [50, slow(150)])
def test_random_requests_compile_nothing_in_any_batch_after_a_full_warm_up(count: int) -> None:
    """Few blocks: requests are preempted, and batches grow and shrink. K goes by how many generate:
    of two together one alone has drafts, while the other is prefilled."""
    speculative = SpeculativeConfig(
        method="eagle",
        num_speculative_tokens=2,
        num_speculative_tokens_per_batch_size=[(1, 1, 2), (2, 2, 0), (3, 4, 1)],
    )  # type: ignore[arg-type]
    llm = toy(
        speculative=speculative,
        max_model_len=128,
        max_num_seqs=4,
        batch_buckets=(1, 2, 4),
        block_size=16,
        max_num_batched_tokens=32,
        num_gpu_blocks_override=10,
    )
    llm.warmup()
    batches = batches_of_rounds(llm)
    with counting_compilations() as compiled:
        soak(llm, VOCAB, count, seed=1)
        few = SamplingParams(0.0, max_tokens=20, num_speculative_tokens=1)
        llm.generate([[1, 2], [3] * 70], [few, COMMON[0]])
    assert not compiled and all_free(llm) and llm.scheduling.num_preemptions > 0
    assert set(batches) == {1, 2, 4}


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
def test_each_program_is_reported(compilation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few_levels(monkeypatch, GREEDY_ROUNDS, CHANGED)
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


def test_small_jobs_do_not_wait_for_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large ones may all wait for other processes, which lower their kernels."""
    monkeypatch.setattr("jaxspec.engine.background.num_cores", lambda: 1)
    came = threading.Event()
    waited: list[bool] = []
    side_by_side([lambda: waited.append(came.wait(30))], [came.set], lambda *_: None)
    assert waited == [True]


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
