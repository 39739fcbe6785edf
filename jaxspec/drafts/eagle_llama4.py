"""EAGLE-1 for Llama 4: one of the target's own layers over fc([embedding, hidden state]), and unlike EAGLE-1 for Llama with both norms.

As vLLM's llama4_eagle.py: the layer has its input norm, and the normed output is what the target's head reads and the next hidden state.
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
)
from jaxspec.drafts.layer import DraftOutput, Shapes, refuse_eagle3_switches
from jaxspec.drafts.layer import ignored_tensor as ignored_tensor
from jaxspec.layers.params import Params, ParamSpec, matrix, vector
from jaxspec.layers.products import product, rms_norm, vocab_logits
from jaxspec.models import TargetConfig, llama4_text
from jaxspec.models.llama4_text import Llama4Config

MODEL_TYPES = ("llama4_text", "llama4")


@dataclass(frozen=True)
class EagleLlama4Config:
    """Static shape of the head. layer: that of its decoder layer, layer 0 of a Llama 4 of one layer."""

    layer: Llama4Config
    own_embedding: bool
    tied_lm_head: bool
    method: str = "eagle_llama4"
    num_layers: int = 1
    aux_layers: tuple[int, ...] = ()  # it reads the target's last hidden state
    maps_vocabulary: bool = False

    @property
    def attention(self) -> AttentionConfig:
        return self.layer.attention

    @property
    def hidden_size(self) -> int:
        return self.layer.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.layer.intermediate_size

    @property
    def vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.layer.vocab_size

    @property
    def sliding_window(self) -> None:
        """Its layer may be chunked, never a window."""
        return None

    def cache_groups(self, block_size: int, max_model_len: int) -> CacheGroup:
        """The draft's own group."""
        return self.layer.cache_groups(block_size, max_model_len)[self.layer.group_of_layer[0]]


def param_specs(cfg: EagleLlama4Config) -> Params:
    """The weights."""
    hidden = cfg.hidden_size
    specs: dict[str, Any] = {
        "fc": matrix("fc.weight", 2 * hidden, hidden, (None, "embed")),
        "layers": [llama4_text.layer_specs(cfg.layer, 0, "layers.0")],
        "norm": vector("norm.weight", hidden),
    }
    if cfg.own_embedding:
        specs["embed_tokens"] = ParamSpec(
            "embed_tokens.weight", (cfg.vocab_size, hidden), ("vocab", "embed")
        )
    return specs


def target_hidden(cfg: EagleLlama4Config, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
    """What the draft keeps of the target's pass: its hidden state after the final norm [batch, rows, D]."""
    return hidden


def fuse(
    params: Params, cfg: EagleLlama4Config, hidden: jax.Array, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """The target's hidden state is used as it is; fc follows in `forward`, together with the embedding."""
    return hidden


def forward(
    params: Params,
    cfg: EagleLlama4Config,
    tokens: jax.Array,
    hidden: jax.Array,
    metadata: AttentionMetadata,
    caches: KVCache,
    *,
    kernels: Kernels = REFERENCE_KERNELS,
    last_row: jax.Array | None = None,
) -> DraftOutput:
    """One pass over tokens [batch, rows] (each the one after its row's position) and hidden [batch, rows, D]. last_row: see DraftOutput."""
    embedded = params["embed_tokens"][tokens].astype(hidden.dtype)
    x = product(jnp.concatenate([embedded, hidden], axis=-1), (params["fc"],), kernels)
    rope = llama4_text.layer_rope(cfg.layer, metadata.positions)
    x, cache = llama4_text.decoder_layer(
        params["layers"][0], cfg.layer, 0, x, rope, metadata, caches[0], kernels, last_row=last_row
    )
    normed = rms_norm(x, params["norm"], cfg.layer.rms_norm_eps, kernels)
    return DraftOutput(normed, normed, (cache,))


def logits(
    params: Params,
    cfg: EagleLlama4Config,
    head_input: jax.Array,
    kernels: Kernels = REFERENCE_KERNELS,
) -> jax.Array:
    """Float32 logits [..., vocab] of head_input [..., D], by the target's head."""
    return vocab_logits(head_input, params["lm_head"], kernels, tied=cfg.tied_lm_head)


def canonical_name(name: str) -> str:
    """These files have one layout."""
    return name


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> EagleLlama4Config:
    """From config.json, a Llama 4 text config of one layer."""
    refuse_eagle3_switches(overrides, "eagle")
    layer = llama4_text.config_from_hf(config)
    if layer.num_layers != 1:
        raise ConfigError(
            f"num_hidden_layers: expected 1 in an EAGLE head for Llama 4, got {layer.num_layers}"
        )
    for key, got, ours in (
        ("hidden_size", layer.hidden_size, target.hidden_size),
        ("vocab_size", layer.vocab_size, target.vocab_size),
    ):
        if got != ours:
            raise ConfigError(
                f"draft and target do not fit: expected {key} {ours} as the target has, got {got}"
            )
    return EagleLlama4Config(layer, "embed_tokens.weight" in shapes, target.tie_word_embeddings)
