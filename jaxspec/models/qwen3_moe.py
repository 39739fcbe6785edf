"""Qwen3-MoE (Qwen3-30B-A3B, -235B-A22B): Qwen3's decoder with experts in some or all layers.

The router is a softmax over all experts. No expert is shared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxspec.cache.arrays import FullCache, KVCache
from jaxspec.config import ConfigError, is_int, read_bool, read_int, shown
from jaxspec.layers.context import Pass
from jaxspec.layers.decoder_layer import add_attention
from jaxspec.layers.moe import MoEConfig, add_softmax_moe, softmax_moe_specs
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Params
from jaxspec.layers.products import ResidualStream, Stream
from jaxspec.layers.quantized import stored
from jaxspec.layers.sums import norm_of_sum
from jaxspec.models import qwen3
from jaxspec.models.decoder import TargetOutput, decoder_specs, ignored_tensor, logits
from jaxspec.models.llama import (
    LlamaConfig,
    attention_block_specs,
    forward_with,
    layer_specs,
    target_layer,
)
from pallas_kernels.traced_once import traced_once

__all__ = ["Qwen3MoeConfig", "config_from_hf", "forward", "ignored_tensor", "logits", "param_specs"]


@dataclass(frozen=True)
class Qwen3MoeConfig(LlamaConfig):
    """Static shape of the decoder.

    intermediate_size: width of the MLP of a layer without experts
    moe_layers:        whether each layer has experts
    """

    moe: MoEConfig
    moe_layers: tuple[bool, ...]


def config_from_hf(config: Mapping[str, Any]) -> Qwen3MoeConfig:
    """Read a checkpoint's config.json."""
    hidden, heads = (read_int(config, key) for key in ("hidden_size", "num_attention_heads"))
    # Not Qwen3's default of 128, as in transformers.
    head_dim = read_int(config, "head_dim", hidden // heads)
    decoder = qwen3.config_from_hf({**config, "head_dim": head_dim})
    # transformers 5 saves num_experts by another name.
    renamed = config.get("num_experts") is None and "num_local_experts" in config
    moe = MoEConfig(
        num_experts=read_int(config, "num_local_experts" if renamed else "num_experts"),
        top_k=read_int(config, "num_experts_per_tok"),
        intermediate_size=read_int(config, "moe_intermediate_size"),
        norm_top_k=read_bool(config, "norm_topk_prob", False),
    )
    if moe.top_k > moe.num_experts:
        raise ConfigError(
            f"num_experts_per_tok: expected at most the model's {moe.num_experts} experts, "
            f"got {moe.top_k}"
        )
    return Qwen3MoeConfig(
        **vars(decoder), moe=moe, moe_layers=_moe_layers(config, decoder.num_layers)
    )


def _moe_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """Return whether each layer has experts: every step-th one that is not listed as dense."""
    step = read_int(config, "decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list | tuple) or not all(
        is_int(i) and 0 <= i < num_layers for i in dense
    ):
        raise ConfigError(
            f"mlp_only_layers: expected indices within 0..{num_layers - 1} of the model's layers, "
            f"got {shown(dense)}"
        )
    return tuple((i + 1) % step == 0 and i not in dense for i in range(num_layers))


def param_specs(cfg: Qwen3MoeConfig) -> Params:
    """Return the weights: a ParamSpec per array, in the structure of the params."""

    def specs(i: int, prefix: str) -> Params:
        if not cfg.moe_layers[i]:
            return layer_specs(cfg, prefix)
        block = softmax_moe_specs(f"{prefix}.mlp", cfg.moe, cfg.hidden_size)
        return {**attention_block_specs(cfg, prefix), **block}

    return stored(
        decoder_specs(cfg, specs), cfg.quantization, num_kv_heads=cfg.attention.num_kv_heads
    )


def forward(
    params: Params,
    cfg: Qwen3MoeConfig,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the model over tokens [batch, rows]; aux_layers: see run_layers."""
    return forward_with(_layer, params, cfg, tokens, pass_, caches, aux_layers=aux_layers)


@traced_once("cfg")
def _layer(
    layer: Params,
    cfg: Qwen3MoeConfig,
    x: Stream,
    cache: FullCache,
    pass_: Pass,
    *,
    next_norm: Norm | None,
) -> tuple[ResidualStream, FullCache]:
    """Run one layer, which is dense or has experts, as its weights say; see llama.RunLayer."""
    if "experts" not in layer:
        return target_layer(layer, cfg, x, cache, pass_, next_norm=next_norm)
    norm = Norm(layer["input_layernorm"], cfg.attention.rms_norm_eps)
    before_experts = Norm(layer["post_attention_layernorm"], cfg.rms_norm_eps)
    stream, cache = add_attention(
        layer,
        cfg.attention,
        x,
        cache,
        pass_,
        norm=norm,
        residual=x,
        next_norm=norm_of_sum(before_experts, pass_.ops),
    )
    x = add_softmax_moe(layer, cfg.moe, cfg.rms_norm_eps, stream, pass_.ops, next_norm=next_norm)
    return x, cache
