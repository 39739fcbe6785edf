"""Rounds of an independent model: greedy text equals plain text, the target as its own draft has
every draft accepted, and sampled text follows the target's distribution."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec import drafts
from jaxspec.config import RoundConfig
from jaxspec.drafts import Independent, draft_model
from jaxspec.drafts.drafter import Observation
from jaxspec.layers.params import Weight, init_random
from jaxspec.loading.binding import bind_draft_model
from tests.decode.test_families_distribution import joint_statistic
from tests.support.families import family_model, target_config
from tests.support.slow import slow, slow_unless
from tests.support.statistics import within_limit
from tests.support.tiny import Model, Run, generate, random_prompts, sampling_state

pytestmark = pytest.mark.once

LENGTHS, MAX_TOKENS = (5, 9, 1, 4), (24, 33, 21, 2)
FAMILIES = ("llama", "gpt_oss", "llama4_text", "qwen3_moe", "glm4_moe_lite", "deepseek_v4")
RULES = ("probabilistic", "block", "strict")


def own_draft(model_type: str) -> Model:
    """A target that is its own draft."""
    model = family_model(model_type, "draft_model", disturbance=1.0)
    draft = draft_model.drafts_for(model.target, model.target)
    params = {"target": model.params["target"], "draft": model.params["target"]}
    return Model(model.target, draft, params)


@cache
def plain_text(model_type: str, disturbance: float) -> list[list[int]]:
    model = family_model(model_type, "draft_model", disturbance=disturbance)
    cfg, state = model.round_config(0, sampled=False), sampling_state([0] * 4)
    run = generate(cfg, model.params, random_prompts(LENGTHS), state, max_tokens=MAX_TOKENS)
    return run.token_ids


def speculated(model: Model, K: int, block_size: int = 4, **changes: Any) -> Run:
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


# --- greedy text
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "K"),
    slow_unless(
        [("llama", 1), ("gpt_oss", 4), ("glm4_moe_lite", 3)],
        [(kind, K) for kind in FAMILIES for K in (1, 3, 4, 16)],
    ),
)
def test_a_target_accepts_every_draft_of_itself(model_type: str, K: int) -> None:
    """So every round leaves a draft unread; windows and chunks are shorter than the texts."""
    run = speculated(own_draft(model_type), K, sampled=False)
    assert run.token_ids == plain_text(model_type, 1.0)
    assert {n for accepted in run.accepted for n in accepted} == {K}


LONGEST_AGREEMENT = 4  # most tokens in a row that these drafts name as their targets do


@pytest.mark.parametrize(
    ("target", "draft", "K", "block_size", "sampled"),
    [
        ("llama", "gpt_oss", 3, 4, True),
        slow("gpt_oss", "llama", 2, 16, False),
        slow("llama4_text", "llama4_text", 7, 1, True),
        *(slow("llama", "llama", K, (4, 1, 16)[K % 3], K % 2 == 0) for K in range(1, 17)),
    ],
)
def test_greedy_text_equals_plain_text_when_some_drafts_are_accepted(
    target: str, draft: str, K: int, block_size: int, sampled: bool
) -> None:
    """A draft of another family, with cache groups that the target lacks."""
    model = family_model(target, f"draft_model:{draft}")
    cfg = model.round_config(K, rule=RULES[K % 3])
    assert len(cfg.cache_groups) == 2 or target == draft
    run = speculated(model, K, block_size, rule=RULES[K % 3], sampled=sampled)
    assert [len(text) for text in run.token_ids] == list(MAX_TOKENS)
    assert run.token_ids == plain_text(target, 0.15)
    seen = {n for accepted in run.accepted for n in accepted}
    assert {0, min(K, LONGEST_AGREEMENT)} <= seen
    assert run.mean_acceptance_length > 1.3


@pytest.mark.parametrize("compilation", ["step", slow("eager")])
def test_modes_of_compilation_give_the_same_text(compilation: str) -> None:
    model = family_model("llama", "draft_model")
    cfg = model.round_config(3, rule="probabilistic", sampled=False)
    prompts, state = random_prompts((3, 5)), sampling_state([0] * 2)
    texts = [
        generate(cfg, model.params, prompts, state, max_tokens=(5, 9), compilation=mode).token_ids
        for mode in ("round", compilation)
    ]
    assert texts[0] == texts[1]


# --- distribution
# --------------------------------------------------------------------------------------------------

VOCAB, K = 5, 3


def small_model(width: int) -> Model:
    """A target over five tokens, and a draft of so many with other layers and another head."""
    model = family_model("gpt_oss", "eagle", window=4, disturbance=1.0, vocab=VOCAB)
    params = dict(model.params["target"])
    params["lm_head"] = Weight(0.5 * params["lm_head"].values)
    draft = draft_model.drafts_for(target_config("llama4_text", width), model.target)
    own = init_random(drafts.family(draft).param_specs(draft), jax.random.key(7), jnp.float32)
    own["lm_head"] = Weight(0.5 * own["lm_head"].values)
    return Model(model.target, draft, {"target": params, "draft": bind_draft_model(draft, own)})


@pytest.mark.parametrize(
    ("rule", "width", "batches"),
    [
        # tests/decode/test_fallback.py has this rule over several rounds.
        slow("probabilistic", 5, 3),
        ("block", 4, 3),
        slow("strict", 4, 12),
        slow("block", 5, 12),
        slow("probabilistic", 4, 12),
    ],
)
def test_text_follows_the_target_jointly_over_rounds(rule: str, width: int, batches: int) -> None:
    """With the target's vocabulary and a narrower one."""
    found, accepted = joint_statistic(small_model(width), K, rule, batches)
    assert accepted == set(range(K + 1))
    assert within_limit(*found), found


