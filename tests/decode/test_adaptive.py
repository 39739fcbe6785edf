"""Rounds whose number of drafts follows each request's acceptance: exact, and the same greedy text.

The host repeats the estimates to the bit, and a round's K changes no text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import adaptive, programs
from jaxspec.decode import round as decode
from jaxspec.decode.state import DecodeState
from jaxspec.drafts.drafter import Proposal
from tests.decode import test_distribution as trials
from tests.decode.test_block_drafts import plain_text as plain_block_text
from tests.decode.test_greedy_text import LENGTHS, MAX_TOKENS, model_and_plain_text
from tests.support.slow import slow, slow_unless
from tests.support.statistics import within_limit
from tests.support.tiny import (
    BLOCK_METHODS,
    agreeing_block_model,
    agreeing_model,
    block_tables,
    random_prompts,
    sampling_state,
    start,
    tiny_model,
)
from tests.support.toys import toy_config

pytestmark = pytest.mark.once

K = 3
# Of a toy draft that is accepted half of the time, so that each request has its own number.
THRESHOLDS = (0, 620, 700)


def needs(*thresholds: int) -> Any:
    """Return a function that gives every request of a state these thresholds."""

    def prepare(state: DecodeState) -> DecodeState:
        assert state.acceptance is not None
        rows = jnp.broadcast_to(
            jnp.asarray(thresholds, jnp.int32), state.acceptance.thresholds.shape
        )
        return replace(state, acceptance=state.acceptance.replace(thresholds=rows))  # type: ignore[attr-defined]

    return prepare


def adaptive_config(rule: str) -> Any:
    return toy_config(trials.V, K, rule, adaptive=True, limits_drafts=True)


@pytest.mark.optimised
@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize(
    ("rule", "size"),
    [
        ("probabilistic", trials.CHUNK),
        slow("strict", trials.MANY),
        slow("probabilistic", trials.MANY),
        slow("block", trials.MANY),
    ],
)
def test_text_follows_the_target_over_several_rounds(rule: str, size: int) -> None:
    cfg = adaptive_config(rule)
    played = trials.play(cfg, "alike", 1.0, 4, size, prepare=needs(*THRESHOLDS))
    assert within_limit(*trials.joint_statistic(played, "alike", 1.0))
    assert not trials.biased_steps(played, "alike", 1.0)
    assert {int(n) for n in np.unique(played.counts[3])} == {1, 2, 3, 4}, "the numbers differ"


@pytest.mark.optimised
@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("rule", ["probabilistic", slow("block")])
def test_a_number_that_looks_at_the_drafts_that_are_judged_biases_the_text(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last draft of the number counts only if it is an even token."""
    limit = decode.limit_drafts

    def look(most: jax.Array, proposal: Proposal) -> Proposal:
        last = jnp.maximum(most - 1, 0)[:, None]
        is_odd = jnp.take_along_axis(proposal.draft_tokens, last, axis=1)[:, 0] % 2
        return limit(most - is_odd, proposal)

    monkeypatch.setattr(decode, "limit_drafts", look)
    cfg = adaptive_config(rule)
    played = trials.play(
        cfg, "alike", 1.0, 4, program=trials.one_round(cfg), prepare=needs(*THRESHOLDS)
    )
    assert not within_limit(*trials.joint_statistic(played, "alike", 1.0))
    assert trials.biased_steps(played, "alike", 1.0)


CASES = [(method, k) for method in ("eagle", "eagle3", "dspark") for k in range(1, 17)]
USUAL = [("eagle", 5), ("eagle3", 3), ("dspark", 16)]


@pytest.mark.parametrize(("method", "k"), slow_unless(USUAL, CASES))
def test_greedy_text_equals_plain_text(method: str, k: int) -> None:
    """Unequal prompts and ends; later drafts need more acceptance."""
    if method == "dspark":
        model, plain = agreeing_block_model(method), plain_block_text("agreeing", method)
        lengths = (24, 33, 21, 2)
    else:
        model, plain = model_and_plain_text("agreeing", method)
        lengths = MAX_TOKENS
    rule = ("probabilistic", "block", "strict")[k % 3]
    cfg = model.round_config(
        k, block_size=(4, 1, 16)[k % 3], rule=rule, adaptive=True, limits_drafts=True
    )
    tables, num_blocks = block_tables(4, cfg, shuffle_seed=k)
    first, state = start(
        cfg,
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 4),
        tables,
        num_blocks,
        max_tokens=lengths,
        chunk=4,
    )
    state = needs(*(min(1000, 380 * i) for i in range(k)))(state)
    texts, numbers = [[int(t)] for t in first], set()
    while np.asarray(state.active).any():
        result, state = programs.run_round(cfg, model.params, state, tables, "round")
        tokens, num_sampled = map(np.asarray, (result.output_tokens, result.num_sampled))
        for row, text in enumerate(texts):
            text += tokens[row, : num_sampled[row]].tolist()
        assert result.num_proposed is not None
        numbers |= set(np.asarray(result.num_proposed)[num_sampled > 0].tolist())
    assert [t[:n] for t, n in zip(texts, lengths, strict=True)] == plain
    assert k < 3 or len(numbers) > 1, numbers


