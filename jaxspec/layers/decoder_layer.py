"""A decoder layer with full attention, target's or draft's: its attention block, a dense layer."""

from __future__ import annotations

from jaxspec.cache.arrays import FullCache
from jaxspec.config import AttentionConfig
from jaxspec.layers.attention import attend
from jaxspec.layers.context import Pass
from jaxspec.layers.mlp import add_mlp, mlp_norm
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Params
from jaxspec.layers.products import ResidualStream, Stream, add_projection, pick_row, values_of
from pallas_kernels.traced_once import traced_once


def add_attention(
    layer: Params,
    cfg: AttentionConfig,
    x: Stream,
    cache: FullCache,
    pass_: Pass,
    *,
    norm: Norm | None,
    residual: Stream,
    group: int = 0,
    window: int | None = None,
    next_norm: Norm | None = None,
) -> tuple[ResidualStream, FullCache]:
    """Return residual + attention of x [batch, rows, in], and the cache with these rows written.

    norm:          norm of x before the projections; None if x is normed
    group, window: see attend
    next_norm:     the norm that follows attention (see add_projection)
    """
    attention = layer["self_attn"]
    attended, cache = attend(attention, cfg, x, cache, pass_, norm=norm, group=group, window=window)
    stream = add_projection(
        pick_row(values_of(residual), pass_.last_row),
        pick_row(attended, pass_.last_row),
        attention["o_proj"],
        pass_.ops,
        bias=attention["o_bias"] if cfg.o_bias else None,
        next_norm=next_norm,
    )
    return stream, cache


@traced_once("cfg", "eps", "group", "window")
def dense_layer(
    layer: Params,
    cfg: AttentionConfig,
    eps: float,
    x: Stream,
    cache: FullCache,
    pass_: Pass,
    *,
    norm: Norm | None,
    residual: Stream,
    group: int = 0,
    window: int | None = None,
    next_norm: Norm | None = None,
) -> tuple[ResidualStream, FullCache]:
    """Run a layer: residual + attention of x [batch, rows, in], then the MLP.

    Returns the stream, and the cache with these rows written.

    eps:           epsilon of the MLP's norm
    norm:          norm of x before the projections of attention; None if x is normed
    group, window: see attend
    next_norm:     the norm that follows the layer (see add_projection)
    """
    stream, cache = add_attention(
        layer,
        cfg,
        x,
        cache,
        pass_,
        norm=norm,
        residual=residual,
        group=group,
        window=window,
        next_norm=mlp_norm(layer, eps),
    )
    return add_mlp(layer, eps, stream, pass_.ops, next_norm=next_norm), cache
