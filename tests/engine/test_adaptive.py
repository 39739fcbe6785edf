"""The engine with adaptive drafts and a fallback: texts do not depend on neighbours, preemption,
failures, the clock or the K of rounds; and K follows acceptance and cost."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.decode.adaptive import PRIOR, SCALE, UNIT, Estimate
from jaxspec.drafts import MODEL_FREE, DraftModelConfig
from jaxspec.drafts.draft_model import drafts_for
from jaxspec.engine import draft_choice
from jaxspec.engine.draft_choice import (
    ROW_COST,
    Candidate,
    DraftChoice,
    DraftCost,
    RequestAcceptance,
    RoundTimes,
    break_even_of,
    compiled_numbers,
    draft_cost,
    thresholds_of,
)
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.layers.moe import MoEConfig
from tests.support.slow import slow_unless
from tests.support.tiny import Model, agreeing_model, tiny_model

K, COUNT, LIMIT = 5, 9, 96


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Greedy and sampled ones, some with fewer drafts, of unequal lengths."""
    rng = np.random.default_rng(4)
    prompts = [rng.integers(0, 48, rng.integers(3, 40)).tolist() for _ in range(COUNT)]
    params = [
        SamplingParams(
            (0.0, 1.0, 0.6)[i % 3],
            seed=i,
            max_tokens=int(rng.integers(16, 50)),
            num_speculative_tokens=4 if i % 7 == 0 else None,
        )
        for i in range(COUNT)
    ]
    return prompts, params


ADAPTIVE = {"adaptive": True}


def engine(model: Model, spec: dict[str, Any] | None, *, cost: float = 0.15, **config: Any) -> LLM:
    """spec: None decodes plainly; cost: of a draft."""
    values: dict[str, Any] = dict(
        max_model_len=LIMIT,
        max_num_seqs=4,
        block_size=4,
        batch_buckets=(4,),
        max_num_batched_tokens=64,
        num_gpu_blocks_override=LIMIT // 4,  # room for one request of the largest size
    )
    speculative = None
    if spec is not None:
        chosen = dict(method="eagle", num_speculative_tokens=K, rejection_sample_method="block")
        speculative = SpeculativeConfig(**(chosen | spec))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        # That of half a target's layers would be more.
        patch.setattr(draft_choice, "draft_cost", lambda *_: DraftCost(0.0, cost))
        return LLM(
            (model.target, model.params["target"]),
            None if spec is None else (model.draft, model.params["draft"]),
            speculative,
            config=EngineConfig(**(values | config)),
        )


@pytest.fixture(scope="module")
def model() -> Model:
    return agreeing_model("eagle")


@pytest.fixture(scope="module")
def small(model: Model) -> LLM:
    return engine(model, ADAPTIVE, rounds_per_step=2)


@pytest.fixture(scope="module")
def plain(model: Model) -> list[list[int]]:
    """The texts of greedy requests in plain decoding; the others' have no meaning."""
    return [output.token_ids for output in engine(model, None).generate(*requests())]


@pytest.fixture(scope="module")
def texts(small: LLM) -> list[list[int]]:
    prompts, params = requests()
    return [output.token_ids for output in small.generate(prompts, params)]


@pytest.mark.once
def test_mixed_requests_keep_their_text_when_they_are_preempted(
    model: Model, small: LLM, texts: list[list[int]], plain: list[list[int]]
) -> None:
    """Together twice, and each alone, where neither their rounds nor their round times agree."""
    prompts, params = requests()
    assert small.scheduling.num_preemptions > 0
    assert sum(count > 0 for count in small.metrics.draft_histogram) > 2, "the numbers differ"
    assert "K = 1, 3, 5 (adaptive; rounds " in small.describe()
    assert [output.token_ids for output in small.generate(prompts, params)] == texts
    cold = engine(model, ADAPTIVE, enable_prefix_caching=False, rounds_per_step=1)
    for prompt, own, text in zip(prompts, params, texts, strict=True):
        assert cold.generate([prompt], own)[0].token_ids == text
    assert_greedy_equal(texts, plain)


def assert_greedy_equal(texts: list[list[int]], plain: list[list[int]]) -> None:
    greedy = [i for i, own in enumerate(requests()[1]) if own.temperature == 0]
    assert len(greedy) > 2
    assert [texts[i] for i in greedy] == [plain[i] for i in greedy]


