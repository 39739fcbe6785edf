"""Families with experts, windows or latent caches against transformers, as test_targets does for
the Llama-like ones: logits and hidden states of every position, in chunks, row by row, and with
rejected rows, across window and block boundaries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import REFERENCE_OPS
from jaxspec.layers import moe
from jaxspec.layers.params import Params
from jaxspec.loading.model import load_target
from tests.parity.oracles import TOLERANCE, edit_config, hf_outputs, hf_target
from tests.parity.ours import PagedTarget, by_position
from tests.parity.test_targets import AUX, run_all, sequences

pytestmark = pytest.mark.oracle("transformers")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 150.0,
    "factor": 8.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
GPT_OSS = dict(
    model_type="gpt_oss",
    num_local_experts=8,
    num_experts_per_tok=2,
    sliding_window=6,  # shorter than the prompts, and no multiple of a block
    swiglu_limit=1.0,  # so that both clamps are felt
    rope_parameters=YARN,
)
MLA = dict(
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    head_dim=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=20,
)
GLM = dict(model_type="glm4_moe_lite", **MLA)
DEEPSEEK = dict(model_type="deepseek_v3", **MLA, n_group=4, topk_group=2, first_k_dense_replace=1)
DEEPSEEK_YARN = dict(
    rope_type="yarn",
    rope_theta=150.0,
    factor=8.0,
    original_max_position_embeddings=16,
    mscale=1.0,
    mscale_all_dim=0.8,
)
LLAMA4 = dict(
    model_type="llama4_text",
    num_local_experts=8,
    intermediate_size_mlp=64,
    attention_chunk_size=6,  # shorter than the prompts, and no multiple of a block
    no_rope_layers=[1, 0],
    floor_scale=4,  # so that queries without rope are scaled
    attn_scale=0.5,
)
QWEN3_MOE = dict(
    model_type="qwen3_moe",
    num_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    norm_topk_prob=True,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_every_second_layer": {
        **QWEN3_MOE,
        "decoder_sparse_step": 2,
        "norm_topk_prob": False,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "rope_parameters": YARN,
    },
    "qwen3_moe_dense_last_layer": {**QWEN3_MOE, "mlp_only_layers": [1], "head_dim": 12},
    "llama4": LLAMA4,
    "llama4_two_experts": {
        **LLAMA4,
        "num_experts_per_tok": 2,
        "moe_layers": [1],
        "use_qk_norm": False,
        "layer_types": ["full_attention", "chunked_attention"],
    },
    "glm": GLM,
    "glm_no_query_latent": {
        **GLM,
        "q_lora_rank": None,
        "rope_interleave": False,
        "n_shared_experts": 2,
    },
    "deepseek": DEEPSEEK,
    "deepseek_yarn_bias": {
        **DEEPSEEK,
        "rope_parameters": DEEPSEEK_YARN,
        "attention_bias": True,
        "norm_topk_prob": False,
    },
    "gpt_oss": GPT_OSS,
    "gpt_oss_truncated_yarn": {
        **GPT_OSS,
        "rope_parameters": {**YARN, "truncate": True},
        "sliding_window": 1,
    },
    "gpt_oss_no_bias": {
        **GPT_OSS,
        "attention_bias": False,
        "layer_types": ["full_attention", "sliding_attention"],
    },
}


@pytest.mark.parametrize(
    ("case", "block_size"), [*((case, 4) for case in FAMILIES), ("gpt_oss", 16)]
)
def test_targets_equal_transformers_however_their_rows_arrive(
    case: str, block_size: int, tmp_path: Path
) -> None:
    model = hf_target(tmp_path, **FAMILIES[case])
    cfg, params = load_target(tmp_path, jnp.float32)
    tokens = sequences(cfg.vocab_size)
    target = run_all(cfg, params, tokens, block_size)
    for i, sequence in enumerate(tokens):
        expected = hf_outputs(model, np.array(sequence))
        np.testing.assert_allclose(by_position(target.logits[i]), expected.logits, **TOLERANCE)
        np.testing.assert_allclose(by_position(target.hidden[i]), expected.hidden, **TOLERANCE)
        aux = np.split(by_position(target.aux[i]), len(AUX), axis=-1)
        for layer, ours in zip(AUX, aux, strict=True):
            np.testing.assert_allclose(
                ours, expected.boundary[layer], **TOLERANCE, err_msg=f"boundary {layer}"
            )


Change = Callable[[Any, Params], tuple[Any, Params]]


Original = tuple[Any, Params, list[int], np.ndarray]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Original]:
    """Config and weights of a case, made once, with a prompt and transformers' logits of it."""

    @cache
    def make(case: str) -> Original:
        folder = tmp_path_factory.mktemp(case)
        model = hf_target(folder, **FAMILIES[case])
        cfg, params = load_target(folder, jnp.float32)
        tokens = sequences(cfg.vocab_size)[2]
        return cfg, params, tokens, hf_outputs(model, np.array(tokens)).logits

    return make


