"""The engine with many requests: each has the text that it has alone, whatever the others do, and
nothing is left behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import (
    LLM,
    ConfigError,
    EngineConfig,
    Increment,
    Interrupted,
    SamplingParams,
    SpeculativeConfig,
)
from jaxspec.cache.pool_sizes import steps_ahead
from jaxspec.engine import engine as engine_module
from jaxspec.engine.buckets import Shapes
from tests.support.slow import slow
from tests.support.tiny import VOCAB, agreeing_model
from tests.support.toys import ToyDraft, ToyTarget

pytestmark = pytest.mark.once

MODEL = agreeing_model("eagle3")
LIMIT, K = 96, 3
STOP_IDS = (7,)


def tokenizer() -> Any:
    """Texts of one letter a token."""
    letters = [chr(ord("A") + i) for i in range(VOCAB)]
    return SimpleNamespace(
        eos_token_ids=STOP_IDS,
        decode=lambda ids: "".join(letters[i] for i in ids),
        encode=lambda t: [ord(c) - 65 for c in t],
    )


def make(
    *,
    draft: bool = True,
    rule: str = "probabilistic",
    spec: dict[str, Any] | None = None,
    **config: Any,
) -> LLM:
    speculative = (
        SpeculativeConfig(
            method="eagle3", num_speculative_tokens=K, rejection_sample_method=rule, **(spec or {})
        )
        if draft
        else None
    )
    values = {
        "max_model_len": LIMIT,
        "max_num_seqs": 4,
        "block_size": 4,
        "batch_buckets": (4,),
        "max_num_batched_tokens": 64,
    }
    values["num_gpu_blocks_override"] = LIMIT // 4  # room for one request of the largest size
    return LLM(
        (MODEL.target, MODEL.params["target"]),
        (MODEL.draft, MODEL.params["draft"]) if draft else None,
        speculative,
        tokenizer=tokenizer(),
        config=EngineConfig(**(values | config)),  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module", params=[1, 4], ids=["a_round_a_step", "4_rounds_a_step"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return make(rounds_per_step=request.param)


@pytest.fixture(scope="module")
def cold() -> LLM:
    """A round a step, and of the same shapes, so that it shares the other's programs."""
    return make(enable_prefix_caching=False, rounds_per_step=1)


