"""Llama 4's text decoder: chunked attention with rope, full attention without, and experts.

A shared expert serves every row. Layers with rope norm each query and key to unit mean square.
Layers without rope scale their queries by position (2501.19399).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import FullCache, KVCache
from jaxspec.config import (
    AttentionConfig,
    CacheGroup,
    ConfigError,
    Ops,
    RopeConfig,
    read_bool,
    read_int,
    read_number,
    refuse_unless,
)
from jaxspec.layers.attention import attend, attention_specs
from jaxspec.layers.context import Pass
from jaxspec.layers.mlp import add_mlp, mlp_specs
from jaxspec.layers.moe import MoEConfig, experts, router_logits
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import Params, ParamSpec, matrix, vector, weight
from jaxspec.layers.products import (
    add_projection,
    pick_row,
    project_swiglu,
)
from jaxspec.layers.rope import RopeTables, rope_tables
from jaxspec.models.decoder import TargetOutput, decoder_specs, ignored_tensor, logits, run_layers
from jaxspec.parallel.axes import Axes
from pallas_kernels.traced_once import traced_once

__all__ = ["Llama4Config", "config_from_hf", "forward", "ignored_tensor", "logits", "param_specs"]

KINDS = ("full_attention", "chunked_attention")


@dataclass(frozen=True)
class Llama4Config:
    """Static shape of the decoder.

    layer_types: one of KINDS per layer; each kind is a KV-cache group
    rope_layers: whether each layer rotates queries and keys
    moe_layers:  whether each layer has experts
    dense_size:  width of the MLP of a layer without experts
    attn_scale, floor_scale: a query without rope is scaled by
        1 + attn_scale * log(1 + floor((position + 1) / floor_scale)); attn_scale 0: no scaling
    """

    AXES: ClassVar[Axes] = {"dense_size": "mlp"}

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layer_types: tuple[str, ...]
    rope_layers: tuple[bool, ...]
    moe_layers: tuple[bool, ...]
    chunk_size: int
    attention: AttentionConfig
    moe: MoEConfig
    dense_size: int
    attn_scale: float
    floor_scale: float
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool

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
            block_size, max_model_len, chunk=self.chunk_size
        )


def config_from_hf(config: Mapping[str, Any]) -> Llama4Config:
    """Read the config of the text model.

    Llama 4's own config.json describes a model with a vision tower. This config is its text_config.
    """
    for key, expected in (
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("quantization_config", None),
    ):
        refuse_unless(config, key, expected)
    n = read_int(config, "num_hidden_layers")
    every = read_int(config, "no_rope_layer_interval", 4)
    rope = [bool(x) for x in config.get("no_rope_layers") or [(i + 1) % every for i in range(n)]]
    kinds = tuple(config.get("layer_types") or [KINDS[x] for x in rope])
    step = read_int(config, "interleave_moe_layer_step", 1)
    moe_layers = config.get("moe_layers")
    moe_layers = range(step - 1, n, step) if moe_layers is None else moe_layers
    for key, found in (("layer_types", kinds), ("no_rope_layers", rope)):
        if len(found) != n or not set(kinds) <= set(KINDS):
            raise ConfigError(
                f"{key}: expected one of {', '.join(KINDS)} for each of {n} layers, "
                f"got {list(found)}"
            )
    num_heads, hidden = read_int(config, "num_attention_heads"), read_int(config, "hidden_size")
    eps = read_number(config, "rms_norm_eps", 1e-5)
    size = read_int(config, "intermediate_size")
    attention = AttentionConfig(
        num_heads=num_heads,
        num_kv_heads=read_int(config, "num_key_value_heads", num_heads),
        head_dim=read_int(config, "head_dim", hidden // num_heads),
        rope=RopeConfig.from_hf(config, default_theta=500000.0),
        qk_norm=read_bool(config, "use_qk_norm", True),
        rms_norm_eps=eps,
        rope_interleave=True,
    )
    tuned = config.get("attn_temperature_tuning", True)
    return Llama4Config(
        model_type=config["model_type"],
        vocab_size=read_int(config, "vocab_size"),
        hidden_size=hidden,
        num_layers=n,
        layer_types=kinds,
        rope_layers=tuple(rope),
        moe_layers=tuple(i in moe_layers for i in range(n)),
        chunk_size=read_int(config, "attention_chunk_size", 8192),
        attention=attention,
        moe=MoEConfig(
            read_int(config, "num_local_experts"),
            read_int(config, "num_experts_per_tok", 1),
            size,
            shared_size=size,
        ),
        dense_size=read_int(config, "intermediate_size_mlp"),
        attn_scale=read_number(config, "attn_scale", 0.1) if tuned else 0.0,
        floor_scale=read_number(config, "floor_scale", 8192),
        rms_norm_eps=eps,
        max_position_embeddings=read_int(config, "max_position_embeddings"),
        tie_word_embeddings=read_bool(config, "tie_word_embeddings", False),
    )


def param_specs(cfg: Llama4Config) -> Params:
    """Return the weights: a ParamSpec per array, in the structure of the params."""
    return decoder_specs(cfg, lambda i, prefix: layer_specs(cfg, i, prefix))


def layer_specs(cfg: Llama4Config, i: int, prefix: str) -> Params:
    """Return the weights of layer i."""
    hidden = cfg.hidden_size
    block = _moe_specs if cfg.moe_layers[i] else _dense_specs
    return {
        "input_layernorm": vector(f"{prefix}.input_layernorm.weight", hidden),
        "self_attn": attention_specs(
            f"{prefix}.self_attn", replace(cfg.attention, qk_norm=False), hidden, hidden
        ),
        "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
        **block(f"{prefix}.feed_forward", cfg),
    }


def _dense_specs(prefix: str, cfg: Llama4Config) -> dict[str, Any]:
    return dict(mlp_specs(prefix, cfg.hidden_size, cfg.dense_size))


def _moe_specs(prefix: str, cfg: Llama4Config) -> dict[str, Any]:
    count, hidden, size = cfg.moe.num_experts, cfg.hidden_size, cfg.moe.intermediate_size
    return {
        "router": matrix(f"{prefix}.router.weight", hidden, count, ("embed", None)),
        "experts": {
            "gate_up": weight(
                ParamSpec(
                    f"{prefix}.experts.gate_up_proj",
                    (count, hidden, 2 * size),
                    ("experts", "embed", "expert_mlp"),
                    side_by_side=2,
                )
            ),
            "down": weight(
                ParamSpec(
                    f"{prefix}.experts.down_proj",
                    (count, size, hidden),
                    ("experts", "expert_mlp", "embed"),
                )
            ),
        },
        "shared": mlp_specs(f"{prefix}.shared_expert", hidden, cfg.moe.shared_size),
    }


def forward(
    params: Params,
    cfg: Llama4Config,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    aux_layers: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the model over tokens [batch, rows]; aux_layers: see run_layers."""
    rotations = layer_rotations(cfg, pass_.positions)

    def run_layer(
        i: int, layer: Params, x: jax.Array, cache: FullCache
    ) -> tuple[jax.Array, FullCache]:
        kind, rotation = layer_kind(cfg, i), rotations[cfg.rope_layers[i]]
        group = cfg.group_of_layer[i]
        return decoder_layer(layer, cfg, kind, x, cache, pass_, rotation, group=group)

    return run_layers(params, cfg, tokens, caches, run_layer, aux_layers=aux_layers, ops=pass_.ops)


