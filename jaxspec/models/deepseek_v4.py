"""DeepSeek-V4: compressed attention, a residual of several streams, and experts.

In the first layers, the token's id chooses the experts. Weights have the names of the original
checkpoints (transformers writes others). The original files in float8 and float4 are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import CompressedCache, KVCache
from jaxspec.config import (
    CacheGroup,
    CompressedAttentionConfig,
    ConfigError,
    Ops,
    RopeConfig,
    read_int,
    read_number,
    read_object,
    refuse_unless,
)
from jaxspec.layers.compressed_attention import compressed_attention, compressed_attention_specs
from jaxspec.layers.context import Pass
from jaxspec.layers.embedding import embed
from jaxspec.layers.hyper_connections import (
    HyperConnectionConfig,
    collapse,
    connect,
    connection_specs,
    head_specs,
    merge,
)
from jaxspec.layers.moe import (
    MoEConfig,
    expert_specs,
    experts,
    gated,
    route_sqrt_softplus,
    router_logits,
)
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import IndexSpec, Params, ParamSpec, matrix, projection, vector
from jaxspec.layers.products import pick_row, project, project_part
from jaxspec.layers.rope import RopeTables, rope_tables
from jaxspec.layers.sums import sum_of_devices
from jaxspec.models.decoder import TargetOutput, logits
from pallas_kernels.traced_once import traced_once

__all__ = [
    "DeepseekV4Config",
    "config_from_hf",
    "decoder_layer",
    "forward",
    "ignored_tensor",
    "layer_specs",
    "logits",
    "param_specs",
]

SLIDING, SPARSE, HEAVY = KINDS = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
MLP_KINDS = ("hash_moe", "moe")
EXPERT_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True)
class DeepseekV4Config:
    """Static shape of the decoder.

    hash_layers: whether each layer looks its experts up by the token's id
    num_mtp_layers: modules of multi-token prediction in the checkpoint;
        drafts/mtp_deepseek_v4.py reads the first
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    hash_layers: tuple[bool, ...]
    attention: CompressedAttentionConfig
    residual: HyperConnectionConfig
    moe: MoEConfig
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    num_mtp_layers: int = 0

    @property
    def intermediate_size(self) -> int:
        """Width of one expert."""
        return self.moe.intermediate_size

    @property
    def streams_size(self) -> int:
        """Width of a row's residual, all streams side by side."""
        return self.residual.streams * self.hidden_size

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups for each layer.

        A layer that compresses keeps entries of all tokens, so it needs full attention's blocks.
        """
        return tuple(int(kind == SLIDING) for kind in self.attention.layer_types)

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return the group of the layers that compress, and that of the others."""
        return CacheGroup(block_size, max_model_len), CacheGroup(
            block_size, max_model_len, self.attention.sliding_window
        )


def config_from_hf(config: Mapping[str, Any]) -> DeepseekV4Config:
    """Read a checkpoint's config.json, the original one or that of transformers."""
    for key, expected in (
        ("hidden_act", "silu"),
        ("quantization_config", None),
        ("num_key_value_heads", 1),
        ("n_shared_experts", 1),
    ):
        refuse_unless(config, key, expected)
    for key, expected in (
        ("scoring_func", "sqrtsoftplus"),
        ("topk_method", "noaux_tc"),
        ("norm_topk_prob", True),
    ):
        refuse_unless(config, key, expected)
    for key, expected in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("tie_word_embeddings", False),
    ):
        refuse_unless(config, key, expected)
    num_layers = read_int(config, "num_hidden_layers")
    eps = read_number(config, "rms_norm_eps", 1e-6)
    moe = MoEConfig(
        num_experts=read_int(config, "n_routed_experts"),
        top_k=read_int(config, "num_experts_per_tok"),
        intermediate_size=read_int(config, "moe_intermediate_size"),
        gate="clamped_silu",
        limit=read_number(config, "swiglu_limit", 10.0),
        routed_scaling=read_number(config, "routed_scaling_factor", 1.5),
        shared_size=read_int(config, "moe_intermediate_size"),
    )
    return DeepseekV4Config(
        model_type=config["model_type"],
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=read_int(config, "hidden_size"),
        num_layers=num_layers,
        hash_layers=_hash_layers(config, num_layers),
        attention=_attention(config, num_layers, eps),
        residual=HyperConnectionConfig(
            read_int(config, "hc_mult", 4),
            read_int(config, "hc_sinkhorn_iters", 20),
            read_number(config, "hc_eps", 1e-6),
            eps,
        ),
        moe=moe,
        rms_norm_eps=eps,
        max_position_embeddings=read_int(config, "max_position_embeddings"),
        tie_word_embeddings=False,
        num_mtp_layers=read_int(config, "num_nextn_predict_layers", 0, least=0),
    )


