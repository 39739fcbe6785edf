"""Rounds of an independent model: its drafts are those of its own plain forward, greedy text equals
plain text, and the target as its own draft has every draft accepted."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from jaxspec.drafts import draft_model
from tests.support.families import family_model
from tests.support.slow import slow_unless
from tests.support.tiny import Model, generate, random_prompts, sampling_state

LENGTHS, MAX_TOKENS = (5, 9, 1, 4), (24, 33, 21, 2)
FAMILIES = ("llama", "gpt_oss", "llama4_text", "qwen3_moe", "glm4_moe_lite", "deepseek_v4")


def own_draft(model_type: str) -> Model:
    """A target that is its own draft."""
    model = family_model(model_type, "draft_model", disturbance=1.0)
    draft = draft_model.drafts_for(model.target, model.target)
    params = {"target": model.params["target"], "draft": model.params["target"]}
    return Model(model.target, draft, params)


@cache
def plain_text(model_type: str, disturbance: float) -> list[list[int]]:
    model = family_model(model_type, "draft_model", disturbance=disturbance)
    cfg = model.round_config(0, sampled=False)
    state = sampling_state([0] * 4)
    run = generate(cfg, model.params, random_prompts(LENGTHS), state, max_tokens=MAX_TOKENS)
    return run.token_ids


def texts(model: Model, K: int, block_size: int = 4, **changes: Any) -> Any:
    """By chunks, over shuffled blocks, unequal prompts and ends."""
    return generate(
        model.round_config(K, block_size=block_size, **changes),
        model.params,
        random_prompts(LENGTHS),
        sampling_state([0] * 4),
        max_tokens=MAX_TOKENS,
        chunk=4,
        shuffle_seed=K,
    )


@pytest.mark.parametrize(
    ("model_type", "K"),
    slow_unless(
        [("llama", 1), ("gpt_oss", 4), ("glm4_moe_lite", 3)],
        [(kind, K) for kind in FAMILIES for K in (1, 3, 4, 16)],
    ),
)
def test_a_target_accepts_every_draft_of_itself(model_type: str, K: int) -> None:
    """So every round leaves a draft unread; windows and chunks are shorter than the texts."""
    run = texts(own_draft(model_type), K, sampled=False)
    assert run.token_ids == plain_text(model_type, 1.0)
    assert {n for accepted in run.accepted for n in accepted} == {K}