@dataclass(frozen=True)
class LayerKind:
    """What layers differ in, but for their weights.

    has_rope: whether the layer rotates queries and keys
    window:   the most keys that a row sees; None for all
    """

    has_rope: bool
    window: int | None


def layer_kind(cfg: Llama4Config, i: int) -> LayerKind:
    """Return the kind of layer i."""
    return LayerKind(cfg.rope_layers[i], (None, cfg.chunk_size)[cfg.group_of_layer[i]])


class Rotation(NamedTuple):
    """The effect of positions in a layer.

    rope:        the layer's rope tables
    query_scale: [batch, rows], factor of the queries; None for 1
    """

    rope: RopeTables
    query_scale: jax.Array | None


def layer_rotations(cfg: Llama4Config, positions: jax.Array) -> tuple[Rotation, Rotation]:
    """Return the rotations of layers without and with rope, for positions int32 [batch, rows]."""
    cos, sin = rope_tables(cfg.attention.rope, cfg.attention.head_dim, positions)
    grown = jnp.floor((positions.astype(jnp.float32) + 1) / cfg.floor_scale)
    scale = 1 + cfg.attn_scale * jnp.log1p(grown) if cfg.attn_scale else None
    return Rotation((jnp.ones_like(cos), jnp.zeros_like(sin)), scale), Rotation((cos, sin), None)


