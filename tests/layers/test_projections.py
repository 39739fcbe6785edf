"""Query, key and value projections in one array are the three of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, AttentionConfig, CacheGroup
from jaxspec.layers.attention import join_projections
from jaxspec.layers.context import Pass
from jaxspec.layers.params import init_random
from tests.support.families import family_model
from tests.support.tiny import generate, random_prompts, sampling_state, tiny_model


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_computes_the_same(bias: bool) -> None:
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8, qkv_bias=bias, o_bias=bias)
    target = replace(tiny_model("eagle").target, attention=attention)
    params = init_random(models.family(target).param_specs(target), jax.random.key(0), jnp.float32)
    joined = join_projections(params)
    np.testing.assert_allclose(hidden(target, joined), hidden(target, params), rtol=1e-5, atol=1e-5)
    names = sorted(joined["layers"][0]["self_attn"])
    assert names == (
        ["o_bias", "o_proj", "qkv_bias", "qkv_proj"] if bias else ["o_proj", "qkv_proj"]
    )
    assert joined["layers"][0]["self_attn"]["qkv_proj"].shape == (32, (4 + 2 * 2) * 8)
    assert sorted(params["layers"][0]["self_attn"])[0] != "qkv_proj", (
        "the weights that were given stay as they are"
    )


def hidden(target: Any, params: Any) -> np.ndarray:
    rows = 6
    zero = jnp.zeros(1, jnp.int32)
    metadata = build_metadata(
        (CacheGroup(8, 8),),
        (zero[None],),
        zero,
        zero + rows,
        rows,
        attention=target.attention,
        ops=REFERENCE_OPS,
    )
    caches = init_cache(target.attention, (1,) * target.num_layers, 8, jnp.dtype(jnp.float32))
    tokens = jnp.arange(rows, dtype=jnp.int32)[None]
    return np.asarray(
        models.family(target)
        .forward(params, target, tokens, Pass(metadata, REFERENCE_OPS), caches)
        .hidden
    )


def test_joining_again_changes_nothing() -> None:
    once = join_projections(tiny_model("eagle3").params)
    assert jax.tree.structure(join_projections(once)) == jax.tree.structure(once)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_rounds_on_joined_projections_give_the_same_text(method: str) -> None:
    """Multi-token prediction: on latent attention, whose first projections are two."""
    model = family_model("glm4_moe_lite", method) if method == "mtp" else tiny_model(method)
    if method == "mtp":
        layer = join_projections(model.params)["draft"]["layers"][0]["self_attn"]
        assert {"q_a_proj", "kv_a_proj", "qkv_a_proj"} & set(layer) == {"qkv_a_proj"}
    cfg, prompts = model.round_config(3, sampled=False), random_prompts((5, 9))
    texts = [
        generate(cfg, params, prompts, sampling_state([0] * 2), max_tokens=(12, 12)).token_ids
        for params in (model.params, join_projections(model.params))
    ]
    assert texts[0] == texts[1]
