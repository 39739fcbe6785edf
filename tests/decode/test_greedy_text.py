"""Greedy speculative text equals plain greedy text in float32, whether the draft agrees with the
target or not."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.slow import slow_unless
from tests.support.tiny import (
    METHODS,
    Model,
    agreeing_model,
    generate,
    random_prompts,
    sampling_state,
    tiny_model,
)

LENGTHS, MAX_TOKENS = (5, 9, 1, 4), (24, 17, 21, 2)
RULES = ("strict", "probabilistic", "block")
# Every K with every method; block sizes and rules take turns, each with each.
CASES = [
    (method, K, (1, 4, 16)[(K + i) % 3], RULES[(K + 2 * i + K // 3) % 3])
    for i, method in enumerate(METHODS)
    for K in range(1, 6)
]


@cache
def model_and_plain_text(kind: str, method: str) -> tuple[Model, list[list[int]]]:
    model = agreeing_model(method) if kind == "agreeing" else tiny_model(method)
    plain = generate(
        model.round_config(0, sampled=False),
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 4),
        max_tokens=MAX_TOKENS,
    )
    return model, plain.token_ids


@pytest.mark.parametrize(("method", "K", "block_size", "rule"), CASES)
def test_greedy_text_equals_plain_text_when_drafts_are_accepted(
    method: str, K: int, block_size: int, rule: str
) -> None:
    assert run_equals_plain("agreeing", method, K, block_size, rule) > 1.3


@pytest.mark.parametrize(
    ("method", "K", "block_size", "rule"),
    slow_unless(
        [c for c in CASES if c[:2] in (("eagle", 1), ("eagle", 3), ("eagle3", 2), ("eagle3", 5))],
        [c for c in CASES if c[0] == "eagle" or c[1] in (2, 5)],
    ),
)
def test_greedy_text_equals_plain_text_when_they_are_not(
    method: str, K: int, block_size: int, rule: str
) -> None:
    assert run_equals_plain("hostile", method, K, block_size, rule) < 1.3


def run_equals_plain(kind: str, method: str, K: int, block_size: int, rule: str) -> float:
    """Unequal prompts and ends. Returns the mean acceptance length."""
    model, plain = model_and_plain_text(kind, method)
    # With sampled=True the program is the one for batches in which other requests sample: there the
    # rule matters.
    cfg = model.round_config(K, block_size=block_size, rule=rule, sampled=K == 3 or rule == "block")
    run = generate(
        cfg,
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 4),
        max_tokens=MAX_TOKENS,
        shuffle_seed=K,
    )
    assert [len(text) for text in plain] == list(MAX_TOKENS)
    assert run.token_ids == plain
    return run.mean_acceptance_length