def _attention(config: Mapping[str, Any], num_layers: int, eps: float) -> CompressedAttentionConfig:
    rates = read_object(config, "compress_rates")
    sparse, heavy = read_int(rates, SPARSE, 4), read_int(rates, HEAVY, 128)
    head_dim = read_int(config, "head_dim", 512)
    main, compressed = _ropes(config)
    rope_head_dim = config.get("qk_rope_head_dim") or round(
        head_dim * read_number(config, "partial_rotary_factor", 0.125)
    )
    return CompressedAttentionConfig(
        num_heads=read_int(config, "num_attention_heads"),
        head_dim=head_dim,
        rope_head_dim=int(rope_head_dim),
        q_lora_rank=read_int(config, "q_lora_rank"),
        o_groups=read_int(config, "o_groups"),
        o_lora_rank=read_int(config, "o_lora_rank"),
        sliding_window=read_int(config, "sliding_window"),
        layer_types=_layer_types(config, num_layers, {0: SLIDING, sparse: SPARSE, heavy: HEAVY}),
        sparse_rate=sparse,
        heavy_rate=heavy,
        index_heads=read_int(config, "index_n_heads"),
        index_head_dim=read_int(config, "index_head_dim"),
        index_top_k=read_int(config, "index_topk"),
        rope=main,
        compressed_rope=compressed,
        rms_norm_eps=eps,
    )


def _layer_types(
    config: Mapping[str, Any], num_layers: int, of_ratio: Mapping[int, str]
) -> tuple[str, ...]:
    """Read the layer_types of transformers, or the original compress_ratios.

    The latter end with the ratios of the MTP modules.
    """
    ratios = config.get("compress_ratios") or []
    kinds = list(
        config.get("layer_types") or [of_ratio.get(ratio, ratio) for ratio in ratios[:num_layers]]
    )
    if len(kinds) != num_layers or not set(kinds) <= set(KINDS):
        raise ConfigError(
            f"layer_types: expected {num_layers} of {', '.join(KINDS)} "
            f"(or compress_ratios of {list(of_ratio)}), got {kinds}"
        )
    if any(ratios[num_layers:]):
        raise ConfigError(
            "compress_ratios: expected 0 (an MTP module compresses nothing) after "
            f"{num_layers} layers, got {ratios}"
        )
    return tuple(kinds)


