"""gpt-oss: window and full attention in turn, attention sinks, YaRN, and experts.

The experts have a clamped SwiGLU and are stored in MXFP4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from jaxspec.cache.arrays import FullCache, KVCache
from jaxspec.config import (
    AttentionConfig,
    CacheGroup,
    ConfigError,
    RopeConfig,
    read_bool,
    read_int,
    read_number,
    read_object,
    refuse_unless,
)
from jaxspec.layers.attention import attention_specs, qkv_weights
from jaxspec.layers.context import Pass
from jaxspec.layers.decoder_layer import add_attention
from jaxspec.layers.moe import MoEConfig, add_softmax_moe
from jaxspec.layers.mxfp4 import Mxfp4Weight, check_bytes, dequantise, packed_weight, sources
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import AssembledSpec, Params, ParamSpec, Weight, matrix, vector, weight
from jaxspec.layers.products import ResidualStream, Stream
from jaxspec.layers.sums import norm_of_sum
from jaxspec.models.decoder import (
    TargetOutput,
    decoder_specs,
    final_norm,
    ignored_tensor,
    logits,
    run_layers,
)
from jaxspec.parallel.axes import ONCE
from pallas_kernels.traced_once import traced_once

__all__ = ["GptOssConfig", "config_from_hf", "forward", "ignored_tensor", "logits", "param_specs"]

KINDS = ("full_attention", "sliding_attention")
# The default of transformers for a config without rope settings.
DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class GptOssConfig:
    """Static shape of the decoder.

    layer_types: one of KINDS per layer; each kind is a KV-cache group
    mxfp4: the storage of the experts
        None: plain arrays in the checkpoint
        "packed": MXFP4 in the checkpoint and in memory
        "dequantised": MXFP4 in the checkpoint, four times the bytes in memory
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    sliding_window: int
    attention: AttentionConfig
    moe: MoEConfig
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    mxfp4: Literal["dequantised", "packed"] | None = None

    @property
    def intermediate_size(self) -> int:
        """Width of one expert."""
        return self.moe.intermediate_size

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups for each layer."""
        return tuple(KINDS.index(kind) for kind in self.layer_types)

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return the groups, in the order of KINDS."""
        return CacheGroup(block_size, max_model_len), CacheGroup(
            block_size, max_model_len, self.sliding_window
        )


def config_from_hf(config: Mapping[str, Any]) -> GptOssConfig:
    """Read a checkpoint's config.json.

    MXFP4 experts stay packed. To dequantise them, replace mxfp4 in the result.
    """
    refuse_unless(config, "hidden_act", "silu")
    num_layers = read_int(config, "num_hidden_layers")
    layer_types = tuple(
        config.get("layer_types") or [KINDS[(i + 1) % 2] for i in range(num_layers)]
    )
    if len(layer_types) != num_layers or not set(layer_types) <= set(KINDS):
        raise ConfigError(
            f"layer_types: expected {num_layers} of {', '.join(KINDS)}, got {list(layer_types)}"
        )
    quantization = read_object(config, "quantization_config").get("quant_method")
    if quantization not in (None, "mxfp4"):
        raise ConfigError(
            "quantization_config: expected quant_method 'mxfp4' or none for model_type 'gpt_oss', "
            f"got {quantization!r}"
        )
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config = {**config, "rope_parameters": DEFAULT_ROPE}
    num_heads = read_int(config, "num_attention_heads", 64)
    bias = read_bool(config, "attention_bias", True)
    eps = read_number(config, "rms_norm_eps", 1e-5)
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=read_int(config, "num_key_value_heads", 8),
        head_dim=read_int(config, "head_dim", 64),
        rope=RopeConfig.from_hf(config, default_theta=150000.0),
        qkv_bias=bias,
        o_bias=bias,
        rms_norm_eps=eps,
        sinks=True,
    )
    moe = MoEConfig(
        num_experts=read_int(config, "num_local_experts"),
        top_k=read_int(config, "num_experts_per_tok", read_int(config, "experts_per_token", 4)),
        intermediate_size=read_int(config, "intermediate_size"),
        gate="clamped",
        alpha=read_number(config, "swiglu_alpha", 1.702),
        limit=read_number(config, "swiglu_limit", 7.0),
    )
    return GptOssConfig(
        model_type=config["model_type"],
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=read_int(config, "hidden_size"),
        num_layers=num_layers,
        layer_types=layer_types,
        sliding_window=read_int(config, "sliding_window", 128),
        attention=attention,
        moe=moe,
        rms_norm_eps=eps,
        max_position_embeddings=read_int(config, "max_position_embeddings", 131072),
        tie_word_embeddings=read_bool(config, "tie_word_embeddings", False),
        mxfp4="packed" if quantization else None,
    )


def param_specs(cfg: GptOssConfig) -> Params:
    """Return the weights: a ParamSpec per array, in the structure of the params."""

    def layer_specs(i: int, prefix: str) -> Params:
        hidden = cfg.hidden_size
        return {
            "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
            "self_attn": attention_specs(f"{prefix}.self_attn", cfg.attention, hidden, hidden),
            "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            "router": matrix(
                f"{prefix}.mlp.router.weight", hidden, cfg.moe.num_experts, ("embed", None)
            ),
            "router_bias": vector(f"{prefix}.mlp.router.bias", cfg.moe.num_experts),
            "experts": _expert_specs(f"{prefix}.mlp.experts", cfg),
        }

    return decoder_specs(cfg, layer_specs)