def random_requests(count: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Lengths and parameters at random; a third of the prompts start alike."""
    rng = np.random.default_rng(seed)
    start = rng.integers(8, VOCAB, 30).tolist()
    prompts, params = [], []
    for i in range(count):
        own = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
        prompts.append(start[: rng.integers(0, 30)] + own if i % 3 == 0 else own)
        temperature = float(rng.choice([0.0, 0.7, 1.0]))
        params.append(
            SamplingParams(
                temperature,
                seed=int(rng.integers(2**40)),
                max_tokens=int(rng.integers(1, 36)),
                top_k=int(rng.choice([0, 5])),
                ignore_eos=bool(rng.integers(2)),
                stop_token_ids=tuple(rng.integers(0, VOCAB, rng.integers(0, 3)).tolist()),
                num_speculative_tokens=[None, None, 0, 1][rng.integers(4)],
            )
        )
    return prompts, params


def all_free(llm: LLM) -> bool:
    free = all(g.pool.num_free == g.pool.num_blocks for g in llm.engine.scheduler.groups)
    return free and not llm.engine.has_requests


@pytest.fixture(scope="module")
def texts_alone(cold: LLM) -> Callable[[int], list[tuple[list[int], str | None]]]:
    """The texts and finish reasons of so many random requests, one after the other and without a
    prefix cache."""

    @cache
    def run(count: int) -> list[tuple[list[int], str | None]]:
        cold.reset_metrics()
        outputs = [
            cold.generate([prompt], params)[0]
            for prompt, params in zip(*random_requests(count, seed=1), strict=True)
        ]
        assert cold.scheduling.num_preemptions == 0 and all_free(cold)
        return [(output.token_ids, output.finish_reason) for output in outputs]

    return run


@pytest.mark.parametrize("count", [60, slow(100), slow(200)])
def test_each_of_many_random_requests_has_its_own_text_in_a_pool_far_too_small(
    llm: LLM, texts_alone: Callable[[int], list[tuple[list[int], str | None]]], count: int
) -> None:
    """In any order of arrival."""
    prompts, params = random_requests(count, seed=1)
    order = np.random.default_rng(2).permutation(count)
    llm.reset_metrics()
    together = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert llm.scheduling.num_preemptions > 5 and llm.scheduling.num_prefix_hits > 0
    alone = texts_alone(count)
    for output, i in zip(together, order, strict=True):
        assert (output.token_ids, output.finish_reason) == alone[i], i
    assert all_free(llm)


def test_requests_that_arrive_while_others_run_have_their_own_text(llm: LLM, cold: LLM) -> None:
    prompts, params = random_requests(24, seed=3)
    expected = [o.token_ids for o in cold.generate(prompts, params)]
    rng, streams, found = np.random.default_rng(4), [], {}
    for i in range(24):
        streams.append((i, llm.stream([prompts[i]], params[i])))
        found[i] = []
        for j, stream in streams[-3:]:
            for _ in range(rng.integers(1, 4)):
                found[j] += getattr(next(stream, None), "token_ids", [])
    for i, stream in streams:
        for increment in stream:
            found[i] += increment.token_ids
    assert [found[i] for i in range(24)] == expected and all_free(llm)


@pytest.fixture
def ahead(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """As on a GPU: more steps are launched before a result is read."""
    monkeypatch.setattr(llm.engine, "depth", steps_ahead(llm.runner.rounds_per_step))
    return llm


def test_requests_have_their_own_text_and_counts_with_steps_in_flight(
    ahead: LLM, cold: LLM
) -> None:
    """Stop strings end a request that the device goes on with; its blocks and its slot are
    another's by then."""
    prompts, params = random_requests(60, seed=11)
    rng = np.random.default_rng(12)
    params = [
        replace(p, stop=[chr(65 + t) for t in rng.integers(0, VOCAB, 2 * (i % 2))])
        for i, p in enumerate(params)
    ]
    ahead.reset_metrics()
    together = ahead.generate(prompts, params)
    assert ahead.scheduling.num_preemptions > 0 and ahead.scheduling.num_prefix_hits > 0
    assert sum(len(o.text) < len(o.token_ids) for o in together) > 5, "stopped by a string"
    for i, output in enumerate(together):
        (alone,) = cold.generate([prompts[i]], params[i])
        assert (output.token_ids, output.text, output.finish_reason) == (
            alone.token_ids,
            alone.text,
            alone.finish_reason,
        ), i
        assert output.metrics == alone.metrics, i
    assert all_free(ahead)


def test_rounds_in_flight_past_the_last_request_count_for_nothing(ahead: LLM) -> None:
    """Neither as requests that run, when compiling ahead, nor as time that the next call took."""
    params = SamplingParams(0.0, max_tokens=24, ignore_eos=True)
    (whole,) = ahead.generate([[20, 21]], params)
    ended = replace(params, stop_token_ids=(whole.token_ids[4],))
    ahead.generate([[20, 21]], ended)
    assert ahead.engine.warm([], params=(), shapes=Shapes((), (), ()), limits_drafts=False) == 0
    ahead.generate([[20, 21]], ended)
    ahead.reset_metrics()
    time.sleep(0.5)
    began = time.perf_counter()
    (again,) = ahead.generate([[20, 21]], params)
    assert (
        again.token_ids == whole.token_ids and ahead.timings.num_rounds == again.metrics.num_drafts
    )
    assert (
        ahead.timings.prefill_seconds + ahead.timings.decode_seconds <= time.perf_counter() - began
    )


def test_prefix_caching_changes_no_greedy_text(llm: LLM, cold: LLM) -> None:
    """With a draft, whose keys and values are shared too: the same acceptance."""
    start = np.random.default_rng(5).integers(8, VOCAB, 40).tolist()
    prompts = [[*start[:n], n % VOCAB, 3] for n in range(20, 40)]
    greedy = SamplingParams(0.0, max_tokens=12, ignore_eos=True)
    llm.reset_metrics()
    cold.reset_metrics()
    warm, plain = llm.generate(prompts, greedy), cold.generate(prompts, greedy)
    assert llm.scheduling.num_prefix_hits > 100 and cold.scheduling.num_prefix_hits == 0
    assert [o.token_ids for o in warm] == [o.token_ids for o in plain]
    assert [o.metrics.acceptance_histogram for o in warm] == [
        o.metrics.acceptance_histogram for o in plain
    ]


# ---- faults of one request


def test_a_callback_that_raises_ends_its_own_request_only(llm: LLM) -> None:
    prompts, params = [[9], [10], [11]], SamplingParams(0.0, max_tokens=20, ignore_eos=True)
    expected = llm.generate(prompts, params)
    seen: list[Increment] = []

    def callback(increment: Increment) -> None:
        seen.append(increment)
        if increment.index == 1 and len([s for s in seen if s.index == 1]) == 3:
            raise RuntimeError("mine")

    outputs = llm.generate(prompts, params, callback=callback)
    assert [outputs[i].token_ids for i in (0, 2)] == [expected[i].token_ids for i in (0, 2)]
    assert outputs[1].finish_reason == "error" and str(outputs[1].error) == "mine"
    assert (
        outputs[1].token_ids == expected[1].token_ids[: len(outputs[1].token_ids)]
        and len(outputs[1].token_ids) < 20
    )
    assert all_free(llm)
    for i in (0, 2):
        assert "".join(s.text for s in seen if s.index == i) == expected[i].text
        assert [s.finish_reason for s in seen if s.index == i][-1] == "length"


def test_a_callback_that_generates_ends_its_own_request_only(llm: LLM) -> None:
    """Its tokens would be read before those of the round that is being handed out."""
    prompts, params = [[9], [10], [11]], SamplingParams(0.0, max_tokens=20, ignore_eos=True)
    expected = llm.generate(prompts, params)

    def callback(increment: Increment) -> None:
        if increment.index == 1:
            llm.generate([[12]], params)

    outputs = llm.generate(prompts, params, callback=callback)
    assert [outputs[i].token_ids for i in (0, 2)] == [expected[i].token_ids for i in (0, 2)]
    assert outputs[1].finish_reason == "error" and str(outputs[1].error).startswith(
        "callback: expected no generating inside it"
    )
    assert all_free(llm)


def test_a_closed_stream_cancels_the_rest_and_leaves_the_engine_usable(llm: LLM) -> None:
    params = SamplingParams(0.0, max_tokens=30, ignore_eos=True)
    (expected,) = llm.generate([[12, 13]], params)
    stream = llm.stream([[9], [10]], params)
    other = llm.stream([[12, 13]], params)
    taken = [next(stream), next(stream), next(other)]
    stream.close()  # type: ignore[attr-defined]
    rest = [taken[2], *other]
    assert [t for increment in rest for t in increment.token_ids] == expected.token_ids
    assert all_free(llm) and llm.generate([[12, 13]], params)[0].token_ids == expected.token_ids


def test_a_bad_request_does_not_touch_those_that_run(llm: LLM) -> None:
    params = SamplingParams(0.0, max_tokens=20, ignore_eos=True)
    (expected,) = llm.generate([[14]], params)
    stream = llm.stream([[14]], params)
    tokens = next(stream).token_ids
    for bad in ([[1], []], [[VOCAB]], [[1] * LIMIT]):
        with pytest.raises(ConfigError):
            llm.generate(bad, params)
    with pytest.raises(ConfigError):
        llm.stream([[1]], SamplingParams(banned_token_ids=(VOCAB,)))
    assert tokens + [t for increment in stream for t in increment.token_ids] == expected.token_ids


def test_ctrl_c_leaves_what_was_finished_and_a_usable_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = [SamplingParams(0.0, max_tokens=n, ignore_eos=True) for n in (1, 80, 2)]
    expected = [o.token_ids for o in llm.generate([[9], [10], [11]], params)]
    steps, step = [], engine_module.Engine._step

    def interrupted(self: Any) -> None:
        steps.append(1)
        if len(steps) == 4:
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(engine_module.Engine, "_step", interrupted)
    with pytest.raises(Interrupted) as raised:
        llm.generate([[9], [10], [11]], params)
    assert [(o.index, o.token_ids) for o in raised.value.outputs] == [
        (0, expected[0]),
        (2, expected[2]),
    ]
    assert isinstance(raised.value, KeyboardInterrupt)
    assert (
        str(raised.value).splitlines()[0]
        == "2 prompts were finished, their outputs are in this exception's outputs:"
    )
    assert str(raised.value).splitlines()[1:] == [
        f"  {o.text or o.token_ids!r}" for o in raised.value.outputs
    ]
    assert [o.token_ids for o in llm.generate([[9], [10], [11]], params)] == expected and all_free(
        llm
    )


@pytest.mark.parametrize("added", [0, 1])
def test_ctrl_c_while_requests_are_added_leaves_a_usable_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, added: int
) -> None:
    count, add = [], engine_module.Engine.add

    def interrupted(self: Any, request: Any) -> None:
        if len(count) == added:
            raise KeyboardInterrupt
        count.append(1)
        add(self, request)

    params = SamplingParams(0.0, max_tokens=3, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(engine_module.Engine, "add", interrupted)
        with pytest.raises(Interrupted) as raised:
            llm.generate([[9], [10], [11]], params)
    assert (
        raised.value.outputs == []
        and str(raised.value).startswith("0 prompts were finished")
        and all_free(llm)
    )
    assert len(llm.generate([[9]], params)[0].token_ids) == 3


def test_out_of_device_memory_is_one_sentence_with_numbers(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes."
        )

    with monkeypatch.context() as patch:
        patch.setattr(llm.runner, "round", full)
        with pytest.raises(ConfigError) as raised:
            llm.generate([[1, 2]], SamplingParams(0.0, max_tokens=5, ignore_eos=True))
    text = str(raised.value)
    assert (
        text.startswith("device memory: expected room for weights of")
        and "lower gpu_memory_utilization (0.9), max_num_seqs (4)" in text
    )
    assert (
        len(llm.generate([[1, 2]], SamplingParams(0.0, max_tokens=5, ignore_eos=True))[0].token_ids)
        == 5
    )


def test_a_pool_too_small_for_one_request_is_named_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"KV cache: expected 24 blocks of 4 tokens .* got 23 from "
            r"num_gpu_blocks_override 23; lower"
        ),
    ):
        make(num_gpu_blocks_override=23)