def error_of(original: Original, change: Change) -> float:
    """The largest difference of a prompt's logits, with a mistake made on purpose."""
    cfg, params, tokens, expected = original
    cfg, params = change(cfg, params)
    target = PagedTarget(cfg, params, 1, block_size=4)
    target.prefill([tokens], chunk=len(tokens))
    return float(np.abs(by_position(target.logits[0]) - expected).max())


def _layers(**changes: Callable[[Any], Any]) -> Change:
    """Another value for some weights of every layer that has them, by their path
    ("experts.down")."""

    def edit(layer: Params, path: list[str], change: Callable[[Any], Any]) -> Params:
        if path[0] not in layer:
            return layer
        here = layer[path[0]]
        value = jax.tree.map(change, here) if len(path) == 1 else edit(here, path[1:], change)
        return {**layer, path[0]: value}

    def apply(cfg: Any, params: Params) -> tuple[Any, Params]:
        layers = params["layers"]
        for path, change in changes.items():
            layers = [edit(layer, path.split("__"), change) for layer in layers]
        return cfg, {**params, "layers": layers}

    return apply


def _moe(**changes: Any) -> Change:
    return lambda cfg, params: (replace(cfg, moe=replace(cfg.moe, **changes)), params)


def _rope(**changes: Any) -> Change:
    return lambda cfg, params: (
        replace(cfg, attention=replace(cfg.attention, rope=replace(cfg.attention.rope, **changes))),
        params,
    )


def _config(**changes: Any) -> Change:
    return lambda cfg, params: (replace(cfg, **changes), params)


