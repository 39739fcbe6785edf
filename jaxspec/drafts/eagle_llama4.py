"""EAGLE-1 for Llama 4: one of the target's own layers over fc([embedding, hidden state]).

Unlike EAGLE-1 for Llama it has both norms, as vLLM's llama4_eagle.py. The layer has its input norm.
The target's head reads the normed output, which is also the next hidden state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.config import (
    CacheGroup,
    ConfigError,
    SpeculativeConfig,
    check_options,
)
from jaxspec.config.quantization import is_made_plain
from jaxspec.drafts.family import (
    DraftOutput,
    ShapedLikeTarget,
    Shapes,
    head_logits,
    is_no_weight,
    keep_features,
    keep_hidden,
    same_name,
)
from jaxspec.layers.context import Pass
from jaxspec.layers.embedding import embed
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import Params, ParamSpec, projection, vector
from jaxspec.layers.products import project
from jaxspec.models import TargetConfig, llama4_text
from jaxspec.models.llama4_text import Llama4Config

MODEL_TYPES = ("llama4_text", "llama4")


@dataclass(frozen=True)
class EagleLlama4Config(ShapedLikeTarget):
    """Static shape of the head. target: a Llama 4 of one layer, which is the head's."""

    target: Llama4Config
    own_embedding: bool
    tied_lm_head: bool
    method: str = "eagle_llama4"
    num_layers: int = 1
    aux_layers: tuple[int, ...] = ()  # it reads the target's last hidden state

    @property
    def sliding_window(self) -> None:
        """Always None: the layer may have chunked attention, never a window."""
        return None

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """The group of its one layer."""
        return (self.target.cache_groups(block_size, max_model_len)[self.target.group_of_layer[0]],)


def param_specs(cfg: EagleLlama4Config) -> Params:
    """Return the weights."""
    hidden = cfg.hidden_size
    specs: dict[str, Any] = {
        "fc": projection("fc.weight", 2 * hidden, hidden, (None, "embed")),
        "layers": [llama4_text.layer_specs(cfg.target, 0, "layers.0")],
        "norm": vector("norm.weight", hidden),
    }
    if cfg.own_embedding:
        specs["embed_tokens"] = ParamSpec(
            "embed_tokens.weight", (cfg.vocab_size, hidden), ("vocab", "embed")
        )
    return specs


def forward(
    params: Params,
    cfg: EagleLlama4Config,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: KVCache,
) -> DraftOutput:
    """Run the draft once over tokens [batch, rows] and hidden [batch, rows, D].

    A row's token is the one after the row's position.
    """
    embedded = embed(tokens, params["embed_tokens"], pass_.ops).astype(hidden.dtype)
    x = project(jnp.concatenate([embedded, hidden], axis=-1), (params["fc"],), pass_.ops)
    kind = llama4_text.layer_kind(cfg.target, 0)
    rotation = llama4_text.layer_rotations(cfg.target, pass_.positions)[kind.has_rope]
    x, cache = llama4_text.decoder_layer(
        params["layers"][0], cfg.target, kind, x, caches[0], pass_, rotation, group=0
    )
    normed = rms_norm(x, params["norm"], cfg.target.rms_norm_eps, pass_.ops)
    return DraftOutput(normed, normed, (cache,))


# Defaults of DraftFamily.
canonical_name = same_name
fuse = keep_features
ignored_tensor = is_no_weight
logits = head_logits
target_hidden = keep_hidden


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> EagleLlama4Config:
    """Read the config from config.json, a Llama 4 text config of one layer."""
    check_options(overrides, "eagle")
    if overrides.draft_sliding_window is not None:
        raise ConfigError(
            "draft_sliding_window: expected None with a head of Llama 4, whose layer has no "
            f"window, got {overrides.draft_sliding_window}"
        )
    if is_made_plain(config):  # of a target, codes are refused
        config = {key: value for key, value in config.items() if key != "quantization_config"}
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