@pytest.mark.once
@pytest.mark.parametrize("method", ["eagle", "dflash"])
def test_the_k_of_rounds_changes_no_text(
    method: str, small: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any K is chosen that does not cut the drafts of a sampled request."""
    prompts, params = requests()
    llm = small
    if method == "dflash":  # rows of a block see each other, so a draft depends on their number
        spec = ADAPTIVE | {"method": method, "num_speculative_tokens": 4}
        llm = engine(tiny_model(method, mapped=False), spec, rounds_per_step=1)
    texts = [output.token_ids for output in llm.generate(prompts, params)]
    numbers = compiled_numbers(llm.metrics.num_speculative_tokens)
    ks, choose = itertools.cycle(numbers[::-1]), DraftChoice.choose
    chosen = []

    def any_allowed(self: DraftChoice, requests: Any, *args: Any) -> int:
        sampled = [r for r in requests if not r.acceptance.is_free]
        chosen.append(max(next(ks), choose(self, sampled, *args) if sampled else 1))
        return chosen[-1]

    monkeypatch.setattr(DraftChoice, "choose", any_allowed)
    assert [output.token_ids for output in llm.generate(prompts, params)] == texts
    assert set(chosen) == set(numbers)


@pytest.mark.once
def test_a_request_that_goes_on_after_a_failure_has_the_same_text(
    small: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A result is lost: requests go on from delivered tokens with the estimates of these."""
    read, count = Engine._read, itertools.count(1)

    def failing(self: Engine) -> None:
        if next(count) == 14:
            raise RuntimeError("lost")
        read(self)

    monkeypatch.setattr(Engine, "_read", failing)
    outputs = small.generate(*requests())
    assert next(count) > 14
    assert [output.token_ids for output in outputs] == texts


@pytest.mark.once
def test_mixed_requests_whose_drafts_fall_back_keep_their_text_when_they_are_preempted(
    model: Model, plain: list[list[int]]
) -> None:
    """A head that accepts too little for its cost now and then. A preempted request goes on from
    the host's estimate, which is the device's."""
    prompts, params = requests()
    spec, cost = {"fallback_method": "ngram", "prompt_lookup_min": 1}, 0.38
    small = engine(model, spec, cost=cost, rounds_per_step=2)
    texts = [output.token_ids for output in small.generate(prompts, params)]
    assert small.scheduling.num_preemptions > 0
    assert 5 < small.metrics.num_lookups < small.metrics.num_drafts - 5
    assert "fallback ngram" in small.describe()
    cold = engine(model, spec, cost=cost, enable_prefix_caching=False, rounds_per_step=1)
    last: list[tuple[Request, int]] = []
    cold.engine.on_rounds = lambda _, rows: last.extend(rows)
    for prompt, own, text in zip(prompts, params, texts, strict=True):
        assert cold.generate([prompt], own)[0].token_ids == text
        request, slot = last[-1]
        acceptance = cold.runner.resident.state.acceptance
        assert acceptance is not None and request.acceptance is not None
        on_device = [int(counts[slot]) for counts in acceptance.estimate]
        assert on_device == list(request.acceptance.estimate)
    assert_greedy_equal(texts, plain)


FEW_ROWS = {"max_num_verify_tokens": 5}
METHODS: dict[str, dict[str, Any]] = {
    "few rows": FEW_ROWS,
    "few rows and a fallback": FEW_ROWS | {"fallback_method": "suffix"},
    "draft_model": {"method": "draft_model", "draft_sample_method": "greedy"},
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "suffix": {"method": "suffix"},
}


def drafted_by(model: Model, spec: SpeculativeConfig) -> Model:
    """Return the target with a draft of a method: a model is its own one."""
    if spec.method == "eagle":
        return model
    if spec.method == "draft_model":
        own = drafts_for(model.target, model.target)
        return Model(model.target, own, model.params | {"draft": model.params["target"]})
    own = MODEL_FREE[spec.method or ""].config(model.target, spec)
    return Model(model.target, own, model.params | {"draft": {}})


@pytest.mark.once
@pytest.mark.parametrize(
    # tests/parallel/test_quantized.py has drafts without a model.
    "name",
    slow_unless(["few rows and a fallback", "draft_model"], METHODS),
)
def test_requests_have_the_text_that_they_have_alone_whatever_drafts(
    name: str, model: Model, plain: list[list[int]]
) -> None:
    spec = ADAPTIVE | {"num_speculative_tokens": 4} | METHODS[name]
    model = drafted_by(model, SpeculativeConfig(**({"method": "eagle"} | spec)))
    llm = engine(model, spec, cost=0.8 if "fallback" in name else 0.15, rounds_per_step=1)
    prompts, params = requests()
    texts = [output.token_ids for output in llm.generate(prompts, params)]
    assert llm.scheduling.num_preemptions > 0
    assert (llm.scheduling.num_waits > 5) == ("few rows" in name)
    assert (llm.metrics.num_lookups > 5) == ("fallback" in name)
    assert sum(count > 0 for count in llm.metrics.draft_histogram) > 1, "the numbers differ"
    assert llm.metrics.num_accepted_tokens > 5
    for prompt, own, text in zip(prompts, params, texts, strict=True):
        assert llm.generate([prompt], own)[0].token_ids == text
    assert_greedy_equal(texts, plain)


# --- the choice, alone


def acceptance(rate: float, *, is_free: bool = True, costs: Any = None) -> RequestAcceptance:
    thresholds = thresholds_of(costs or [1 + 0.1 * n for n in (1, 3, 7)], (1, 3, 7))
    judged = 40 * UNIT
    estimate = Estimate(judged, round(judged * (1 - rate)))
    return RequestAcceptance(thresholds, is_free, 0, deque([(0, estimate)]))


def test_thresholds_are_the_rates_from_which_a_number_brings_the_most_tokens_a_second() -> None:
    costs = [1.1, 1.3, 1.7]
    found = thresholds_of(costs, (1, 3, 7))

    def value(rate: float, at: int) -> float:
        return sum(rate**i for i in range((1, 3, 7)[at] + 1)) / costs[at]

    assert found[0] == 0 and found[1] == found[2] and found[3] == found[6] > found[2]
    for threshold, at in ((found[1], 1), (found[3], 2)):
        at_it, below = threshold / SCALE, (threshold - 2) / SCALE
        assert value(at_it, at) >= max(value(at_it, other) for other in range(at))
        assert value(below, at) < max(value(below, other) for other in range(at))
    assert thresholds_of([1, 9, 9], (1, 3, 7)) == (0, *[SCALE + 1] * 6), "never"
    assert compiled_numbers(7) == (1, 3, 7) and compiled_numbers(1) == (1,)


def weights(count: int) -> np.ndarray:
    return np.zeros(count, np.float32)


def test_the_cost_of_a_draft_counts_the_weights_that_one_row_reads() -> None:
    moe = MoEConfig(num_experts=8, top_k=2, intermediate_size=4)
    plain, with_experts = SimpleNamespace(), SimpleNamespace(moe=moe)
    layers = [{"qkv": weights(300), "experts": {"down": weights(800)}}]
    untied = {"embed_tokens": weights(1000), "lm_head": weights(1000), "layers": layers}
    tied = {"embed_tokens": weights(1000), "layers": [{"qkv": weights(300)}]}
    head = {"embed_tokens": weights(1000), "lm_head": weights(200), "layers": [], "fc": weights(60)}
    eagle = agreeing_model("eagle").draft
    independent = DraftModelConfig(plain, 100)  # type: ignore[arg-type]

    def step(target: Any, draft: Any, *params: Any) -> float:
        both = dict(zip(("target", "draft"), params, strict=True))
        return draft_cost(target, draft, both).step - ROW_COST

    assert step(with_experts, eagle, untied, head) == pytest.approx(260 / (1000 + 300 + 200))
    assert step(plain, eagle, tied, head) == pytest.approx(260 / 1300)
    assert step(plain, independent, untied | {"layers": []}, tied) == pytest.approx(1300 / 1000)


def chooser(**values: Any) -> DraftChoice:
    model = agreeing_model("eagle")
    config = SpeculativeConfig(method="eagle", num_speculative_tokens=7, adaptive=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_choice, "draft_cost", lambda *_: DraftCost(0.0, 0.1))
        options = {"fixed_k": False} | values
        return DraftChoice(config, model.target, model.draft, model.params, **options)


@pytest.mark.parametrize(
    ("rates", "expected"), [((0.05,), 1), ((0.95,), 7), ((0.05, 0.95), 7), ((0.1, 0.2), 1)]
)
def test_k_follows_acceptance(rates: tuple[float, ...], expected: int) -> None:
    requests = [Candidate(acceptance(rate), 7, 0) for rate in rates]
    assert chooser().choose(requests, 4, 1, lambda K: True) == expected


def test_k_follows_the_times_of_rounds_and_waits_for_a_compiler_with_the_largest() -> None:
    choice = chooser()
    request = [Candidate(acceptance(0.9), 7, 0)]
    for _ in range(20):
        for number, seconds in ((1, 0.010), (3, 0.012), (7, 0.050)):
            choice.timed(4, number, seconds)
    assert choice.choose(request, 4, 1, lambda K: True) == 3
    assert choice.choose(request, 8, 1, lambda K: True) == 7, "another batch has its own times"
    assert choice.choose(request, 4, 1, lambda K: False) == 7
    assert chooser(fixed_k=True).choose(request, 4, 1, lambda K: True) == 7
    new = choice.begin(greedy=True, batch=4)
    assert new.is_free and new.thresholds[3] > SCALE, "7 drafts never pay"
    sampled = choice.begin(greedy=False, batch=4)
    assert not sampled.is_free and sampled == chooser().begin(greedy=False, batch=1)


def test_k_never_cuts_the_drafts_that_a_sampled_request_may_have_by_then() -> None:
    """Against every outcome of the rounds that are not read."""
    choice, rng = chooser(), np.random.default_rng(0)
    for _ in range(20):
        choice.timed(4, 7, 1e9)  # which should not matter
    for rate in (0.2, 0.5, 0.6, 0.7, 0.8):
        for unread in (0, 2, 5):
            K = choice.choose(
                [Candidate(acceptance(rate, is_free=False), 7, unread)], 4, 1, lambda K: True
            )
            most = 0
            for _ in range(100):
                own = acceptance(rate, is_free=False)
                for _ in range(unread):
                    drafted = drafts_of(own)
                    accepted = int(rng.integers(0, drafted + 1)) if rng.random() < 0.5 else drafted
                    own.observe(
                        drafted, accepted, is_lookup=False, num_generated=1, num_delivered=0
                    )
                most = max(most, drafts_of(own))
            assert next(n for n in (1, 3, 7) if n >= most) == K, (rate, unread)


def drafts_of(own: RequestAcceptance) -> int:
    judged, rejected = map(int, own.estimate)  # type: ignore[arg-type]
    return sum(SCALE * (judged - rejected) >= t * judged for t in own.thresholds)


def test_times_leave_out_first_rounds_and_weigh_outliers_little() -> None:
    times = RoundTimes()
    assert times.costs(1, (1, 3), DraftCost(0.0, 0.5)) == [1.5, 2.5]
    for seconds in (90.0, 90.0, 90.0, *[2.0] * 30, 1000.0):
        times.add(1, 3, seconds)
    timed = times.costs(1, (1, 3), DraftCost(0.0, 0.5))
    assert timed[1] == pytest.approx(2.0, rel=0.07)
    assert timed[0] == pytest.approx(1.2, rel=0.07), "by the assumed ratio"


def test_an_estimate_goes_back_to_delivered_tokens() -> None:
    own = RequestAcceptance((0,) * 7, False, 0)
    seen = [PRIOR]
    for generated in (3, 5, 6):
        own.observe(3, generated % 4, is_lookup=False, num_generated=generated, num_delivered=3)
        seen.append(own.estimate)
    assert len(own.history) == 3, "what is delivered is not kept but for its last"
    own.rewind(5)
    assert own.estimate == seen[2]
    own.rewind(3)
    assert own.estimate == seen[1]


def test_k_is_the_largest_where_a_sampled_request_may_look_drafts_up_by_then() -> None:
    choice = chooser()
    for rate, unread, expected in ((0.9, 0, 3), (0.3, 0, 7), (0.42, 0, 3), (0.42, 3, 7)):
        own = replace(acceptance(rate, is_free=False), break_even=400)
        own.thresholds = (0, 100, 100, *[SCALE + 1] * 4)
        assert choice.choose([Candidate(own, 7, unread)], 4, 1, lambda K: True) == expected


def test_a_head_breaks_even_where_its_drafts_bring_what_they_cost() -> None:
    assert break_even_of([1.25], (1,)) == SCALE // 4
    assert break_even_of([1.25, 1.75], (1, 3)) == SCALE // 4
    least = break_even_of([2.5], (5,)) / SCALE
    assert sum(least**i for i in range(1, 6)) == pytest.approx(1.5, abs=0.01)
    assert break_even_of([9.0], (3,)) == SCALE + 1


def test_adaptive_takes_true_or_false_and_no_schedule_beside_it() -> None:
    for values, message in (
        (dict(adaptive="yes"), "adaptive: expected true or false, got 'yes'"),
        (
            dict(adaptive=True, num_speculative_tokens_per_batch_size=((1, 2, 1),)),
            "adaptive: expected it without num_speculative_tokens_per_batch_size, "
            "got ((1, 2, 1),) beside it",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            SpeculativeConfig(**values)  # type: ignore[arg-type]
        assert str(error.value) == message
