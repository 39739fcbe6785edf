"""Greedy speculative text equals plain greedy text in float32, whether the draft agrees with the
target or not."""

from __future__ import annotations

from functools import cache

import pytest

from jaxspec.config import RoundConfig
from tests.support.slow import slow_unless
from tests.support.tiny import (
    Model,
    agreeing_model,
    generate,
    random_prompts,
    sampling_state,
    tiny_model,
)

LENGTHS, MAX_TOKENS = (5, 9, 1, 4), (24, 17, 21, 2)
# method, K, block size, rule, and whether the program is the one for batches in which other
# requests sample: there the rule matters.
CASES = [
    ("eagle", 1, 4, "probabilistic", False),
    ("eagle", 2, 16, "block", True),
    ("eagle", 3, 1, "probabilistic", True),
    ("eagle", 4, 4, "block", True),
    ("eagle", 5, 16, "strict", False),
    ("eagle3", 1, 16, "strict", False),
    ("eagle3", 2, 1, "probabilistic", False),
    ("eagle3", 3, 4, "strict", True),
    ("eagle3", 4, 16, "probabilistic", False),
    ("eagle3", 5, 1, "block", True),
]
# Each method and K, block size, and rule of batches in which others sample.
USUAL = [
    c
    for c in CASES
    if c[:2] in (("eagle", 1), ("eagle", 2), ("eagle", 3), *(("eagle3", K) for K in (3, 4, 5)))
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


@pytest.mark.parametrize(
    ("method", "K", "block_size", "rule", "sampled"), slow_unless(USUAL, CASES)
)
def test_greedy_text_equals_plain_text_when_drafts_are_accepted(
    method: str, K: int, block_size: int, rule: str, sampled: bool
) -> None:
    model, plain = model_and_plain_text("agreeing", method)
    cfg = model.round_config(K, block_size=block_size, rule=rule, sampled=sampled)
    assert run_equals_plain(model, plain, cfg) > 1.3


@pytest.mark.parametrize(
    ("method", "K", "block_size", "rule", "sampled"),
    slow_unless(
        [c for c in CASES if c[:2] in (("eagle", 1), ("eagle", 3), ("eagle3", 5))],
        [c for c in CASES if c[0] == "eagle" or c[1] in (2, 5)],
    ),
)
def test_greedy_text_equals_plain_text_when_they_are_not(
    method: str, K: int, block_size: int, rule: str, sampled: bool
) -> None:
    model, plain = model_and_plain_text("hostile", method)
    cfg = model.round_config(K, block_size=block_size, rule=rule, sampled=sampled)
    assert run_equals_plain(model, plain, cfg) < 1.3


def run_equals_plain(model: Model, plain: list[list[int]], cfg: RoundConfig) -> float:
    """Unequal prompts and ends. Returns the mean acceptance length."""
    run = generate(
        cfg,
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 4),
        max_tokens=MAX_TOKENS,
        shuffle_seed=cfg.num_speculative_tokens,
    )
    assert [len(text) for text in plain] == list(MAX_TOKENS)
    assert run.token_ids == plain
    return run.mean_acceptance_length