def _hash_layers(config: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    count = config.get("num_hash_layers", 3)
    kinds = list(
        config.get("mlp_layer_types") or [MLP_KINDS[i >= count] for i in range(num_layers)]
    )
    if len(kinds) != num_layers or not set(kinds) <= set(MLP_KINDS):
        raise ConfigError(
            f"mlp_layer_types: expected {num_layers} of {', '.join(MLP_KINDS)}, got {kinds}"
        )
    return tuple(kind == "hash_moe" for kind in kinds)


def _ropes(config: Mapping[str, Any]) -> tuple[RopeConfig, RopeConfig]:
    """Return the rope of layers without and with a compressor.

    Only the latter use YaRN, without its factor on cos and sin.
    """
    nested = read_object(config, "rope_parameters")
    main = {"rope_theta": read_number(config, "rope_theta", 10000.0), **read_object(nested, "main")}
    scaling = read_object(nested, "compress") or {
        **read_object(config, "rope_scaling"),
        **({} if "main" in nested else nested),
    }
    compressed = {
        "attention_factor": 1.0,
        "rope_theta": read_number(config, "compress_rope_theta", 160000.0),
        **scaling,
    }
    if "compress" not in nested:  # a flat rope_theta belongs to the other layers
        compressed["rope_theta"] = read_number(config, "compress_rope_theta", 160000.0)
    one, other = (
        {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
        for rope in (main, compressed)
    )
    return RopeConfig.from_hf({"rope_parameters": one}), RopeConfig.from_hf(
        {"rope_parameters": other}
    )


def param_specs(cfg: DeepseekV4Config) -> Params:
    """Return the weights: a ParamSpec per array, in the structure of the params."""
    kinds = zip(cfg.attention.layer_types, cfg.hash_layers, strict=True)
    return {
        "embed_tokens": ParamSpec(
            "embed.weight", (cfg.vocab_size, cfg.hidden_size), ("vocab", "embed")
        ),
        "layers": [
            layer_specs(cfg, f"layers.{i}", kind, hashed=hashed)
            for i, (kind, hashed) in enumerate(kinds)
        ],
        "head": head_specs("hc_head", cfg.residual, cfg.hidden_size),
        "norm": vector("norm.weight", cfg.hidden_size),
        "lm_head": projection("head.weight", cfg.hidden_size, cfg.vocab_size, ("embed", "vocab")),
    }


def layer_specs(
    cfg: DeepseekV4Config, prefix: str, kind: str = SLIDING, *, hashed: bool = False
) -> Params:
    """Return the weights of one decoder layer, or of the layer of an MTP module."""
    hidden, moe, ffn = cfg.hidden_size, cfg.moe, f"{prefix}.ffn"
    specs: dict[str, Any] = {
        "attention_connection": connection_specs(f"{prefix}.hc_attn", cfg.residual, hidden),
        "input_layernorm": vector(f"{prefix}.attn_norm.weight", hidden),
        "self_attn": compressed_attention_specs(f"{prefix}.attn", cfg.attention, kind, hidden),
        "mlp_connection": connection_specs(f"{prefix}.hc_ffn", cfg.residual, hidden),
        "post_attention_layernorm": vector(f"{prefix}.ffn_norm.weight", hidden),
        "router": matrix(f"{ffn}.gate.weight", hidden, moe.num_experts, ("embed", None)),
        "experts": expert_specs(f"{ffn}.experts", moe, hidden, EXPERT_NAMES),
        "shared": {
            "gate_proj": projection(
                f"{ffn}.shared_experts.w1.weight", hidden, moe.shared_size, ("embed", "mlp")
            ),
            "up_proj": projection(
                f"{ffn}.shared_experts.w3.weight", hidden, moe.shared_size, ("embed", "mlp")
            ),
            "down_proj": projection(
                f"{ffn}.shared_experts.w2.weight", moe.shared_size, hidden, ("mlp", "embed")
            ),
        },
    }
    if hashed:
        table = f"{ffn}.gate.tid2eid"
        specs["expert_of_token"] = IndexSpec(
            table, (cfg.vocab_size, moe.top_k), (None, None), below=moe.num_experts
        )
    else:
        specs["router_bias"] = ParamSpec(
            f"{ffn}.gate.bias", (moe.num_experts,), (None,), dtype="float32"
        )
    return specs


def ignored_tensor(cfg: DeepseekV4Config, name: str) -> bool:
    """Return whether the tensor belongs to a module of multi-token prediction."""
    return name.startswith("mtp.")


def layer_ropes(cfg: DeepseekV4Config, positions: jax.Array) -> tuple[RopeTables, RopeTables]:
    """Return the rope tables of layers with and without a compressor, in cache_groups' order."""
    attention = cfg.attention
    compressed, main = (
        rope_tables(rope, attention.rope_head_dim, positions)
        for rope in (attention.compressed_rope, attention.rope)
    )
    return compressed, main


@traced_once("cfg", "kind", "group")
def decoder_layer(
    layer: Params,
    cfg: DeepseekV4Config,
    kind: str,
    x: jax.Array,
    tokens: jax.Array,
    cache: CompressedCache,
    pass_: Pass,
    *,
    group: int,
) -> tuple[jax.Array, CompressedCache]:
    """Run one layer of this kind on the streams x of tokens.

    x:      [batch, rows, streams, D]
    tokens: int32 [batch, rows]
    group:  index of its KV-cache group in the pass's metadata
    """
    ops, last_row = pass_.ops, pass_.last_row
    read, post, comb = connect(layer["attention_connection"], cfg.residual, x)
    normed = rms_norm(read, layer["input_layernorm"], cfg.rms_norm_eps, ops)
    attended, cache = compressed_attention(
        layer["self_attn"], cfg.attention, kind, normed, cache, pass_, group=group
    )
    x, tokens = pick_row(merge(x, attended, post, comb), last_row), pick_row(tokens, last_row)
    read, post, comb = connect(layer["mlp_connection"], cfg.residual, x)
    normed = rms_norm(read, layer["post_attention_layernorm"], cfg.rms_norm_eps, ops)
    return merge(x, _moe(layer, cfg.moe, normed, tokens, ops), post, comb), cache


def _moe(
    layer: Params, cfg: MoEConfig, normed: jax.Array, tokens: jax.Array, ops: Ops
) -> jax.Array:
    """Return experts(normed) + shared(normed), for normed [batch, rows, D]."""
    shared = layer["shared"]
    inner = gated(cfg, project(normed, (shared["gate_proj"], shared["up_proj"]), ops))
    flat = normed.reshape(-1, normed.shape[-1])
    scores = router_logits(flat, layer["router"], ops)
    looked_up = layer["expert_of_token"][tokens.reshape(-1)] if "expert_of_token" in layer else None
    chosen = route_sqrt_softplus(scores, layer.get("router_bias"), cfg, looked_up)
    routed = experts(layer["experts"], cfg, flat, *chosen, ops)
    out = project_part(inner, shared["down_proj"], ops) + routed.reshape(normed.shape)
    return sum_of_devices(out, ops.layers, ops).astype(normed.dtype)


def forward(
    params: Params,
    cfg: DeepseekV4Config,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the model over tokens [batch, rows].

    aux_layers: boundary ids as in run_layers; a boundary has its streams side by side, and is
        streams * D wide
    """
    ops, ropes = pass_.ops, layer_ropes(cfg, pass_.positions)
    embedded = embed(tokens, params["embed_tokens"], ops)
    x = jnp.broadcast_to(
        embedded[:, :, None], (*tokens.shape, cfg.residual.streams, cfg.hidden_size)
    )
    boundary, new_caches = [x], []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        group, kind = cfg.group_of_layer[i], cfg.attention.layer_types[i]
        of_layer = replace(pass_, rope=ropes[group])
        with jax.named_scope(f"layer_{i}"):
            x, cache = decoder_layer(layer, cfg, kind, x, tokens, cache, of_layer, group=group)
        boundary.append(x)
        new_caches.append(cache)
    collapsed = collapse(params["head"], cfg.residual, x)
    hidden = rms_norm(collapsed, params["norm"], cfg.rms_norm_eps, ops)
    aux = None
    if aux_layers:
        picked = [boundary[i].reshape(*tokens.shape, -1) for i in aux_layers]
        aux = jnp.concatenate(picked, axis=-1)
    return TargetOutput(hidden, aux, tuple(new_caches))
