"""An independent model as the draft: a smaller target of any family, with the target's vocabulary.

It reads tokens alone (Leviathan et al., 2211.17192). So its row at position p is made of the tokens
up to p. Its embedding, head and caches are its own.

Models of one tokenizer may have vocabularies of different width, which differ in rows that stand
for no token. Loading cuts a wider draft to the target's width. A narrower one has a draft
vocabulary: the target's first ids.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import models
from jaxspec.cache.arrays import KVCache
from jaxspec.config import (
    AttentionKind,
    CacheGroup,
    ConfigError,
    Ops,
    SpeculativeConfig,
    check_options,
    is_one_of,
)
from jaxspec.drafts.family import Shapes, same_name
from jaxspec.drafts.head_layout import is_head
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params
from jaxspec.models import TargetConfig

METHOD = "draft_model"
EMBEDDING = "model.embed_tokens.weight"  # of every family; heads that have one lack the next
FIRST_NORM = "model.layers.0.input_layernorm.weight"


@dataclass(frozen=True)
class DraftModelConfig:
    """Static shape of an independent model that drafts for a target.

    model:      its own config; its vocabulary is at most as wide as the target's
    vocab_size: of the target
    """

    model: TargetConfig
    vocab_size: int
    method: str = METHOD
    aux_layers: tuple[int, ...] = ()  # it reads tokens alone
    sliding_window: int | None = None  # its cache groups have their own

    @property
    def num_layers(self) -> int:
        return self.model.num_layers

    @property
    def hidden_size(self) -> int:
        return self.model.hidden_size

    @property
    def attention(self) -> AttentionKind:
        return self.model.attention

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        return self.model.group_of_layer

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return the model's own groups."""
        return self.model.cache_groups(block_size, max_model_len)

    @property
    def draft_vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def maps_vocabulary(self) -> bool:
        """Whether its vocabulary is narrower than the target's; shared ids are equal."""
        return self.model.vocab_size < self.vocab_size

    @property
    def tied_lm_head(self) -> bool:
        """False: neither embedding nor head is the target's."""
        return False


def drafts_for(model: TargetConfig, target: TargetConfig) -> DraftModelConfig:
    """Return the config of a model that drafts for a target, cut to the target's vocabulary."""
    width = min(model.vocab_size, target.vocab_size)
    narrow: Any = model
    return DraftModelConfig(replace(narrow, vocab_size=width), target.vocab_size)


def is_model(config: Mapping[str, Any], names: Collection[str]) -> bool:
    """Return whether a checkpoint is a whole model of a known family, by its tensors' names."""
    known = is_one_of(config.get("model_type"), models.FAMILIES)
    return known and EMBEDDING in names and FIRST_NORM in names and not is_head(config, names)


def model_from_checkpoint(
    config: Mapping[str, Any], names: Collection[str], overrides: SpeculativeConfig
) -> TargetConfig:
    """Read a model's own config from its config.json and its tensors' names, which may be none."""
    check_options(overrides, METHOD)
    if is_head(config, names):
        raise ConfigError(
            f"method {METHOD!r}: expected a whole model, got a draft head, whose method is read "
            "from its files where none is named"
        )
    return models.config_from_hf(config)


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> DraftModelConfig:
    """Read the config of a model that drafts for a target; shapes may be empty."""
    return drafts_for(model_from_checkpoint(config, shapes, overrides), target)


def param_specs(cfg: DraftModelConfig) -> Params:
    """Return the model's own weights."""
    return models.family(cfg.model).param_specs(cfg.model)


def ignored_tensor(cfg: DraftModelConfig, name: str) -> bool:
    """Return whether a tensor of the checkpoint is not a weight of the model."""
    return models.family(cfg.model).ignored_tensor(cfg.model, name)


def forward(
    params: Params, cfg: DraftModelConfig, tokens: jax.Array, pass_: Pass, caches: KVCache
) -> tuple[jax.Array, KVCache]:
    """Run the model over tokens int32 [batch, rows], ids of the target.

    Returns the head's input [batch, rows, D], and the caches with these rows written. The target
    may sample an id that a narrower draft has no row for; any row serves, since it is no token.
    """
    if cfg.maps_vocabulary:
        tokens = jnp.minimum(tokens, cfg.draft_vocab_size - 1)
    out = models.family(cfg.model).forward(params, cfg.model, tokens, pass_, caches)
    return out.hidden, out.caches


def logits(params: Params, cfg: DraftModelConfig, head_input: jax.Array, ops: Ops) -> jax.Array:
    """Return float32 logits [..., draft_vocab] of head_input [..., D], by the model's own head."""
    return models.family(cfg.model).logits(params, cfg.model, head_input, ops)


# Default of DraftFamily.
canonical_name = same_name
