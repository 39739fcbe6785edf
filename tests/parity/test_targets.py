"""Targets against transformers: logits and hidden states of every position, through the paged
cache, in every way rows arrive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import AttentionConfig
from jaxspec.layers.params import Params, Weight
from jaxspec.loading.model import load_target
from jaxspec.models import TargetConfig
from tests.parity.oracles import TARGETS, TOLERANCE, edit_config, hf_outputs, hf_target
from tests.parity.ours import PagedTarget, by_position

pytestmark = pytest.mark.oracle("transformers")

AUX = (0, 1, 2)  # the embedding, the middle, and n: the residual stream before the final norm
PROMPTS, K = (1, 9, 18), 3


def sequences(vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of PROMPTS tokens and nine more each."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab, n + 9).tolist() for n in PROMPTS]


def run_all(
    cfg: TargetConfig, params: Params, tokens: list[list[int]], block_size: int
) -> PagedTarget:
    """Prompts in chunks, three steps of one row, then K+1 rows whose last two are rejected and
    overwritten by the next K+1."""
    target = PagedTarget(cfg, params, len(tokens), block_size, AUX)
    target.prefill([t[:n] for t, n in zip(tokens, PROMPTS, strict=True)], chunk=K + 1)
    for step in range(3):
        at = [n + step for n in PROMPTS]
        target.feed(1, at, [t[p : p + 1] for t, p in zip(tokens, at, strict=True)])
    at = [n + 3 for n in PROMPTS]
    rejected = [[*t[p : p + 2], 5, 6] for t, p in zip(tokens, at, strict=True)]
    target.feed(K + 1, at, rejected)
    at = [n + 5 for n in PROMPTS]
    target.feed(K + 1, at, [t[p : p + 4] for t, p in zip(tokens, at, strict=True)])
    return target


@pytest.mark.parametrize(
    ("case", "block_size"),
    [*((case, 4) for case in TARGETS), ("llama", 1), ("llama", 16), ("qwen3", 16)],
)
def test_logits_and_hidden_states_equal_transformers(
    case: str, block_size: int, tmp_path: Path
) -> None:
    model = hf_target(tmp_path, **TARGETS[case])
    cfg, params = load_target(tmp_path, jnp.float32)
    tokens = sequences(cfg.vocab_size)
    target = run_all(cfg, params, tokens, block_size)
    for i, t in enumerate(tokens):
        expected = hf_outputs(model, np.array(t))
        np.testing.assert_allclose(by_position(target.logits[i]), expected.logits, **TOLERANCE)
        np.testing.assert_allclose(by_position(target.hidden[i]), expected.hidden, **TOLERANCE)
        aux = np.split(by_position(target.aux[i]), len(AUX), axis=-1)
        for layer, ours in zip(AUX, aux, strict=True):
            np.testing.assert_allclose(
                ours, expected.boundary[layer], **TOLERANCE, err_msg=f"boundary {layer}"
            )


def _attention(**changes: Any) -> Callable[[TargetConfig, Params], tuple[TargetConfig, Params]]:
    return lambda cfg, params: (replace(cfg, attention=replace(cfg.attention, **changes)), params)


def _rope(**changes: Any) -> Callable[[Any, Params], tuple[TargetConfig, Params]]:
    return lambda cfg, params: _attention(rope=replace(cfg.attention.rope, **changes))(cfg, params)


def _without(name: str) -> Callable[[TargetConfig, Params], tuple[TargetConfig, Params]]:
    def change(cfg: TargetConfig, params: Params) -> tuple[TargetConfig, Params]:
        def zero(layer):
            return layer["self_attn"] | {name: jnp.zeros_like(layer["self_attn"][name])}

        return cfg, {
            **params,
            "layers": [{**layer, "self_attn": zero(layer)} for layer in params["layers"]],
        }

    return change


def _without_bias(*parts: int) -> Callable[[TargetConfig, Params], tuple[TargetConfig, Params]]:
    def change(cfg: Any, params: Params) -> tuple[TargetConfig, Params]:
        heads = cfg.attention.num_heads, cfg.attention.num_kv_heads, cfg.attention.num_kv_heads
        kept = np.concatenate(
            [np.full(n * cfg.attention.head_dim, i not in parts) for i, n in enumerate(heads)]
        )

        def zero(layer):
            return layer["self_attn"] | {
                "qkv_bias": jnp.where(kept, layer["self_attn"]["qkv_bias"], 0.0)
            }

        return cfg, {
            **params,
            "layers": [{**layer, "self_attn": zero(layer)} for layer in params["layers"]],
        }

    return change


def _interleaved(cfg: Any, params: Params) -> tuple[TargetConfig, Params]:
    """q and k with rotated pairs side by side instead of half a head apart: a GGUF file's rows,
    read as they are."""
    order = np.arange(cfg.attention.head_dim).reshape(2, -1).T.reshape(-1)

    rotated = cfg.attention.num_heads + cfg.attention.num_kv_heads

    def mix(layer):
        weight = layer["qkv_proj"].values
        heads = weight.reshape(weight.shape[0], -1, cfg.attention.head_dim)
        heads = heads.at[:, :rotated].set(heads[:, :rotated, order])
        return {**layer, "qkv_proj": Weight(heads.reshape(weight.shape))}

    return cfg, {
        **params,
        "layers": [{**layer, "self_attn": mix(layer["self_attn"])} for layer in params["layers"]],
    }


def _swapped_norms(cfg: TargetConfig, params: Params) -> tuple[TargetConfig, Params]:
    swap = lambda layer: {**layer, "input_layernorm": layer["post_attention_layernorm"]}  # noqa: E731
    return cfg, {**params, "layers": [swap(layer) for layer in params["layers"]]}


MISTAKES = {
    "no_qk_norm": ("qwen3", _attention(qk_norm=False)),
    "no_qkv_bias": ("qwen2", _without_bias(0, 1, 2)),
    "no_k_bias_alone": ("qwen2", _without_bias(1)),
    "no_o_bias": ("llama_attention_bias", _without("o_bias")),
    "llama3_scaling_off": ("llama_llama3_rope", _rope(rope_type="default")),
    "llama3_high_frequency_factor": ("llama_llama3_rope", _rope(high_freq_factor=2.0)),
    "default_rope_theta": ("qwen3", _rope(theta=10000.0)),
    "interleaved_rope": ("llama", _interleaved),
    "norm_epsilon": ("llama", lambda cfg, params: (replace(cfg, rms_norm_eps=1e-6), params)),
    "qk_norm_epsilon": ("qwen3", _attention(rms_norm_eps=1e-6)),
    "swapped_norms": ("llama", _swapped_norms),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_comparison_sees_a_mistake(mistake: str, tmp_path: Path) -> None:
    case, change = MISTAKES[mistake]
    model = hf_target(tmp_path, **TARGETS[case])
    cfg, params = change(*load_target(tmp_path, jnp.float32))
    tokens = sequences(cfg.vocab_size)[2]
    target = PagedTarget(cfg, params, 1, block_size=4)
    target.prefill([tokens], chunk=len(tokens))
    error = np.abs(by_position(target.logits[0]) - hf_outputs(model, np.array(tokens)).logits).max()
    assert error > 10 * TOLERANCE["atol"]


@pytest.mark.parametrize("case", ["llama", "llama_llama3_rope", "qwen3"])
def test_older_config_files_mean_the_same(case: str, tmp_path: Path) -> None:
    """rope_theta and rope_scaling at the top level (transformers 4), or rope_parameters
    (transformers 5)."""
    hf_target(tmp_path, **TARGETS[case])
    new, _ = load_target(tmp_path, jnp.float32)
    assert isinstance(new.attention, AttentionConfig)
    assert (
        new.attention.rope.theta
        == {"llama": 10000.0, "llama_llama3_rope": 500.0, "qwen3": 1e6}[case]
    )
    assert new.attention.rope.rope_type == ("llama3" if "llama3" in case else "default")

    def to_old(config: dict[str, Any], kind: str = "rope_type") -> None:
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        name = rope.pop("rope_type")
        config["rope_scaling"] = None if name == "default" else {kind: name, **rope}

    edit_config(tmp_path, to_old)
    assert load_target(tmp_path, jnp.float32)[0] == new

    def rename(config: dict[str, Any]) -> None:  # older still
        if config["rope_scaling"]:
            config["rope_scaling"]["type"] = config["rope_scaling"].pop("rope_type")

    edit_config(tmp_path, rename)
    assert load_target(tmp_path, jnp.float32)[0] == new
