"""EAGLE-1 (2401.15077): a Llama layer over fc([next token's embedding, target's hidden state]).

Row p pairs the target's post-final-norm hidden state of position p with token p+1. Layer 0 has no
input norm, and the output has no final norm. The target's own head reads the output directly. The
output is also the next step's hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.config import (
    AttentionConfig,
    CacheGroup,
    ConfigError,
    SpeculativeConfig,
    check_options,
    read_bool,
    read_int,
    refuse_unless,
)
from jaxspec.config.quantization import Quantization, read_quantization
from jaxspec.drafts.family import (
    DraftOutput,
    Shapes,
    draft_attention,
    draft_eps,
    draft_window,
    head_logits,
    is_no_weight,
    keep_features,
    keep_hidden,
)
from jaxspec.drafts.head_layout import is_speculators, layer_config, without_prefix
from jaxspec.layers.attention import attention_specs
from jaxspec.layers.context import Pass
from jaxspec.layers.decoder_layer import dense_layer
from jaxspec.layers.embedding import embed
from jaxspec.layers.mlp import mlp_specs
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Params, ParamSpec, projection, vector
from jaxspec.layers.products import project
from jaxspec.layers.quantized import stored
from jaxspec.models import TargetConfig
from jaxspec.parallel.axes import Axes


@dataclass(frozen=True)
class EagleConfig:
    """Static shape of an EAGLE-1 head; it shares the target's hidden size and vocabulary."""

    AXES: ClassVar[Axes] = {"intermediate_size": "mlp"}

    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionConfig
    rms_norm_eps: float
    vocab_size: int
    fc_bias: bool
    own_embedding: bool
    tied_lm_head: bool
    own_lm_head: bool = False
    aux_layers: tuple[int, ...] = ()  # it reads the target's last hidden state
    sliding_window: int | None = None
    maps_vocabulary: bool = False
    method: str = "eagle"
    quantization: Quantization | None = None  # which matrices are stored as codes

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """Index into cache_groups."""
        return (0,) * self.num_layers

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return one group for all layers of the draft."""
        return (CacheGroup(block_size, max_model_len, self.sliding_window),)

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size


def param_specs(cfg: EagleConfig) -> Params:
    """The weights, named as in SafeAI's cnets1.py."""
    hidden = cfg.hidden_size
    layers = []
    for i in range(cfg.num_layers):
        prefix = f"layers.{i}"
        layer: dict[str, Any] = {
            "self_attn": attention_specs(f"{prefix}.self_attn", cfg.attention, hidden, hidden),
            "post_attention_layernorm": vector(f"{prefix}.post_attention_layernorm.weight", hidden),
            **mlp_specs(f"{prefix}.mlp", hidden, cfg.intermediate_size),
        }
        if i > 0:
            layer["input_layernorm"] = vector(f"{prefix}.input_layernorm.weight", hidden)
        layers.append(layer)
    specs: dict[str, Any] = {
        "fc": projection("fc.weight", 2 * hidden, hidden, (None, "embed")),
        "layers": layers,
    }
    if cfg.fc_bias:
        specs["fc_bias"] = vector("fc.bias", hidden)
    if cfg.own_embedding:
        specs["embed_tokens"] = ParamSpec(
            "embed_tokens.weight", (cfg.vocab_size, hidden), ("vocab", "embed")
        )
    if cfg.own_lm_head:
        specs["lm_head"] = projection("lm_head.weight", hidden, cfg.vocab_size, ("embed", "vocab"))
    return stored(specs, cfg.quantization, num_kv_heads=cfg.attention.num_kv_heads)


def forward(
    params: Params,
    cfg: EagleConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: KVCache,
) -> DraftOutput:
    """Run the draft once over tokens [batch, rows] and hidden [batch, rows, D].

    A row's token is the one after the row's position.
    """
    pass_ = pass_.with_rope(cfg.attention)
    embedded = embed(tokens, params["embed_tokens"], pass_.ops).astype(hidden.dtype)
    joined = jnp.concatenate([embedded, hidden], axis=-1)
    bias = params["fc_bias"] if cfg.fc_bias else None
    x = project(joined, (params["fc"],), pass_.ops, bias=bias)
    new_caches = []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        norm = Norm(layer["input_layernorm"], cfg.attention.rms_norm_eps) if i > 0 else None
        stream, cache = dense_layer(
            layer,
            cfg.attention,
            cfg.rms_norm_eps,
            x,
            cache,
            pass_.for_layer(i, cfg.num_layers),
            norm=norm,
            residual=x,
            window=cfg.sliding_window,
        )
        x = stream.x
        new_caches.append(cache)
    return DraftOutput(x, x, tuple(new_caches))


def canonical_name(name: str) -> str:
    """Return SafeAI's name of a tensor; speculators writes `fusion_fc` and `transformer`."""
    name = without_prefix(name)
    for old, new in (("fusion_fc.", "fc."), ("transformer.", "layers.0.")):
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


# Defaults of DraftFamily.
fuse = keep_features
ignored_tensor = is_no_weight
logits = head_logits
target_hidden = keep_hidden


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> EagleConfig:
    """Read the config from config.json and the tensors' shapes (canonical names) of any layout.

    fc has a bias if the file holds one. ConfigError if the config contradicts the file.
    """
    # First: the shapes of codes with another number of bits than 4 are wrong.
    quantization = read_quantization(config)
    refuse_unless(config, "layernorms", False)  # speculators' variant with three more norms
    fc_bias = "fc.bias" in shapes
    for key in ("bias", "fusion_bias"):
        if key in config and read_bool(config, key, False) != fc_bias:
            got = "one" if fc_bias else "none"
            raise ConfigError(
                f"fc.bias: expected what the draft's config says ({key} {config[key]}), got {got} "
                "in the file"
            )
    check_options(overrides, "eagle")
    layer = layer_config(config)
    for key, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if layer.get(key) != ours:
            raise ConfigError(
                f"draft and target do not fit: expected {key} {ours} as the target has, got "
                f"{layer.get(key)}"
            )
    own_lm_head = "lm_head.weight" in shapes
    return EagleConfig(
        hidden_size=target.hidden_size,
        intermediate_size=read_int(layer, "intermediate_size"),
        num_layers=1 if is_speculators(config) else read_int(layer, "num_hidden_layers", 1),
        attention=draft_attention(layer, shapes),
        sliding_window=draft_window(layer, overrides.draft_sliding_window),
        rms_norm_eps=draft_eps(layer),
        vocab_size=target.vocab_size,
        fc_bias=fc_bias,
        own_embedding="embed_tokens.weight" in shapes,
        tied_lm_head=not own_lm_head and target.tie_word_embeddings,
        own_lm_head=own_lm_head,
        quantization=quantization,
    )