# ---- stop strings, n, draft control


def test_nothing_after_a_stop_string_leaks_wherever_it_lies_in_a_window(llm: LLM) -> None:
    """Every pair of letters of a text that the draft gets mostly right: cut there, and so are
    tokens and counts."""
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    (whole,) = llm.generate([[20, 21]], SamplingParams(**greedy))
    assert whole.metrics.mean_acceptance_length > 1.5
    stops = sorted({whole.text[i : i + 2] for i in range(len(whole.text) - 1)})
    outputs = llm.generate(
        [[20, 21]] * len(stops), [SamplingParams(**greedy, stop=s) for s in stops]
    )
    kept = llm.generate(
        [[20, 21]] * len(stops),
        [SamplingParams(**greedy, stop=s, include_stop_str_in_output=True) for s in stops],
    )
    for stop, cut, with_stop in zip(stops, outputs, kept, strict=True):
        at = whole.text.index(stop)
        assert (
            cut.finish_reason == "stop"
            and cut.text == whole.text[:at]
            and with_stop.text == whole.text[: at + 2]
        )
        assert cut.token_ids == whole.token_ids[: at + 2], "up to the token that completes it"
        assert cut.metrics.num_accepted_tokens <= len(cut.token_ids) - max(
            1, cut.metrics.num_drafts
        ), "nothing past the stop is counted"
        assert cut.times.num_tokens == len(cut.token_ids)
    assert all_free(llm)


