"""Multi-token prediction (DeepSeek-V3, 2412.19437, section 2.2): the module that a checkpoint brings for its own target.

Row p pairs the target's hidden state of position p, after the final norm, with token p+1. Both are normed, joined and projected, and go
through one decoder layer of the target's kind. Its output, normed, is what the target's head reads and the next step's hidden state: one
module drafts every token of a round. (Fed back before that norm, drafts beyond the first are hardly ever accepted: vLLM PR #45895.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec import models
from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import (
    REFERENCE_KERNELS,
    AttentionConfig,
    CacheGroup,
    ConfigError,
    Kernels,
    MLAConfig,
    SpeculativeConfig,
)
from jaxspec.drafts.layer import DraftOutput, Shapes, refuse_eagle3_switches
from jaxspec.layers.params import Params, matrix, vector
from jaxspec.layers.products import product, rms_norm, rope_tables, vocab_logits
from jaxspec.models import TargetConfig


@dataclass(frozen=True)
class MtpLayout:
    """How a family's checkpoint holds the module.

    prefix: of its tensors, with {n} for the target's number of layers. The names of its own four tensors follow; the layer's are the
    target's. shared: copies of the target's embedding and head that may be there and are not read.
    hidden_first: the projection reads [hidden, embedding] instead of [embedding, hidden].
    zero_first_embedding: the row of position 0 has no embedding. vLLM does so for all three families, SGLang for MiMo only, transformers
    for none. One cache entry a request depends on it.
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


@dataclass(frozen=True)
class MtpConfig:
    """Static shape of the module: everything but its own switch is the target's."""

    target: TargetConfig
    zero_first_embedding: bool
    method: str = "mtp"
    num_layers: int = 1
    aux_layers: tuple[int, ...] = ()  # it reads the target's last hidden state
    sliding_window: int | None = None
    maps_vocabulary: bool = False

    def cache_groups(self, block_size: int, max_model_len: int) -> CacheGroup:
        """The draft's own group."""
        return self.target.cache_groups(block_size, max_model_len)

    @property
    def layout(self) -> MtpLayout:
        return LAYOUTS[self.target.model_type]

    @property
    def prefix(self) -> str:
        """Of the module's tensors in the checkpoint."""
        return self.layout.prefix.format(n=self.target.num_layers)

    @property
    def attention(self) -> AttentionConfig | MLAConfig:
        return self.target.attention

    @property
    def hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.target.intermediate_size

    @property
    def rms_norm_eps(self) -> float:
        return self.target.rms_norm_eps

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def tied_lm_head(self) -> bool:
        return self.target.tie_word_embeddings


def param_specs(cfg: MtpConfig) -> Params:
    """The weights, by the names of the target's checkpoint."""
    prefix, names, hidden = cfg.prefix, cfg.layout, cfg.hidden_size
    return {
        "embedding_norm": vector(f"{prefix}.{names.embedding_norm}.weight", hidden),
        "hidden_norm": vector(f"{prefix}.{names.hidden_norm}.weight", hidden),
        "projection": matrix(
            f"{prefix}.{names.projection}.weight", 2 * hidden, hidden, (None, "embed")
        ),
        "layers": [models.family(cfg.target).layer_specs(cfg.target, prefix)],
        "norm": vector(f"{prefix}.{names.output_norm}.weight", hidden),
    }


def ignored_tensor(cfg: MtpConfig, name: str) -> bool:
    """The target's own tensors, other modules, and copies of what target and draft share."""
    prefix = f"{cfg.prefix}."
    if not name.startswith(prefix) or name in [
        f"{prefix}{shared}.weight" for shared in cfg.layout.shared
    ]:
        return True
    return getattr(cfg.target, "float8", False) and name.endswith(
        "_scale_inv"
    )  # read with what they scale


def target_hidden(cfg: MtpConfig, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
    """What the draft keeps of the target's pass: its hidden state after the final norm [batch, rows, D]."""
    return hidden


def fuse(
    params: Params, cfg: MtpConfig, hidden: jax.Array, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """The target's hidden state is used as it is; the projection follows in `forward`, together with the embedding."""
    return hidden


def forward(
    params: Params,
    cfg: MtpConfig,
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
    if cfg.zero_first_embedding:
        embedded = jnp.where(
            metadata.positions[..., None] == 0, jnp.zeros((), embedded.dtype), embedded
        )
    embedded = rms_norm(embedded, params["embedding_norm"], cfg.rms_norm_eps, kernels)
    hidden = rms_norm(hidden, params["hidden_norm"], cfg.rms_norm_eps, kernels)
    joined = jnp.concatenate(
        [hidden, embedded] if cfg.layout.hidden_first else [embedded, hidden], axis=-1
    )
    x = product(joined, (params["projection"],), kernels)
    rope = rope_tables(cfg.attention.rope, cfg.attention.rope_dim, metadata.positions)
    decoder_layer = models.family(cfg.target).decoder_layer
    x, cache = decoder_layer(
        params["layers"][0], cfg.target, x, rope, metadata, caches[0], kernels, last_row=last_row
    )
    normed = rms_norm(x, params["norm"], cfg.rms_norm_eps, kernels)
    return DraftOutput(normed, normed, (cache,))


def logits(
    params: Params, cfg: MtpConfig, head_input: jax.Array, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """Float32 logits [..., vocab] of head_input [..., D], by the target's head."""
    return vocab_logits(head_input, params["lm_head"], kernels, tied=cfg.tied_lm_head)


def canonical_name(name: str) -> str:
    """The names are the target's checkpoint's."""
    return name


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> MtpConfig:
    """From the target's own config.json."""
    refuse_eagle3_switches(overrides, "mtp")
    if target.model_type not in LAYOUTS:
        raise ConfigError(
            f"method 'mtp': expected a target of model_type {', '.join(LAYOUTS)}, got {target.model_type!r}"
        )
    if config.get("model_type") != target.model_type:
        raise ConfigError(
            f"method 'mtp': expected the target's own checkpoint (model_type {target.model_type!r}), got {config.get('model_type')!r}"
        )
    zeroed = overrides.mtp_zero_first_embedding
    cfg = MtpConfig(
        target, LAYOUTS[target.model_type].zero_first_embedding if zeroed is None else zeroed
    )
    if not any(name.startswith(f"{cfg.prefix}.") for name in shapes):
        raise ConfigError(
            f"method 'mtp': expected tensors {cfg.prefix}.* in the checkpoint, got none (some are published without)"
        )
    return cfg
