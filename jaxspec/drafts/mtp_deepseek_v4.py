"""DeepSeek-V4's module of multi-token prediction: a layer of the target's that compresses nothing, over the target's residual streams.

As DeepSeek's own inference code: each stream, normed and projected, plus the embedding of the next token, normed and projected. The
layer's streams are the next step's hidden state as they are; collapsed to one by weights of the module's own, then normed, they are what
the target's head reads. (Unlike DeepSeek-V3's, drafts/mtp.py, which feeds back what its final norm gives.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import (
    REFERENCE_KERNELS,
    CacheGroup,
    CompressedAttentionConfig,
    ConfigError,
    Kernels,
    SpeculativeConfig,
)
from jaxspec.drafts.layer import DraftOutput, Shapes, refuse_eagle3_switches
from jaxspec.layers.hyper_connections import collapse, head_specs
from jaxspec.layers.params import Params, matrix, vector
from jaxspec.layers.products import product, rms_norm, rope_tables, vocab_logits
from jaxspec.models import TargetConfig, deepseek_v4
from jaxspec.models.deepseek_v4 import SLIDING, DeepseekV4Config

MODEL_TYPE = "deepseek_v4"
PREFIX = "mtp.0"


@dataclass(frozen=True)
class DeepseekV4MtpConfig:
    """Static shape of the module: everything but its own switch is the target's. zero_first_embedding: see mtp.MtpLayout."""

    target: DeepseekV4Config
    zero_first_embedding: bool = False
    method: str = "mtp_deepseek_v4"
    num_layers: int = 1
    maps_vocabulary: bool = False
    tied_lm_head: bool = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """It reads the target's residual streams before they are collapsed."""
        return (self.target.num_layers,)

    def cache_groups(self, block_size: int, max_model_len: int) -> CacheGroup:
        """The draft's own group: its layer's window."""
        return self.target.cache_groups(block_size, max_model_len)[1]

    @property
    def attention(self) -> CompressedAttentionConfig:
        return replace(self.target.attention, layer_types=(SLIDING,))

    @property
    def sliding_window(self) -> int:
        return self.target.attention.sliding_window

    @property
    def hidden_size(self) -> int:
        return self.target.hidden_size

    @property
    def intermediate_size(self) -> int:
        return self.target.intermediate_size

    @property
    def vocab_size(self) -> int:
        return self.target.vocab_size

    @property
    def draft_vocab_size(self) -> int:
        return self.target.vocab_size


def param_specs(cfg: DeepseekV4MtpConfig) -> Params:
    """The weights, by the names of the target's checkpoint."""
    hidden = cfg.hidden_size
    return {
        "embedding_norm": vector(f"{PREFIX}.enorm.weight", hidden),
        "hidden_norm": vector(f"{PREFIX}.hnorm.weight", hidden),
        "embedding_projection": matrix(f"{PREFIX}.e_proj.weight", hidden, hidden, (None, "embed")),
        "hidden_projection": matrix(f"{PREFIX}.h_proj.weight", hidden, hidden, (None, "embed")),
        "layers": [deepseek_v4.layer_specs(cfg.target, PREFIX)],
        "head": head_specs(f"{PREFIX}.hc_head", cfg.target.residual, hidden),
        "norm": vector(f"{PREFIX}.norm.weight", hidden),
    }


def ignored_tensor(cfg: DeepseekV4MtpConfig, name: str) -> bool:
    """The target's own tensors, and other modules."""
    return not name.startswith(f"{PREFIX}.")


def target_hidden(cfg: DeepseekV4MtpConfig, hidden: jax.Array, aux: jax.Array | None) -> jax.Array:
    """What the draft keeps of the target's pass: its residual streams side by side [batch, rows, streams * D]."""
    assert aux is not None
    return aux


def fuse(
    params: Params,
    cfg: DeepseekV4MtpConfig,
    hidden: jax.Array,
    kernels: Kernels = REFERENCE_KERNELS,
) -> jax.Array:
    """The target's streams are used as they are; the projections follow in `forward`."""
    return hidden


def forward(
    params: Params,
    cfg: DeepseekV4MtpConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    metadata: AttentionMetadata,
    caches: KVCache,
    *,
    kernels: Kernels = REFERENCE_KERNELS,
    last_row: jax.Array | None = None,
) -> DraftOutput:
    """One pass over tokens [batch, rows] (each the one after its row's position) and hidden [batch, rows, streams * D].

    last_row: see DraftOutput.
    """
    target, eps = cfg.target, cfg.target.rms_norm_eps
    embedded = params["embed_tokens"][tokens].astype(hidden.dtype)
    if cfg.zero_first_embedding:
        embedded = jnp.where(
            metadata.positions[..., None] == 0, jnp.zeros((), embedded.dtype), embedded
        )
    embedded = product(
        embedded, (params["embedding_projection"],), kernels, norm=params["embedding_norm"], eps=eps
    )
    streams = hidden.reshape(*tokens.shape, target.residual.streams, -1)
    streams = product(
        streams, (params["hidden_projection"],), kernels, norm=params["hidden_norm"], eps=eps
    )
    x = streams + embedded[:, :, None]
    rope = rope_tables(target.attention.rope, target.attention.rope_head_dim, metadata.positions)
    x, cache = deepseek_v4.decoder_layer(
        params["layers"][0],
        target,
        SLIDING,
        x,
        tokens,
        rope,
        metadata,
        caches[0],
        kernels,
        last_row=last_row,
    )
    head_input = rms_norm(
        collapse(params["head"], target.residual, x), params["norm"], eps, kernels
    )
    return DraftOutput(head_input, x.reshape(*x.shape[:2], -1), (cache,))


def logits(
    params: Params,
    cfg: DeepseekV4MtpConfig,
    head_input: jax.Array,
    kernels: Kernels = REFERENCE_KERNELS,
) -> jax.Array:
    """Float32 logits [..., vocab] of head_input [..., D], by the target's head."""
    return vocab_logits(head_input, params["lm_head"], kernels, tied=cfg.tied_lm_head)


def canonical_name(name: str) -> str:
    """The names are the target's checkpoint's."""
    return name


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> DeepseekV4MtpConfig:
    """From the target's own config.json."""
    refuse_eagle3_switches(overrides, "mtp")
    if not isinstance(target, DeepseekV4Config):
        raise ConfigError(
            f"method 'mtp': expected the target's own checkpoint (model_type {target.model_type!r}), got {MODEL_TYPE!r}"
        )
    if not any(name.startswith(f"{PREFIX}.") for name in shapes):
        raise ConfigError(
            f"method 'mtp': expected tensors {PREFIX}.* in the checkpoint, got none (some are published without)"
        )
    return DeepseekV4MtpConfig(target, bool(overrides.mtp_zero_first_embedding))
