"""Greedy speculative text equals plain greedy text in float32 for targets with windows, experts and
latent caches, and for MTP drafts."""

from __future__ import annotations

from functools import cache

import pytest

from tests.support.families import PAIRS, family_model
from tests.support.tiny import generate, random_prompts, sampling_state

LENGTHS, MAX_TOKENS = (5, 9, 1), (22, 17, 3)
# K of the usual cases; of the others 3. test_row_budget.py has the pairs without one.
QUICK = {
    ("deepseek_v4", "mtp"): (2,),
    ("gpt_oss", "eagle3"): (),
    ("glm4_moe_lite", "mtp"): (),
}
ELSEWHERE = ("gpt_oss", "llama4_text", "glm4_moe_lite")  # other tests run them on each jax
CASES = [
    pytest.param(
        *pair,
        K,
        (4, 1, 16)[(K + i) % 3],
        marks=(
            *(() if K in QUICK.get(pair, (3,)) else (pytest.mark.slow,)),
            *((pytest.mark.once,) if pair[0] in ELSEWHERE else ()),
        ),
    )
    for i, pair in enumerate(PAIRS)
    for K in range(1, 6)
]


@cache
def plain_text(family: str, method: str) -> list[list[int]]:
    model = family_model(family, method)
    cfg = model.round_config(0, sampled=False)
    return generate(
        cfg,
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 3),
        max_tokens=MAX_TOKENS,
        chunk=4,
    ).token_ids


@pytest.mark.parametrize(("family", "method", "K", "block_size"), CASES)
def test_greedy_text_equals_plain_text(family: str, method: str, K: int, block_size: int) -> None:
    model = family_model(family, method)
    cfg = model.round_config(K, block_size=block_size, sampled=False)
    run = generate(
        cfg,
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 3),
        max_tokens=MAX_TOKENS,
        chunk=4,
        shuffle_seed=K,
    )
    plain = plain_text(family, method)
    assert [len(text) for text in plain] == list(MAX_TOKENS)
    assert run.token_ids == plain
    if method != "eagle3":  # its draft is not made to agree
        assert run.mean_acceptance_length > min(1.3, 1 + 0.2 * K)  # K = 1 accepts at most 2