@pytest.mark.parametrize(
    ("method", "rule"),
    [
        ("eagle", "probabilistic"),
        ("dspark", "block"),
        slow("eagle", "block"),
        slow("dflash", "probabilistic"),
    ],
)
def test_the_k_of_a_round_changes_no_sampled_text_and_the_host_repeats_the_estimates(
    method: str, rule: str
) -> None:
    """A request that may have at most two drafts, in rounds of two and of five. The rows of a block
    see each other; there are as many of them in both."""
    is_block = method in BLOCK_METHODS
    model = tiny_model(method, mapped=False) if is_block else agreeing_model(method)
    least = 640 if is_block else 780
    texts = []
    for rounds in (2, 5):
        cfg = model.round_config(
            5, rule=rule, adaptive=True, limits_drafts=True, num_block_drafts=5
        )
        tables, num_blocks = block_tables(3, cfg)
        first, state = start(
            cfg,
            model.params,
            random_prompts((4, 7, 2)),
            sampling_state([5, 6, 7], 1.0),
            tables,
            num_blocks,
            max_tokens=99,
        )
        state = needs(0, least, 2000, 2000, 2000)(state)
        assert state.acceptance is not None
        thresholds = np.asarray(state.acceptance.thresholds)
        estimate = adaptive.Estimate(*(np.full(3, count, np.int32) for count in adaptive.PRIOR))
        found = [[int(t)] for t in first]
        seen = set()
        for _ in range(12):
            cfg = replace(cfg, num_speculative_tokens=rounds)
            worth = adaptive.num_worthwhile(estimate, thresholds)
            result, state = programs.run_round(cfg, model.params, state, tables, "round")
            tokens, num_sampled = map(np.asarray, (result.output_tokens, result.num_sampled))
            assert result.num_proposed is not None and state.acceptance is not None
            np.testing.assert_array_equal(result.num_proposed, worth)
            seen |= set(worth.tolist())
            estimate = adaptive.fade(estimate, worth, num_sampled - 1)
            np.testing.assert_array_equal(state.acceptance.estimate.judged, estimate.judged)
            np.testing.assert_array_equal(state.acceptance.estimate.rejected, estimate.rejected)
            for row, text in enumerate(found):
                text += tokens[row, : num_sampled[row]].tolist()
        texts.append(found)
        assert seen == {1, 2}
    assert texts[0] == texts[1]


def test_estimates_fade_and_numbers_follow_the_thresholds() -> None:
    estimate = adaptive.Estimate(*(np.full(2, count, np.int32) for count in adaptive.PRIOR))
    thresholds = np.asarray([[0, 512, 900]] * 2, np.int32)
    assert adaptive.num_worthwhile(estimate, thresholds).tolist() == [2, 2]
    drafts = np.asarray([3, 3], np.int32)
    for _ in range(40):
        estimate = adaptive.fade(estimate, drafts, np.asarray([3, 0], np.int32))
    assert adaptive.num_worthwhile(estimate, thresholds).tolist() == [3, 1]
    for _ in range(12):
        estimate = adaptive.fade(estimate, drafts, np.asarray([0, 3], np.int32))
    assert adaptive.num_worthwhile(estimate, thresholds).tolist() == [2, 2]


def test_rounds_without_drafts_leave_the_estimate() -> None:
    before = adaptive.Estimate(*(np.full(2, count, np.int32) for count in adaptive.PRIOR))
    none = np.zeros(2, np.int32)
    after = before
    for _ in range(100):
        after = adaptive.fade(after, none, none)
    np.testing.assert_array_equal(after, before)


def test_a_head_that_does_not_pay_is_tried_again_when_its_rejections_are_forgotten() -> None:
    estimate = adaptive.Estimate(*(np.full(2, count, np.int32) for count in adaptive.PRIOR))
    drafts, half = np.asarray([3, 3], np.int32), np.full(2, 512, np.int32)
    for _ in range(40):
        estimate = adaptive.fade(estimate, drafts, np.asarray([3, 0], np.int32))
    assert adaptive.falls_back(estimate, half).tolist() == [False, True]
    judged = estimate.judged
    for _ in range(100):
        estimate = adaptive.forget(estimate)
    assert adaptive.falls_back(estimate, half).tolist() == [False, True]
    for _ in range(2000):
        estimate = adaptive.forget(estimate)
    assert not adaptive.falls_back(estimate, half).any()
    for _ in range(6000):
        estimate = adaptive.forget(estimate)
    assert estimate.rejected.tolist() == [0, 0] and (estimate.judged == judged).all()
