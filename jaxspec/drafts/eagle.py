"""EAGLE-1 (2401.15077): a Llama layer over fc([embedding of the next token, the target's last hidden state]).

Row p pairs the target's post-final-norm hidden state of position p with token p+1. Layer 0 has no input norm and the
output no final norm: the target's own head is applied to it directly, and it is the next step's hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import (
    REFERENCE_KERNELS,
    AttentionConfig,
    CacheGroup,
    ConfigError,
    Kernels,
    SpeculativeConfig,
    read_int,
    read_number,
)
from jaxspec.drafts.layer import (
    DraftOutput,
    Shapes,
    draft_attention,
    draft_window,
    refuse_eagle3_switches,
)
from jaxspec.drafts.layer import ignored_tensor as ignored_tensor
from jaxspec.layers.attention import attention_specs, rope_of
from jaxspec.layers.decoder_layer import dense_layer
from jaxspec.layers.params import Params, ParamSpec, matrix, vector
from jaxspec.layers.products import linear, mlp_specs, product, vocab_logits
from jaxspec.models import TargetConfig


@dataclass(frozen=True)
class EagleConfig:
    """Static shape of an EAGLE-1 head; it shares the target's hidden size, vocabulary and head."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionConfig
    rms_norm_eps: float
    vocab_size: int
    fc_bias: bool
    own_embedding: bool
    tied_lm_head: bool
    aux_layers: tuple[int, ...] = ()  # it reads the target's last hidden state
    sliding_window: int | None = None
    maps_vocabulary: bool = False
    method: str = "eagle"

    def cache_groups(self, block_size: int, max_model_len: int) -> CacheGroup:
        """The draft's own group."""
        return CacheGroup(block_size, max_model_len, self.sliding_window)

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
        "fc": matrix("fc.weight", 2 * hidden, hidden, (None, "embed")),
        "layers": layers,
    }
    if cfg.fc_bias:
        specs["fc_bias"] = vector("fc.bias", hidden)
    if cfg.own_embedding:
        specs["embed_tokens"] = ParamSpec(
            "embed_tokens.weight", (cfg.vocab_size, hidden), ("vocab", "embed")
        )
    return specs


def target_hidden(cfg: EagleConfig, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
    """What the draft keeps of the target's pass: its hidden state after the final norm [batch, rows, D]."""
    return hidden


def fuse(
    params: Params, cfg: EagleConfig, hidden: jax.Array, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """The target's hidden state is used as it is; fc follows in `forward`, together with the embedding."""
    return hidden


def forward(
    params: Params,
    cfg: EagleConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    metadata: AttentionMetadata,
    caches: KVCache,
    *,
    kernels: Kernels = REFERENCE_KERNELS,
    last_row: jax.Array | None = None,
) -> DraftOutput:
    """One pass over tokens [batch, rows] (each the one after its row's position) and hidden [batch, rows, D]. last_row: see DraftOutput."""
    rope = rope_of(cfg.attention, metadata)
    embedded = params["embed_tokens"][tokens].astype(hidden.dtype)
    joined = jnp.concatenate([embedded, hidden], axis=-1)
    x = (
        linear(joined, params["fc"], params["fc_bias"])
        if cfg.fc_bias
        else product(joined, (params["fc"],), kernels)
    )
    new_caches = []
    for i, (layer, cache) in enumerate(zip(params["layers"], caches, strict=True)):
        norm = None if i == 0 else layer["input_layernorm"]
        options = {"norm": norm, "residual": x, "window": cfg.sliding_window}
        options["last_row"] = last_row if i == cfg.num_layers - 1 else None
        stream, cache = dense_layer(
            layer, cfg.attention, cfg.rms_norm_eps, x, rope, metadata, cache, kernels, **options
        )
        x = stream.x
        new_caches.append(cache)
    return DraftOutput(x, x, tuple(new_caches))


def logits(
    params: Params, cfg: EagleConfig, head_input: jax.Array, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """Float32 logits [..., vocab] of head_input [..., D], by the target's head."""
    return vocab_logits(head_input, params["lm_head"], kernels, tied=cfg.tied_lm_head)


def canonical_name(name: str) -> str:
    """EAGLE-1 files have one layout."""
    return name


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> EagleConfig:
    """From config.json and the tensors' shapes. fc's bias is what the file holds; a config that says otherwise is an error."""
    fc_bias = "fc.bias" in shapes
    if "bias" in config and bool(config["bias"]) != fc_bias:
        got = "one" if fc_bias else "none"
        raise ConfigError(
            f"fc.bias: expected what the draft's config says (bias {config['bias']}), got {got} in the file"
        )
    refuse_eagle3_switches(overrides, "eagle")
    for key, ours in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(key) != ours:
            raise ConfigError(
                f"draft and target do not fit: expected {key} {ours} as the target has, got {config.get(key)}"
            )
    return EagleConfig(
        hidden_size=target.hidden_size,
        intermediate_size=read_int(config, "intermediate_size"),
        num_layers=read_int(config, "num_hidden_layers", 1),
        attention=draft_attention(config, shapes),
        sliding_window=draft_window(config),
        rms_norm_eps=read_number(config, "rms_norm_eps", 1e-6),
        vocab_size=target.vocab_size,
        fc_bias=fc_bias,
        own_embedding="embed_tokens.weight" in shapes,
        tied_lm_head=target.tie_word_embeddings,
    )
