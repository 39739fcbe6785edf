"""DeepSeek-V4's module of multi-token prediction, over the target's residual streams.

It is a layer of the target's kind without compression. The layer reads the sum of two terms, as in
DeepSeek's own inference code: each stream, normed and projected, and the next token's embedding,
normed and projected. The layer's streams, unchanged, are the next step's hidden state. For the
target's head they are collapsed to one by the module's own weights, then normed. (DeepSeek-V3's
module, drafts/mtp.py, feeds back the output of its final norm instead.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.cache.arrays import KVCache
from jaxspec.config import (
    CacheGroup,
    CompressedAttentionConfig,
    ConfigError,
    SpeculativeConfig,
    check_options,
)
from jaxspec.drafts.family import (
    DraftOutput,
    ShapedLikeTarget,
    Shapes,
    head_logits,
    keep_aux,
    keep_features,
    same_name,
)
from jaxspec.layers.context import Pass
from jaxspec.layers.embedding import embed
from jaxspec.layers.hyper_connections import collapse, head_specs
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import Params, projection, vector
from jaxspec.layers.products import project
from jaxspec.layers.rope import rope_tables
from jaxspec.models import TargetConfig, deepseek_v4
from jaxspec.models.deepseek_v4 import SLIDING, DeepseekV4Config

MODEL_TYPE = "deepseek_v4"
PREFIX = "mtp.0"


@dataclass(frozen=True)
class DeepseekV4MtpConfig(ShapedLikeTarget):
    """Static shape of the module: the target's, and one switch of its own.

    zero_first_embedding: see mtp.MtpLayout
    """

    target: DeepseekV4Config
    zero_first_embedding: bool = False
    method: str = "mtp_deepseek_v4"
    num_layers: int = 1
    tied_lm_head: bool = False

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Boundary id of the target's residual streams before they are collapsed."""
        return (self.target.num_layers,)

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """The target's group of layers with a window alone."""
        return self.target.cache_groups(block_size, max_model_len)[1:]

    @property
    def attention(self) -> CompressedAttentionConfig:
        return replace(self.target.attention, layer_types=(SLIDING,))

    @property
    def sliding_window(self) -> int:
        return self.target.attention.sliding_window


def param_specs(cfg: DeepseekV4MtpConfig) -> Params:
    """Return the weights by the names of the target's checkpoint."""
    hidden = cfg.hidden_size
    return {
        "embedding_norm": vector(f"{PREFIX}.enorm.weight", hidden),
        "hidden_norm": vector(f"{PREFIX}.hnorm.weight", hidden),
        "embedding_projection": projection(
            f"{PREFIX}.e_proj.weight", hidden, hidden, (None, "embed")
        ),
        "hidden_projection": projection(f"{PREFIX}.h_proj.weight", hidden, hidden, (None, "embed")),
        "layers": [deepseek_v4.layer_specs(cfg.target, PREFIX)],
        "head": head_specs(f"{PREFIX}.hc_head", cfg.target.residual, hidden),
        "norm": vector(f"{PREFIX}.norm.weight", hidden),
    }


def ignored_tensor(cfg: DeepseekV4MtpConfig, name: str) -> bool:
    """Ignore the target's own tensors, and other modules."""
    return not name.startswith(f"{PREFIX}.")


def forward(
    params: Params,
    cfg: DeepseekV4MtpConfig,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: KVCache,
) -> DraftOutput:
    """Run the draft once over tokens [batch, rows] and hidden [batch, rows, streams * D].

    A row's token is the one after the row's position.
    """
    target, eps, ops = cfg.target, cfg.target.rms_norm_eps, pass_.ops
    embedded = embed(tokens, params["embed_tokens"], ops).astype(hidden.dtype)
    if cfg.zero_first_embedding:
        zero = jnp.zeros((), embedded.dtype)
        embedded = jnp.where(pass_.positions[..., None] == 0, zero, embedded)
    norm = Norm(params["embedding_norm"], eps)
    embedded = project(embedded, (params["embedding_projection"],), ops, norm=norm)
    streams = hidden.reshape(*tokens.shape, target.residual.streams, -1)
    norm = Norm(params["hidden_norm"], eps)
    streams = project(streams, (params["hidden_projection"],), ops, norm=norm)
    x = streams + embedded[:, :, None]
    attention = target.attention
    rope = rope_tables(attention.rope, attention.rope_head_dim, pass_.positions)
    x, cache = deepseek_v4.decoder_layer(
        params["layers"][0],
        target,
        SLIDING,
        x,
        tokens,
        caches[0],
        replace(pass_, rope=rope),
        group=0,
    )
    collapsed = collapse(params["head"], target.residual, x)
    head_input = rms_norm(collapsed, params["norm"], eps, ops)
    return DraftOutput(head_input, x.reshape(*x.shape[:2], -1), (cache,))


# Defaults of DraftFamily.
canonical_name = same_name
fuse = keep_features
logits = head_logits
target_hidden = keep_aux


def config_from_checkpoint(
    config: Mapping[str, Any], shapes: Shapes, target: TargetConfig, overrides: SpeculativeConfig
) -> DeepseekV4MtpConfig:
    """Read the config from the target's own config.json."""
    check_options(overrides, "mtp")
    if not isinstance(target, DeepseekV4Config):
        raise ConfigError(
            "method 'mtp': expected the target's own checkpoint (model_type "
            f"{target.model_type!r}), got {MODEL_TYPE!r}"
        )
    if not any(name.startswith(f"{PREFIX}.") for name in shapes):
        raise ConfigError(
            f"method 'mtp': expected tensors {PREFIX}.* in the checkpoint, got none (some are "
            "published without)"
        )
    return DeepseekV4MtpConfig(target, bool(overrides.mtp_zero_first_embedding))
