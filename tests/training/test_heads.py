"""A head for any target that training takes is saved, and loads as it was."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.config import AttentionConfig, ConfigError, RopeConfig
from jaxspec.drafts.families import BLOCKS
from jaxspec.layers.params import init_random
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.checkpoint import Verifier, save_draft
from jaxspec.training.dry_run import CHAT, HashedWords
from jaxspec.training.heads import HeadConfig, load_head, new_head
from jaxspec.training.methods import METHODS
from tests.support.families import target_config

DRAFT_VOCAB = 24
VERIFIER = Verifier("tiny", (), 4096)
ROPES = {
    "llama": RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192),
    "qwen3": RopeConfig(
        1e6, "yarn", 4.0, original_max_position_embeddings=32768, attention_factor=1.2
    ),
}
TARGETS = sorted(
    name for name in models.FAMILIES if isinstance(target_config(name).attention, AttentionConfig)
)


@cache
def tiny_target(model_type: str) -> ChatTarget:
    cfg: Any = target_config(model_type)
    rope = ROPES.get(model_type, cfg.attention.rope)
    cfg = dataclasses.replace(cfg, attention=dataclasses.replace(cfg.attention, rope=rope))
    specs = models.family(cfg).param_specs(cfg)
    params = init_random(specs, jax.random.key(0), jnp.dtype(jnp.float32))
    return ChatTarget("tiny", cfg, params, CHAT, HashedWords(cfg.vocab_size), ())


def new(model_type: str, method: str) -> tuple[ChatTarget, Any, Any, np.ndarray]:
    target = tiny_target(model_type)
    cfg = HeadConfig(
        method, draft_vocab_size=DRAFT_VOCAB, aux_layers=(0, 1, 2), num_layers=1, markov_rank=4
    )
    counts = np.random.default_rng(0).integers(1, 99, target.cfg.vocab_size)
    return target, *new_head(cfg, target, counts)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("model_type", TARGETS)
def test_a_new_head_is_saved_and_loads_as_it_was(
    model_type: str, method: str, tmp_path: Path
) -> None:
    target, draft, params, ids = new(model_type, method)
    save_draft(tmp_path, draft, params, ids, VERIFIER)
    loaded, found = load_head(tmp_path, method, target, jnp.dtype(jnp.float32))
    assert loaded == draft
    expected = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), params)
    jax.tree.map(np.testing.assert_array_equal, {name: found[name] for name in expected}, expected)


@pytest.mark.parametrize("method", sorted(BLOCKS))
def test_a_block_head_may_have_kv_heads_of_its_own(method: str, tmp_path: Path) -> None:
    target = tiny_target("llama")
    attention: Any = target.cfg.attention
    heads = attention.num_heads
    assert heads != attention.num_kv_heads
    counts = np.ones(target.cfg.vocab_size, np.int64)
    cfg = HeadConfig(method, draft_vocab_size=DRAFT_VOCAB, aux_layers=(0,), num_kv_heads=heads)
    draft, params, ids = new_head(cfg, target, counts)
    save_draft(tmp_path, draft, params, ids, VERIFIER)
    loaded, _ = load_head(tmp_path, method, target, jnp.dtype(jnp.float32))
    assert loaded == draft and draft.attention.num_kv_heads == heads
    for wrong in (0, heads - 1, 2 * heads):
        with pytest.raises(ConfigError, match=f"^num_kv_heads: expected a divisor .* got {wrong}$"):
            new_head(dataclasses.replace(cfg, num_kv_heads=wrong), target, counts)


def test_the_targets_cover_sinks_pairs_and_each_kind_of_rotation() -> None:
    found: list[Any] = [tiny_target(name).cfg.attention for name in TARGETS]
    assert any(a.sinks for a in found) and any(a.rope_interleave for a in found)
    assert {a.rope.rope_type for a in found} == {"default", "llama3", "yarn"}


def test_a_tensor_that_saving_cannot_undo_is_refused(tmp_path: Path) -> None:
    _, draft, params, ids = new("llama", "eagle")
    pairs = dataclasses.replace(draft.attention, rope_interleave=True)
    draft = dataclasses.replace(draft, attention=pairs)
    with pytest.raises(ConfigError, match=r"q_proj\.weight: expected a tensor of a head's own"):
        save_draft(tmp_path / "head", draft, params, ids, VERIFIER)
    assert not (tmp_path / "head").exists()
