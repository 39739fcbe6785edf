"""The engine with adaptive drafts: texts do not depend on neighbours, preemption, failures, the
clock or the K of rounds; and K follows acceptance and cost."""

from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import numpy as np
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SamplingParams, SpeculativeConfig
from jaxspec.decode.adaptive import PRIOR, SCALE, UNIT, Estimate
from jaxspec.engine import draft_choice
from jaxspec.engine.draft_choice import (
    Candidate,
    DraftChoice,
    RequestAcceptance,
    RoundTimes,
    compiled_numbers,
    thresholds_of,
)
from jaxspec.engine.engine import Engine
from tests.support.tiny import Model, agreeing_model

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


def engine(model: Model, *, adaptive: bool | None = True, **config: Any) -> LLM:
    """adaptive: None decodes plainly."""
    values: dict[str, Any] = dict(
        max_model_len=LIMIT,
        max_num_seqs=4,
        block_size=4,
        batch_buckets=(4,),
        max_num_batched_tokens=64,
        num_gpu_blocks_override=LIMIT // 4,  # room for one request of the largest size
    )
    speculative = SpeculativeConfig(
        method="eagle",
        num_speculative_tokens=K,
        rejection_sample_method="block",
        adaptive=bool(adaptive),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_choice, "step_cost", lambda *_: 0.15)  # half a target's layers: more
        return LLM(
            (model.target, model.params["target"]),
            None if adaptive is None else (model.draft, model.params["draft"]),
            None if adaptive is None else speculative,
            config=EngineConfig(**(values | config)),
        )


@pytest.fixture(scope="module")
def model() -> Model:
    return agreeing_model("eagle")


@pytest.fixture(scope="module")
def small(model: Model) -> LLM:
    return engine(model, rounds_per_step=2)


@pytest.fixture(scope="module")
def texts(small: LLM) -> list[list[int]]:
    prompts, params = requests()
    return [output.token_ids for output in small.generate(prompts, params)]


@pytest.mark.once
def test_mixed_requests_keep_their_text_when_they_are_preempted(
    model: Model, small: LLM, texts: list[list[int]]
) -> None:
    """Together twice, and each alone, where neither their rounds nor their round times agree."""
    prompts, params = requests()
    assert small.scheduling.num_preemptions > 0
    assert sum(count > 0 for count in small.metrics.draft_histogram) > 2, "the numbers differ"
    assert "K = 1, 3, 5 (adaptive; rounds " in small.describe()
    assert [output.token_ids for output in small.generate(prompts, params)] == texts
    cold = engine(model, enable_prefix_caching=False, rounds_per_step=1)
    for prompt, own, text in zip(prompts, params, texts, strict=True):
        assert cold.generate([prompt], own)[0].token_ids == text
    plain = engine(model, adaptive=None).generate(prompts, params)
    greedy = [i for i, own in enumerate(params) if own.temperature == 0]
    assert len(greedy) > 2
    assert [texts[i] for i in greedy] == [plain[i].token_ids for i in greedy]


@pytest.mark.once
def test_the_k_of_rounds_changes_no_text(
    small: LLM, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any K is chosen that does not cut the drafts of a sampled request."""
    ks, choose = itertools.cycle((5, 3, 1)), DraftChoice.choose
    chosen = []

    def any_allowed(self: DraftChoice, requests: Any, *args: Any) -> int:
        sampled = [r for r in requests if not r.acceptance.is_free]
        chosen.append(max(next(ks), choose(self, sampled, *args) if sampled else 1))
        return chosen[-1]

    monkeypatch.setattr(DraftChoice, "choose", any_allowed)
    prompts, params = requests()
    assert [output.token_ids for output in small.generate(prompts, params)] == texts
    assert set(chosen) == {1, 3, 5}


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


# --- the choice, alone


def acceptance(rate: float, *, is_free: bool = True, costs: Any = None) -> RequestAcceptance:
    thresholds = thresholds_of(costs or [1 + 0.1 * n for n in (1, 3, 7)], (1, 3, 7))
    judged = 40 * UNIT
    estimate = Estimate(judged, round(judged * (1 - rate)))
    return RequestAcceptance(thresholds, is_free, deque([(0, estimate)]))


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


def chooser(**values: Any) -> DraftChoice:
    model = agreeing_model("eagle")
    config = SpeculativeConfig(method="eagle", num_speculative_tokens=7, adaptive=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_choice, "step_cost", lambda *_: 0.1)
        return DraftChoice(config, model.draft, model.params, **({"fixed_k": False} | values))


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
                    own.observe(drafted, accepted, num_generated=1, num_delivered=0)
                most = max(most, drafts_of(own))
            assert next(n for n in (1, 3, 7) if n >= most) == K, (rate, unread)


def drafts_of(own: RequestAcceptance) -> int:
    judged, rejected = map(int, own.estimate)  # type: ignore[arg-type]
    return sum(SCALE * (judged - rejected) >= t * judged for t in own.thresholds)


def test_times_leave_out_first_rounds_and_weigh_outliers_little() -> None:
    times = RoundTimes()
    assert times.costs(1, (1, 3), 0.5) == [1.5, 2.5]
    for seconds in (90.0, 90.0, 90.0, *[2.0] * 30, 1000.0):
        times.add(1, 3, seconds)
    assert times.costs(1, (1, 3), 0.5)[1] == pytest.approx(2.0, rel=0.07)
    assert times.costs(1, (1, 3), 0.5)[0] == pytest.approx(1.2, rel=0.07), "by the assumed ratio"


def test_an_estimate_goes_back_to_delivered_tokens() -> None:
    own = RequestAcceptance((0,) * 7, False)
    seen = [PRIOR]
    for generated in (3, 5, 6):
        own.observe(3, generated % 4, num_generated=generated, num_delivered=3)
        seen.append(own.estimate)
    assert len(own.history) == 3, "what is delivered is not kept but for its last"
    own.rewind(5)
    assert own.estimate == seen[2]
    own.rewind(3)
    assert own.estimate == seen[1]


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