def _expert_specs(prefix: str, cfg: GptOssConfig) -> Params:
    count, hidden, size = cfg.moe.num_experts, cfg.hidden_size, cfg.moe.intermediate_size
    gate_up = _weight_spec(
        cfg,
        f"{prefix}.gate_up_proj",
        (count, hidden, 2 * size),
        ("experts", "embed", "expert_mlp"),
        interleaved=True,
    )
    bias = f"{prefix}.gate_up_proj_bias"
    return {
        "gate_up": gate_up,
        "gate_up_bias": _assembled(
            bias,
            (count, 2 * size),
            ("experts", "expert_mlp"),
            ((bias, (count, 2 * size)),),
            _halves,
            2,
        ),
        "down": _weight_spec(
            cfg,
            f"{prefix}.down_proj",
            (count, size, hidden),
            ("experts", "expert_mlp", "embed"),
            interleaved=False,
        ),
        "down_bias": ParamSpec(f"{prefix}.down_proj_bias", (count, hidden), ("experts", ONCE)),
    }


def _weight_spec(
    cfg: GptOssConfig,
    name: str,
    shape: tuple[int, int, int],
    axes: tuple[str | None, str | None, str | None],
    *,
    interleaved: bool,
) -> Weight | Mxfp4Weight:
    """Return one projection of all experts.

    interleaved: the checkpoint has gate and up in turn along the output; ours has the gate's half
        first
    """
    if cfg.mxfp4 is None:
        return weight(
            _assembled(name, shape, axes, ((name, shape),), _halves, 2)
            if interleaved
            else ParamSpec(name, shape, axes)
        )
    parts = 2 if interleaved else 1
    if cfg.mxfp4 == "dequantised":
        build = partial(_dequantised, name=name, interleaved=interleaved)
        return weight(_assembled(name, shape, axes, sources(name, shape), build, parts))
    order = partial(_halves_of, axis=1) if interleaved else None
    return packed_weight(name, shape, axes, side_by_side=parts, order=order)


def _assembled(
    name: str, shape: Any, axes: Any, sources: Any, build: Any, side_by_side: int
) -> AssembledSpec:
    return AssembledSpec(name, shape, axes, side_by_side=side_by_side, sources=sources, build=build)


def _halves(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Build an array whose checkpoint has gate and up in turn along the last axis."""
    (array,) = arrays
    return _halves_of(array, axis=-1)


def _halves_of(array: np.ndarray, axis: int) -> np.ndarray:
    """Move every other entry to the front: [gate, up, gate, up, ...] -> [gates, ups]."""
    moved = np.moveaxis(array, axis, 0)
    return np.moveaxis(np.concatenate([moved[0::2], moved[1::2]]), 0, axis)


def _dequantised(arrays: Sequence[np.ndarray], *, name: str, interleaved: bool) -> np.ndarray:
    check_bytes(name, arrays)
    array = dequantise(arrays)
    return _halves([array]) if interleaved else array


def forward(
    params: Params,
    cfg: GptOssConfig,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the model over tokens [batch, rows]; aux_layers: see run_layers."""
    pass_ = pass_.with_rope(cfg.attention)

    def run_layer(
        i: int, layer: Params, x: Stream, cache: FullCache
    ) -> tuple[ResidualStream, FullCache]:
        next_norm = norm_of_sum(final_norm(params, cfg), pass_.ops)
        if i + 1 < cfg.num_layers:
            following = params["layers"][i + 1]
            weights = qkv_weights(following["self_attn"])
            next_norm = Norm(following["input_layernorm"], cfg.attention.rms_norm_eps, weights)
        group = cfg.group_of_layer[i]
        return _layer(layer, cfg, x, cache, pass_, group=group, next_norm=next_norm)

    return run_layers(params, cfg, tokens, caches, run_layer, aux_layers=aux_layers, ops=pass_.ops)


@traced_once("cfg", "group")
def _layer(
    layer: Params,
    cfg: GptOssConfig,
    x: Stream,
    cache: FullCache,
    pass_: Pass,
    *,
    group: int,
    next_norm: Norm | None,
) -> tuple[ResidualStream, FullCache]:
    """Run a layer of this KV-cache group: attention, then the experts.

    next_norm: the norm that follows; None where the layer does not make it
    """
    before_experts = Norm(layer["post_attention_layernorm"], cfg.rms_norm_eps)
    stream, cache = add_attention(
        layer,
        cfg.attention,
        x,
        cache,
        pass_,
        norm=Norm(layer["input_layernorm"], cfg.attention.rms_norm_eps),
        residual=x,
        group=group,
        window=(None, cfg.sliding_window)[group],
        next_norm=norm_of_sum(before_experts, pass_.ops),
    )
    x = add_softmax_moe(layer, cfg.moe, cfg.rms_norm_eps, stream, pass_.ops, next_norm=next_norm)
    return x, cache