def test_a_stop_string_that_never_comes_changes_nothing(llm: LLM) -> None:
    params = {"temperature": 0.0, "max_tokens": 15, "ignore_eos": True}
    (plain,) = llm.generate([[22]], SamplingParams(**params))
    (other,) = llm.generate([[22]], SamplingParams(**params, stop="!"))
    assert (other.token_ids, other.text, other.finish_reason) == (
        plain.token_ids,
        plain.text,
        "length",
    )


def test_a_stream_never_shows_the_start_of_a_stop_string(llm: LLM) -> None:
    greedy = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    (whole,) = llm.generate([[20, 21]], SamplingParams(**greedy))
    stop = whole.text[9:13]
    pieces = list(llm.stream([[20, 21]], SamplingParams(**greedy, stop=[stop, "!!!!!!"])))
    assert "".join(p.text for p in pieces) == whole.text[: whole.text.index(stop)]
    assert pieces[-1].finish_reason == "stop" and all(p.finish_reason is None for p in pieces[:-1])


def test_assignments_change_no_request_that_runs(llm: LLM) -> None:
    """A request has a copy of its parameters, made and checked when it is handed in."""
    params = SamplingParams(0.0, max_tokens=20, logit_bias={3: 0.5}, ignore_eos=True)
    (expected,) = llm.generate([[5, 6]], params)
    stream = llm.stream([5, 6], params)
    tokens = list(next(stream).token_ids)
    params.max_tokens, params.temperature, params.stop_token_ids = 2, 1.0, expected.token_ids
    params.logit_bias[3] = 100.0  # type: ignore[index]
    tokens += [token for increment in stream for token in increment.token_ids]
    assert tokens == expected.token_ids and len(tokens) == 20
    params.logit_bias[3] = 1000.0  # type: ignore[index]  # not seen before the request is made
    with pytest.raises(ConfigError, match="prompt 0: logit_bias: expected numbers from -100"):
        llm.generate([[5, 6]], params)
    params.logit_bias, params.min_tokens = {}, 3
    for call in (
        lambda: llm.generate([[5, 6]], params),
        lambda: llm.warmup(sampling_params=[params]),
    ):
        with pytest.raises(ConfigError, match="min_tokens: expected an integer from 0 to max_tok"):
            call()


