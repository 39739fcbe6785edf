"""A dense decoder layer, target's or draft's: attention, then the MLP."""

from __future__ import annotations

from typing import Any

import jax

from jaxspec.cache.arrays import FullCache
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import REFERENCE_KERNELS, AttentionConfig, Kernels
from jaxspec.layers.attention import RopeTables, attend, biased_product
from jaxspec.layers.params import Params
from jaxspec.layers.products import ResidualStream, add_mlp, add_product, pick_row, values_of


def dense_layer(
    layer: Params,
    cfg: AttentionConfig,
    eps: float,
    x: jax.Array | ResidualStream,
    rope: RopeTables,
    metadata: AttentionMetadata,
    cache: FullCache,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    residual: jax.Array | ResidualStream,
    next_norm: jax.Array | None = None,
    last_row: jax.Array | None = None,
    **options: Any,
) -> tuple[ResidualStream, FullCache]:
    """residual + attention of x [batch, rows, in], then the MLP; and the cache with these rows written.

    last_row: int32 [batch], the only row whose result is made, [batch, 1, D]; keys and values are written for all.

    eps: of the MLP's norm. options: attend's (norm, window). The result is prepared for the norm of gain next_norm, the next layer's, if
    that is given and the kernels of product and norm are chosen (see add_product).
    """
    attention = layer["self_attn"]
    attended, cache = attend(attention, cfg, x, rope, metadata, cache, kernels, **options)
    residual, attended = pick_row(values_of(residual), last_row), pick_row(attended, last_row)
    if cfg.o_bias:
        added = biased_product(attended, (attention["o_proj"],), attention["o_bias"], kernels)
        stream = ResidualStream(residual + added)
    else:
        stream = add_product(
            residual,
            attended,
            attention["o_proj"],
            kernels,
            next_norm=layer["post_attention_layernorm"],
        )
    return add_mlp(layer, eps, stream, kernels, next_norm=next_norm), cache