@traced_once("cfg", "kind", "group")
def decoder_layer(
    layer: Params,
    cfg: Llama4Config,
    kind: LayerKind,
    x: jax.Array,
    cache: FullCache,
    pass_: Pass,
    rotation: Rotation,
    *,
    group: int,
) -> tuple[jax.Array, FullCache]:
    """Run a layer on x [batch, rows, D], in a target or as the layer of an EAGLE draft.

    The layer is dense or has experts, as its weights say.

    group: index of its KV-cache group in the pass's metadata
    """
    ops, weights = pass_.ops, layer["self_attn"]
    has_norm = cfg.attention.qk_norm and kind.has_rope
    if has_norm:  # the norm has no gain
        gain = jnp.ones(cfg.attention.head_dim, x.dtype)
        weights = {**weights, "q_norm": gain, "k_norm": gain}
    attended, cache = attend(
        weights,
        replace(cfg.attention, qk_norm=has_norm),
        x,
        cache,
        replace(pass_, rope=rotation.rope),
        norm=Norm(layer["input_layernorm"], cfg.attention.rms_norm_eps),
        group=group,
        window=kind.window,
        query_scale=rotation.query_scale,
    )
    x = add_projection(x, attended, weights["o_proj"], ops).x
    x = pick_row(x, pass_.last_row)
    if "experts" in layer:
        return _add_moe(layer, cfg, x, ops), cache
    return add_mlp(layer, cfg.rms_norm_eps, x, ops).x, cache


def _add_moe(layer: Params, cfg: Llama4Config, x: jax.Array, ops: Ops) -> jax.Array:
    """Add shared(norm(x)) and experts(sigmoid(score) * norm(x)): scores weigh an expert's input."""
    normed = rms_norm(x, layer["post_attention_layernorm"], cfg.rms_norm_eps, ops)
    shared = layer["shared"]
    inner = project_swiglu(normed, shared["gate_proj"], shared["up_proj"], ops)
    flat = normed.reshape(-1, cfg.hidden_size)
    scores, ids = jax.lax.top_k(router_logits(flat, layer["router"], ops), cfg.moe.top_k)
    # Each (row, expert) pair has its own input, so it becomes a row with one expert.
    weighed = (flat[:, None] * jax.nn.sigmoid(scores)[..., None].astype(flat.dtype)).reshape(
        -1, cfg.hidden_size
    )
    ids = ids.reshape(-1, 1)
    weights = jnp.ones(ids.shape, jnp.float32)
    routed = experts(layer["experts"], cfg.moe, weighed, ids, weights, ops)
    routed = routed.reshape(*flat.shape[:1], cfg.moe.top_k, -1).sum(axis=1)
    routed = routed.reshape(x.shape)
    return add_projection(x, inner, shared["down_proj"], ops, beside=routed).x
