"""A tiny target and a tiny EAGLE-3 head, random."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.config import AttentionConfig, RopeConfig
from jaxspec.drafts import eagle3
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.layers.params import Params, init_random
from jaxspec.loading.binding import bind_draft

VOCAB, DRAFT_VOCAB = 96, 40
TARGET_ATTENTION = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, rope=RopeConfig(1e4))
# Not the target's head count or rope, so that a mix-up of the two shows.
DRAFT_ATTENTION = AttentionConfig(num_heads=8, num_kv_heads=2, head_dim=16, rope=RopeConfig(3e4))


class Pair(NamedTuple):
    target_cfg: models.TargetConfig
    target: Params
    draft_cfg: Eagle3Config
    draft: Params  # the draft's own weights, as they are trained
    bound: Params  # with the target's embedding and the vocabulary maps, as propose reads them
    draft_ids: np.ndarray


def make_pair(seed: int = 0, **changes: object) -> Pair:
    target_cfg = models.llama.LlamaConfig(
        "llama", VOCAB, 32, 48, 5, TARGET_ATTENTION, 1e-5, 256, tie_word_embeddings=True
    )
    draft_cfg = Eagle3Config(
        target_hidden_size=32,
        hidden_size=32,
        intermediate_size=40,
        num_layers=1,
        attention=DRAFT_ATTENTION,
        rms_norm_eps=1e-5,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        aux_layers=(1, 2, 4),
    )
    draft_cfg = dataclasses.replace(draft_cfg, **changes)
    keys = jax.random.split(jax.random.key(seed), 2)
    target = init_random(
        models.family(target_cfg).param_specs(target_cfg), keys[0], jnp.dtype(jnp.float32)
    )
    draft = init_random(eagle3.param_specs(draft_cfg), keys[1], jnp.dtype(jnp.float32))
    draft_ids = np.sort(
        np.random.default_rng(seed).permutation(VOCAB)[: draft_cfg.draft_vocab_size]
    )
    return Pair(
        target_cfg,
        target,
        draft_cfg,
        draft,
        bind_draft(draft_cfg, draft, target, draft_ids),
        draft_ids,
    )


@pytest.fixture(scope="session")
def pair() -> Pair:
    return make_pair()