@pytest.mark.slow
def test_a_wrong_map_of_a_narrower_vocabulary_biases_the_output() -> None:
    """q is read at the neighbour's id."""
    model = small_model(4)
    shifted = jnp.roll(model.params["draft"]["target_to_draft"], 1)
    draft = {**model.params["draft"], "target_to_draft": shifted}
    model = replace(model, params={**model.params, "draft": draft})
    found, _ = joint_statistic(model, K, "probabilistic", 3)
    assert not within_limit(*found), found


# --- the unread token
# --------------------------------------------------------------------------------------------------


def observed(K: int, tokens: list[list[int]], active: list[bool], unread: list[int]) -> list[int]:
    model = family_model("llama", "draft_model")
    cfg: RoundConfig = model.round_config(K)
    drafter, batch = Independent(), len(tokens)
    state = drafter.init(cfg, batch, (1,), dtype=jnp.float32, cache_dtype=jnp.float32)
    assert state.unread.tolist() == [-1] * batch
    seen = Observation(
        seq_lens=jnp.full(batch, 9, jnp.int32),
        active=jnp.asarray(active),
        output_tokens=jnp.asarray([t + [-1] * (K + 1 - len(t)) for t in tokens], jnp.int32),
        num_sampled=jnp.asarray([len(t) for t in tokens], jnp.int32),
        block_tables=(),
        target=None,  # type: ignore[arg-type]
    )
    state = replace(state, unread=jnp.asarray(unread, jnp.int32))
    return drafter.observe(cfg, {}, state, seen).unread.tolist()


def test_the_last_draft_stays_unread_only_if_all_are_accepted() -> None:
    """An idle request keeps its own."""
    tokens = [[5, 6, 7], [5, 6], [5], []]
    assert observed(2, tokens, [True, True, True, False], [1, 1, 1, 1]) == [6, -1, -1, 1]
    assert observed(1, [[5, 6], [5]], [True, True], [-1, 8]) == [5, -1]


def test_a_config_whose_model_type_is_no_name_is_no_model() -> None:
    names = draft_model.EMBEDDING, draft_model.FIRST_NORM
    assert draft_model.is_model({"model_type": "llama"}, names)
    for odd in (["llama"], {"llama": 1}, 3, None):
        assert not draft_model.is_model({"model_type": odd}, names)
