"""The Llama decoder: config, parameter table, forward, logits. Qwen2 and Qwen3 are this decoder with other switches.

A target is a pure function over a pytree of weights and a paged cache; layers are unrolled, one dict of arrays each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.cache.arrays import FullCache, KVCache
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import (
    REFERENCE_KERNELS,
    AttentionConfig,
    CacheGroup,
    ConfigError,
    Kernels,
    RopeConfig,
    read_int,
    read_number,
    refuse_unless,
)
from jaxspec.layers.attention import RopeTables, attention_specs, rope_of
from jaxspec.layers.decoder_layer import dense_layer
from jaxspec.layers.params import Params, vector
from jaxspec.layers.products import ResidualStream, mlp_specs
from jaxspec.models.decoder import TargetOutput, decoder_specs, ignored_tensor, logits, run_layers

__all__ = [
    "LlamaConfig",
    "TargetOutput",
    "config_from_hf",
    "decoder_config",
    "decoder_layer",
    "forward",
    "ignored_tensor",
    "layer_specs",
    "logits",
    "param_specs",
]


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

    def cache_groups(self, block_size: int, max_model_len: int) -> CacheGroup:
        """All layers alike."""
        return CacheGroup(block_size, max_model_len)


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """From a checkpoint's config.json. A switch that this decoder does not implement is an error that names it."""
    refuse_unless(config, "pretraining_tp", 1)
    refuse_unless(config, "mlp_bias", False)
    bias = bool(config.get("attention_bias", False))
    return decoder_config(config, qkv_bias=bias, o_bias=bias)


def decoder_config(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
) -> LlamaConfig:
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
    return decoder_specs(cfg, lambda i, prefix: layer_specs(cfg, prefix))


def layer_specs(cfg: LlamaConfig, prefix: str) -> Params:
    """One decoder layer's weights."""
    hidden = cfg.hidden_size
    return {
        "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
        "self_attn": attention_specs(f"{prefix}.self_attn", cfg.attention, hidden, hidden),
        "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        **mlp_specs(f"{prefix}.mlp", hidden, cfg.intermediate_size),
    }


def decoder_layer(
    layer: Params,
    cfg: LlamaConfig,
    x: jax.Array,
    rope: RopeTables,
    metadata: AttentionMetadata,
    cache: FullCache,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    last_row: jax.Array | None = None,
) -> tuple[jax.Array, FullCache]:
    """One layer on x [batch, rows, D]; last_row: see dense_layer."""
    stream, cache = _layer(
        layer, cfg, x, rope, metadata, cache, kernels, next_norm=None, last_row=last_row
    )
    return stream.x, cache


def _layer(
    layer: Params,
    cfg: LlamaConfig,
    x: jax.Array | ResidualStream,
    rope: RopeTables,
    metadata: AttentionMetadata,
    cache: FullCache,
    kernels: Kernels,
    *,
    next_norm: jax.Array | None,
    last_row: jax.Array | None = None,
) -> tuple[ResidualStream, FullCache]:
    """decoder_layer, whose result is prepared for the norm of gain next_norm."""
    options = {
        "norm": layer["input_layernorm"],
        "residual": x,
        "next_norm": next_norm,
        "last_row": last_row,
    }
    return dense_layer(
        layer, cfg.attention, cfg.rms_norm_eps, x, rope, metadata, cache, kernels, **options
    )


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
    """One pass over tokens [batch, rows]; aux_layers: see run_layers."""
    rope = rope_of(cfg.attention, metadata)

    def run_layer(
        i: int, layer: Params, x: jax.Array | ResidualStream, cache: FullCache
    ) -> tuple[ResidualStream, FullCache]:
        next_norm = params["layers"][i + 1]["input_layernorm"] if i + 1 < cfg.num_layers else None
        return _layer(layer, cfg, x, rope, metadata, cache, kernels, next_norm=next_norm)

    first_norm = params["layers"][0]["input_layernorm"]
    return run_layers(
        params,
        cfg,
        tokens,
        caches,
        run_layer,
        aux_layers=aux_layers,
        kernels=kernels,
        first_norm=first_norm,
    )