def _swapped_halves(weight: jax.Array) -> jax.Array:
    return jnp.roll(weight, weight.shape[-1] // 2, axis=-1)


def _rolled_key_latents(cfg: Any, params: Params) -> tuple[Any, Params]:
    width = cfg.attention.kv_lora_rank + cfg.attention.rope_head_dim

    def roll(w: jax.Array) -> jax.Array:
        return w.at[:, -width:].set(jnp.roll(w[:, -width:], 4, axis=1))

    return _layers(self_attn__latents_proj=roll)(cfg, params)


MISTAKES: dict[str, tuple[str, Change]] = {
    "softmax_not_normalised": ("qwen3_moe", _moe(norm_top_k=False)),
    "softmax_normalised": ("qwen3_moe_every_second_layer", _moe(norm_top_k=True)),
    "one_softmax_expert_fewer": ("qwen3_moe", _moe(top_k=2)),
    "no_norm_of_heads": (
        "qwen3_moe",
        lambda cfg, params: (replace(cfg, attention=replace(cfg.attention, qk_norm=False)), params),
    ),
    "yarn_off_beside_experts": ("qwen3_moe_every_second_layer", _rope(rope_type="default")),
    "sinks_dropped": ("gpt_oss", _layers(self_attn__sinks=lambda s: jnp.full_like(s, -1e9))),
    "window_one_longer": ("gpt_oss", _config(sliding_window=7)),
    "kinds_of_layer_swapped": (
        "gpt_oss",
        _config(layer_types=("full_attention", "sliding_attention")),
    ),
    "plain_swiglu": ("gpt_oss", _moe(gate="silu")),
    "clamp_off": ("gpt_oss", _moe(limit=100.0)),
    "gate_and_up_swapped": ("gpt_oss", _layers(experts__gate_up=_swapped_halves)),
    "router_bias_dropped": ("gpt_oss", _layers(router_bias=jnp.zeros_like)),
    "one_expert_fewer": ("gpt_oss", _moe(top_k=1)),
    "expert_bias_dropped": ("gpt_oss", _layers(experts__down_bias=jnp.zeros_like)),
    "experts_transposed": (
        "gpt_oss",
        _layers(experts__down=lambda w: jnp.swapaxes(w, 1, 2).reshape(w.shape)),
    ),
    "yarn_temperature_dropped": ("gpt_oss", _rope(attention_factor=1.0)),
    "yarn_truncated": ("gpt_oss", _rope(truncate=True)),
    "yarn_off": ("gpt_oss", _rope(rope_type="default")),
    "chunk_one_longer": ("llama4", _config(chunk_size=7)),
    "rope_everywhere": ("llama4", _config(rope_layers=(True, True))),
    "temperature_tuning_off": ("llama4", _config(attn_scale=0.0)),
    "no_norm_of_queries": (
        "llama4",
        lambda cfg, params: (replace(cfg, attention=replace(cfg.attention, qk_norm=False)), params),
    ),
    "router_bias_not_in_the_choice": ("glm", _layers(router_bias=jnp.zeros_like)),
    "routed_scaling_dropped": ("glm", _moe(routed_scaling=1.0)),
    "weights_not_normalised": ("glm", _moe(norm_top_k=False)),
    "shared_expert_dropped": ("glm", _layers(shared__down_proj=jnp.zeros_like)),
    "groups_ignored": ("deepseek", _moe(num_groups=1)),
    "one_group_more": ("deepseek", _moe(top_groups=3)),
    "softmax_temperature_dropped": ("deepseek_yarn_bias", _rope(softmax_factor=1.0)),
    "latent_bias_dropped": ("deepseek_yarn_bias", _layers(self_attn__latents_bias=jnp.zeros_like)),
    "rope_on_another_part": ("glm", _rolled_key_latents),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_a_mistake(mistake: str, original: Callable[[str], Original]) -> None:
    case, change = MISTAKES[mistake]
    assert error_of(original(case), change) > 10 * TOLERANCE["atol"]


def test_rotated_pairs_read_as_halves_are_seen(
    tmp_path: Path, original: Callable[[str], Original]
) -> None:
    hf_target(tmp_path, **GLM)  # the same weights again

    def reread(cfg: Any, params: Params) -> tuple[Any, Params]:
        return load_target(
            edit_config(tmp_path, lambda config: config.update(rope_interleave=False)), jnp.float32
        )

    assert error_of(original("glm"), reread) > 10 * TOLERANCE["atol"]


def test_a_router_bias_in_the_weights_is_seen(
    original: Callable[[str], Original], monkeypatch: pytest.MonkeyPatch
) -> None:
    def biased(
        x: jax.Array, router: jax.Array, bias: jax.Array, cfg: Any, *_: Any
    ) -> tuple[jax.Array, jax.Array]:
        logits = moe.router_logits(x, router, REFERENCE_OPS)
        chosen, ids = jax.lax.top_k(jax.nn.sigmoid(logits) + bias, cfg.top_k)
        return ids, chosen / chosen.sum(-1, keepdims=True) * cfg.routed_scaling

    monkeypatch.setattr(moe, "route", biased)
    another_program = _config(max_position_embeddings=999)
    assert error_of(original("glm"), another_program) > 10 * TOLERANCE["atol"]