def test_stop_strings_need_a_tokenizer() -> None:
    bare = LLM((MODEL.target, MODEL.params["target"]), config=EngineConfig(max_model_len=LIMIT))
    with pytest.raises(ConfigError, match="prompt 1: stop: expected a target with a tokenizer"):
        bare.generate([[1], [2]], [SamplingParams(), SamplingParams(stop="x")])


def test_n_texts_have_seeds_of_their_own_and_the_first_is_the_only_one_of_n_1(llm: LLM) -> None:
    params = {"temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    (one,), (three,) = (
        llm.generate([[30]], SamplingParams(**params)),
        llm.generate([[30]], SamplingParams(**params, n=3)),
    )
    assert [o.index for o in three.outputs] == [0, 1, 2] and three.token_ids == one.token_ids
    assert len({tuple(o.token_ids) for o in three.outputs}) == 3
    assert [
        o.token_ids for o in llm.generate([[30]], SamplingParams(**params, n=3))[0].outputs
    ] == [o.token_ids for o in three.outputs]


def test_a_request_drafts_as_many_tokens_as_it_asks_for(llm: LLM) -> None:
    """Beside others with their own number; greedy text is the same with every one."""
    asked = [None, 0, 1, 2, 9]
    params = [
        SamplingParams(0.0, max_tokens=20, ignore_eos=True, num_speculative_tokens=n) for n in asked
    ]
    outputs = llm.generate([[20, 21]] * 5, params)
    assert len({tuple(o.token_ids) for o in outputs}) == 1
    for output, n in zip(outputs, [3, 0, 1, 2, 3], strict=True):
        m = output.metrics
        assert m.num_draft_tokens == n * m.num_drafts and not any(m.accepted_per_position[n:])
        assert (m.num_drafts == 0) == (n == 0) and m.num_accepted_tokens >= (n > 0)


