"""The Llama decoder: config, parameter table, forward, logits. Qwen2 and Qwen3 are this decoder with other switches.

A target is a pure function over a pytree of weights and a paged cache; layers are unrolled, one dict of arrays each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.attention import attention_specs, self_attention
from jaxspec.config import REFERENCE_KERNELS, AttentionConfig, ConfigError, Kernels, RopeConfig, read_int, read_number, refuse_unless
from jaxspec.kv_cache import KVCache
from jaxspec.layers import mlp_block, mlp_specs, rms_norm, rope_tables, vocab_logits
from jaxspec.metadata import AttentionMetadata
from jaxspec.params import Params, ParamSpec, matrix, vector


@dataclass(frozen=True)
class LlamaConfig:
    """Static shape of the decoder. Everything that changes the maths is here; nothing else is."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionConfig
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool


@dataclass(frozen=True)
class TargetOutput:
    """hidden [batch, rows, embed] after the final norm; aux [batch, rows, len(aux_layers) * embed] or None; the caches."""

    hidden: jax.Array
    aux: jax.Array | None
    caches: KVCache


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """From a checkpoint's config.json. A switch that this decoder does not implement is an error that names it."""
    refuse_unless(config, "pretraining_tp", 1)
    refuse_unless(config, "mlp_bias", False)
    bias = bool(config.get("attention_bias", False))
    return decoder_config(config, qkv_bias=bias, o_bias=bias)


def decoder_config(config: Mapping[str, Any], *, qkv_bias: bool = False, o_bias: bool = False, qk_norm: bool = False) -> LlamaConfig:
    """The keys that the Llama-like families share, with each family's switches."""
    refuse_unless(config, "hidden_act", "silu")
    refuse_unless(config, "quantization_config", None)
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ConfigError(
            f"layer_types: expected full_attention in every layer of model_type {config['model_type']!r}, got {config['layer_types']}"
        )
    num_heads = read_int(config, "num_attention_heads")
    hidden_size = read_int(config, "hidden_size")
    eps = read_number(config, "rms_norm_eps", 1e-6)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=read_int(config, "num_key_value_heads", num_heads),
        head_dim=read_int(config, "head_dim", hidden_size // num_heads),
        rope=RopeConfig.from_hf(config),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        rms_norm_eps=eps,
    )
    return LlamaConfig(
        model_type=config["model_type"],
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=read_int(config, "intermediate_size"),
        num_layers=read_int(config, "num_hidden_layers"),
        attention=attention,
        rms_norm_eps=eps,
        max_position_embeddings=read_int(config, "max_position_embeddings", 2048),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def param_specs(cfg: LlamaConfig) -> Params:
    """The weights: a ParamSpec per array, in the structure of the params."""
    specs: dict[str, Any] = {
        "embed_tokens": ParamSpec("model.embed_tokens.weight", (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed")),
        "layers": [layer_specs(f"model.layers.{i}", cfg) for i in range(cfg.num_layers)],
        "norm": vector("model.norm.weight", cfg.hidden_size),
    }
    if not cfg.tie_word_embeddings:
        specs["lm_head"] = matrix("lm_head.weight", cfg.hidden_size, cfg.vocab_size, ("embed", "vocab"))
    return specs


def layer_specs(prefix: str, cfg: LlamaConfig) -> Params:
    """One decoder layer's weights."""
    hidden = cfg.hidden_size
    return {
        "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
        "self_attn": attention_specs(f"{prefix}.self_attn", cfg.attention, hidden, hidden),
        "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        **mlp_specs(f"{prefix}.mlp", hidden, cfg.intermediate_size),
    }


def ignored_tensor(cfg: LlamaConfig, name: str) -> bool:
    """Tensors that a checkpoint may hold and the decoder does not need: derived tables, a tied head saved twice."""
    return name.endswith("rotary_emb.inv_freq") or (cfg.tie_word_embeddings and name == "lm_head.weight")


def forward(
    params: Params,
    cfg: LlamaConfig,
    tokens: jax.Array,
    metadata: AttentionMetadata,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
    kernels: Kernels = REFERENCE_KERNELS,
) -> TargetOutput:
    """One pass over tokens [batch, rows]. aux_layers are boundary ids: n is the residual stream that enters layer n
    (vLLM's and speculators' convention; n = num_layers is the stream before the final norm)."""
    x = params["embed_tokens"][tokens]
    rope = rope_tables(cfg.attention.rope, cfg.attention.head_dim, metadata.positions)
    aux: dict[int, jax.Array] = {}
    new_caches = []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        if i in aux_layers:
            aux[i] = x
        with jax.named_scope(f"layer_{i}"):
            x, cache = self_attention(
                layer["self_attn"], cfg.attention, x, rope, metadata, cache, kernels, norm=layer["input_layernorm"], residual=x
            )
            x = mlp_block(layer, cfg.rms_norm_eps, x, kernels)
        new_caches.append(cache)
    aux[cfg.num_layers] = x
    hidden = rms_norm(x, params["norm"], cfg.rms_norm_eps, kernels)
    picked = jnp.concatenate([aux[i] for i in aux_layers], axis=-1) if aux_layers else None
    return TargetOutput(hidden, picked, tuple(new_caches))


def logits(params: Params, cfg: LlamaConfig, hidden: jax.Array, kernels: Kernels = REFERENCE_KERNELS) -> jax.Array:
    """Float32 logits [..., vocab] of hidden [..., embed]."""
    tied = cfg.tie_word_embeddings
    return vocab_logits(hidden, params["embed_tokens" if tied else "lm_head"], kernels, tied=tied)
