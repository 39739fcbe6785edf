"""The Llama decoder: config, parameter table, forward, logits.

Qwen2 and Qwen3 are this decoder with other switches. A target is a pure function over a pytree of
weights and a paged cache. Layers are unrolled, one dict of arrays each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import jax

from jaxspec.cache.arrays import FullCache, KVCache
from jaxspec.config import (
    AttentionConfig,
    CacheGroup,
    ConfigError,
    RopeConfig,
    read_bool,
    read_int,
    read_number,
    refuse_unless,
)
from jaxspec.config.quantization import Quantization, read_quantization
from jaxspec.layers.attention import attention_specs, qkv_weights
from jaxspec.layers.context import Pass
from jaxspec.layers.decoder_layer import dense_layer
from jaxspec.layers.mlp import mlp_specs
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Params, vector
from jaxspec.layers.products import ResidualStream, Stream
from jaxspec.layers.quantized import stored
from jaxspec.layers.sums import norm_of_sum
from jaxspec.models.decoder import (
    TargetOutput,
    decoder_specs,
    final_norm,
    ignored_tensor,
    logits,
    run_layers,
)
from jaxspec.parallel.axes import Axes

__all__ = [
    "LlamaConfig",
    "TargetOutput",
    "attention_block_specs",
    "config_from_hf",
    "decoder_config",
    "decoder_layer",
    "forward",
    "forward_with",
    "ignored_tensor",
    "layer_specs",
    "logits",
    "param_specs",
    "target_layer",
]


@dataclass(frozen=True)
class LlamaConfig:
    """Static shape of the decoder: everything that changes the maths, and nothing else.

    quantization: which matrices are stored as codes; None for plain weights
    """

    AXES: ClassVar[Axes] = {"intermediate_size": "mlp"}

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionConfig
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    quantization: Quantization | None = field(default=None, kw_only=True)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups for each layer."""
        return (0,) * self.num_layers

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return one group: all layers have full attention."""
        return (CacheGroup(block_size, max_model_len),)


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """Read a checkpoint's config.json; ConfigError names a switch that is not implemented."""
    refuse_unless(config, "pretraining_tp", 1)
    refuse_unless(config, "mlp_bias", False)
    bias = read_bool(config, "attention_bias", False)
    return decoder_config(config, qkv_bias=bias, o_bias=bias)


def decoder_config(
    config: Mapping[str, Any],
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: bool = False,
) -> LlamaConfig:
    """Read the keys that the Llama-like families share, with each family's switches."""
    refuse_unless(config, "hidden_act", "silu")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ConfigError(
            "layer_types: expected full_attention in every layer of model_type "
            f"{config['model_type']!r}, got {config['layer_types']}"
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
        tie_word_embeddings=read_bool(config, "tie_word_embeddings", False),
        quantization=read_quantization(config),
    )


def param_specs(cfg: LlamaConfig) -> Params:
    """Return the weights: a ParamSpec per array, in the structure of the params."""
    specs = decoder_specs(cfg, lambda i, prefix: layer_specs(cfg, prefix))
    return stored(specs, cfg.quantization, num_kv_heads=cfg.attention.num_kv_heads)


def layer_specs(cfg: LlamaConfig, prefix: str) -> Params:
    """Return one decoder layer's weights."""
    mlp = mlp_specs(f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size)
    return {**attention_block_specs(cfg, prefix), **mlp}


def attention_block_specs(cfg: LlamaConfig, prefix: str) -> Params:
    """Return one decoder layer's weights but for those of its MLP: both norms and attention."""
    hidden = cfg.hidden_size
    return {
        "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
        "self_attn": attention_specs(f"{prefix}.self_attn", cfg.attention, hidden, hidden),
        "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
    }


def decoder_layer(
    layer: Params, cfg: LlamaConfig, x: jax.Array, cache: FullCache, pass_: Pass
) -> tuple[jax.Array, FullCache]:
    """Run one layer by itself on x [batch, rows, D]: the decoder layer of a draft."""
    stream, cache = target_layer(layer, cfg, x, cache, pass_, next_norm=None)
    return stream.x, cache


def target_layer(
    layer: Params,
    cfg: LlamaConfig,
    x: Stream,
    cache: FullCache,
    pass_: Pass,
    *,
    next_norm: Norm | None,
) -> tuple[ResidualStream, FullCache]:
    """Run one of the target's layers; see RunLayer."""
    norm = Norm(layer["input_layernorm"], cfg.attention.rms_norm_eps)
    return dense_layer(
        layer,
        cfg.attention,
        cfg.rms_norm_eps,
        x,
        cache,
        pass_,
        norm=norm,
        residual=x,
        next_norm=next_norm,
    )


class RunLayer(Protocol):
    """A function that runs one of the target's layers."""

    def __call__(
        self,
        layer: Params,
        cfg: Any,
        x: Stream,
        cache: FullCache,
        pass_: Pass,
        *,
        next_norm: Norm | None,
    ) -> tuple[ResidualStream, FullCache]:
        """Return the stream after the layer, and the cache with these rows written.

        cfg:       the family's own config
        next_norm: the norm that follows; None where the layer does not make it
        """
        ...


def forward(
    params: Params,
    cfg: LlamaConfig,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the model over tokens [batch, rows]; aux_layers: see run_layers."""
    return forward_with(target_layer, params, cfg, tokens, pass_, caches, aux_layers=aux_layers)


def forward_with(
    run_layer: RunLayer,
    params: Params,
    cfg: LlamaConfig,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...],
) -> TargetOutput:
    """Run a model of these layers, all in one cache group, over tokens [batch, rows]."""
    pass_ = pass_.with_rope(cfg.attention)

    def run(i: int, layer: Params, x: Stream, cache: FullCache) -> tuple[ResidualStream, FullCache]:
        next_norm = norm_of_sum(final_norm(params, cfg), pass_.ops)
        if i + 1 < cfg.num_layers:
            following = params["layers"][i + 1]
            weights = qkv_weights(following["self_attn"])
            next_norm = Norm(following["input_layernorm"], cfg.attention.rms_norm_eps, weights)
        return run_layer(layer, cfg, x, cache, pass_, next_norm=next_norm)

    return run_layers(
        params,
        cfg,
        tokens,
        caches,
        run,
        aux_layers=aux_layers,
        ops=pass_.ops,
        first_norm=Norm(params["layers"][0]["input_layernorm"], cfg.rms_norm_eps),
    )