# Within a step of rounds: tests/decode/test_several_rounds.py.
@pytest.mark.parametrize("rounds", [1, slow(2)])
def test_past_draft_max_model_len_a_request_goes_on_without_drafts(rounds: int) -> None:
    """Under the strict rule sampled text is plain decoding's as well."""
    limited, plain = (
        make(rule="strict", spec={"draft_max_model_len": 24}, rounds_per_step=rounds),
        make(draft=False),
    )
    params = [SamplingParams(t, seed=3, max_tokens=40, ignore_eos=True) for t in (0.0, 1.0)]
    prompts = [[20, 21, 22], [20, 21, 22]]
    outputs, expected = limited.generate(prompts, params), plain.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    for output in outputs:
        assert 0 < output.metrics.num_draft_tokens <= 3 * (24 - 3 + 1), (
            "no draft from a context of more than 24 tokens"
        )
    (long,) = limited.generate([list(range(30))], params[0])
    assert (
        long.metrics.num_drafts == 0
        and long.token_ids == plain.generate([list(range(30))], params[0])[0].token_ids
    )


@pytest.mark.parametrize("rounds", [slow(1), 2])
def test_k_follows_the_batch_size_and_greedy_text_does_not(rounds: int) -> None:
    """Rounds without drafts keep the draft's cache up to date: it is accepted again afterwards."""
    spec = {"num_speculative_tokens_per_batch_size": [(2, 3, 1), (4, 4, 0)]}
    wide = {
        "batch_buckets": (1, 2, 4),
        "num_gpu_blocks_override": LIMIT,
        "max_num_batched_tokens": 128,
    }
    scheduled = make(spec=spec, rounds_per_step=rounds, **wide)
    usual, params = (
        make(),
        [SamplingParams(0.0, max_tokens=n, ignore_eos=True) for n in (4, 9, 16, 40)],
    )
    prompts = [[20, 21], [22], [23, 24, 25], [27]]
    outputs, expected = scheduled.generate(prompts, params), usual.generate(prompts, params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
    m = outputs[3].metrics
    assert 0 < m.num_draft_tokens < 3 * m.num_drafts and m.accepted_per_position[1] > 0
    assert outputs[0].metrics.num_drafts == 0


def test_max_tokens_1_ends_after_prefill_without_a_round(llm: LLM) -> None:
    llm.reset_metrics()
    llm.generate([[1], [2, 3]], SamplingParams(0.0, max_tokens=1, ignore_eos=True))
    assert llm.timings.num_rounds == 0 and llm.timings.num_output_tokens == 2


def test_latencies_are_counted(llm: LLM) -> None:
    llm.reset_metrics()
    outputs = llm.generate([[20, 21], [22]], SamplingParams(0.0, max_tokens=12, ignore_eos=True))
    results = [
        -(-o.metrics.num_drafts // llm.runner.rounds_per_step) for o in outputs
    ]  # of a step's rounds come together
    for o, count in zip(outputs, results, strict=True):
        assert o.times.num_tokens == 12 and len(o.times.inter_token) == count
        times: Any = o.times  # None until it ends
        assert times.latency >= times.time_to_first_token > 0 and times.time_per_output_token > 0
    counted = llm.latency.to_dict()
    assert counted["num_requests"] == 2 and counted["ttft"]["p99"] >= counted["ttft"]["median"] > 0
    assert len(llm.latency.itl) == sum(results)


# ---- leaks


@pytest.mark.slow
@pytest.mark.usefixtures("toy_families")
def test_10000_short_requests_leak_neither_blocks_nor_host_memory() -> None:
    """Objects that the garbage collector knows, after 2,000 requests and after 10,000."""
    table = {
        "table": jnp.asarray(np.random.default_rng(0).normal(size=(VOCAB, VOCAB)), jnp.float32)
    }
    config = EngineConfig(max_model_len=32, max_num_seqs=64, block_size=4, batch_buckets=(64,))
    speculative = SpeculativeConfig(method="eagle", num_speculative_tokens=1)
    llm = LLM((ToyTarget(VOCAB), table), (ToyDraft(VOCAB), table), speculative, config=config)
    prompts = np.random.default_rng(1).integers(0, VOCAB, (2000, 5)).tolist()
    counts = []
    for _ in range(5):
        llm.generate(prompts, SamplingParams(0.0, max_tokens=3))
        gc.collect()
        counts.append(len(gc.get_objects()))
    assert all_free(llm)
    assert counts[4] - counts[0] < 500, counts
