"""Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2), from the target's checkpoint.

Row p pairs the target's hidden state of position p, after the final norm, with token p+1. Both are
normed, joined and projected, and go through one decoder layer of the target's kind. The target's
head reads the normed output, which is also the next step's hidden state. So one module drafts every
token of a round. (If the output is fed back before that norm, drafts beyond the first are hardly
ever accepted: vLLM PR #45895.)
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
from jaxspec.drafts.family import (
    DraftOutput,
    ShapedLikeTarget,
    Shapes,
    head_logits,
    keep_features,
    keep_hidden,
    same_name,
)
from jaxspec.layers.context import Pass
from jaxspec.layers.embedding import embed
from jaxspec.layers.norms import rms_norm
from jaxspec.layers.params import Params, projection, vector
from jaxspec.layers.products import project
from jaxspec.layers.quantized import stored
from jaxspec.models import TargetConfig, deepseek_v3, glm4_moe_lite, mimo
from jaxspec.models.family import FamilyWithMtp


@dataclass(frozen=True)
class MtpLayout:
    """Names and conventions of the module in a family's checkpoint.

    The layer's own tensors have the target's names.

    prefix:               prefix of its tensors, with {n} for the target's number of layers
    embedding_norm:       name of the embedding's norm, after the prefix
    hidden_norm:          name of the hidden state's norm
    projection:           name of the projection of both
    output_norm:          name of the output's norm
    shared:               copies of the target's embedding and head, which are not read; they may be
                          absent
    hidden_first:         the projection reads [hidden, embedding] instead of [embedding, hidden]
    zero_first_embedding: the row of position 0 has no embedding; one cache entry per request
                          depends on it. vLLM does so for all three families, SGLang for MiMo only,
                          transformers for none.
    """

    prefix: str
    embedding_norm: str
    hidden_norm: str
    projection: str
    output_norm: str
    shared: tuple[str, ...] = ()
    hidden_first: bool = False
    zero_first_embedding: bool = False


DEEPSEEK = MtpLayout(
    "model.layers.{n}",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    ("embed_tokens", "shared_head.head"),
)
LAYOUTS = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "mimo": MtpLayout(
        "model.mtp_layers.0",
        "token_layernorm",
        "hidden_layernorm",
        "input_proj",
        "final_layernorm",
        hidden_first=True,
        zero_first_embedding=True,
    ),
}

FAMILIES: dict[str, FamilyWithMtp] = {
    "deepseek_v3": deepseek_v3,
    "glm4_moe_lite": glm4_moe_lite,
    "mimo": mimo,
}


@dataclass(frozen=True)
class MtpConfig(ShapedLikeTarget):
    """Static shape of the module: the target's, and one switch of its own."""

    target: TargetConfig
    zero_first_embedding: bool
    method: str = "mtp"
    num_layers: int = 1
    aux_layers: tuple[int, ...] = ()  # it reads the target's last hidden state
    sliding_window: int | None = None

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """The target's one group."""
        return self.target.cache_groups(block_size, max_model_len)

    @property
    def layout(self) -> MtpLayout:
        return LAYOUTS[self.target.model_type]

    @property
    def prefix(self) -> str:
        """Prefix of the module's tensors in the checkpoint."""
        return self.layout.prefix.format(n=self.target.num_layers)

    @property
    def tied_lm_head(self) -> bool:
        return self.target.tie_word_embeddings


def param_specs(cfg: MtpConfig) -> Params:
    """Return the weights by the names of the target's checkpoint."""
    prefix, names, hidden = cfg.prefix, cfg.layout, cfg.hidden_size
    specs = {
        "embedding_norm": vector(f"{prefix}.{names.embedding_norm}.weight", hidden),
        "hidden_norm": vector(f"{prefix}.{names.hidden_norm}.weight", hidden),
        "projection": projection(
            f"{prefix}.{names.projection}.weight", 2 * hidden, hidden, (None, "embed")
        ),
        "layers": [FAMILIES[cfg.target.model_type].layer_specs(cfg.target, prefix)],
        "norm": vector(f"{prefix}.{names.output_norm}.weight", hidden),
    }
    return stored(
        specs, getattr(cfg.target, "quantization", None), num_kv_heads=cfg.attention.num_kv_heads
    )


def ignored_tensor(cfg: MtpConfig, name: str) -> bool:
    """Ignore the target's own tensors, other modules, and copies of shared arrays."""
    prefix = f"{cfg.prefix}."
    shared = [f"{prefix}{each}.weight" for each in cfg.layout.shared]
    return not name.startswith(prefix) or name in shared


def forward(
    params: Params,
    cfg: MtpConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: KVCache,
) -> DraftOutput:
    """Run the draft once over tokens [batch, rows] and hidden [batch, rows, D].

    A row's token is the one after the row's position.
    """
    pass_, ops = pass_.with_rope(cfg.attention), pass_.ops
    embedded = embed(tokens, params["embed_tokens"], ops).astype(hidden.dtype)
    if cfg.zero_first_embedding:
        zero = jnp.zeros((), embedded.dtype)
        embedded = jnp.where(pass_.positions[..., None] == 0, zero, embedded)
    embedded = rms_norm(embedded, params["embedding_norm"], cfg.rms_norm_eps, ops)
    hidden = rms_norm(hidden, params["hidden_norm"], cfg.rms_norm_eps, ops)
    pair = [hidden, embedded] if cfg.layout.hidden_first else [embedded, hidden]
    x = project(jnp.concatenate(pair, axis=-1), (params["projection"],), ops)
    decoder_layer = FAMILIES[cfg.target.model_type].decoder_layer
    x, cache = decoder_layer(params["layers"][0], cfg.target, x, caches[0], pass_)
    normed = rms_norm(x, params["norm"], cfg.rms_norm_eps, ops)
    return DraftOutput(normed, normed, (cache,))


# Defaults of DraftFamily.
canonical_name = same_name
fuse = keep_features
logits = head_logits
target_hidden = keep_hidden


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> MtpConfig:
    """Read the config from the target's own config.json."""
    check_options(overrides, "mtp")
    if target.model_type not in LAYOUTS:
        raise ConfigError(
            f"method 'mtp': expected a target of model_type {', '.join(LAYOUTS)}, got "
            f"{target.model_type!r}"
        )
    if config.get("model_type") != target.model_type:
        raise ConfigError(
            "method 'mtp': expected the target's own checkpoint (model_type "
            f"{target.model_type!r}), got {config.get('model_type')!r}"
        )
    zeroed = overrides.mtp_zero_first_embedding
    cfg = MtpConfig(
        target, LAYOUTS[target.model_type].zero_first_embedding if zeroed is None else zeroed
    )
    if not any(name.startswith(f"{cfg.prefix}.") for name in shapes):
        raise ConfigError(
            f"method 'mtp': expected tensors {cfg.prefix}.* in the checkpoint, got none (some "
            "are published without)"
        )
    return cfg
