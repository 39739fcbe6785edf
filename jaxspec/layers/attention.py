"""One self-attention layer, target's or draft's: project, rotate, write keys and values, attend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec.cache.arrays import FullCache
from jaxspec.config import AttentionConfig, MLAConfig, Ops
from jaxspec.layers.context import Pass
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import (
    AnyWeight,
    AssembledSpec,
    Params,
    ParamSpec,
    joined,
    matrix,
    projection,
    side_by_side,
    vector,
    weight,
)
from jaxspec.layers.products import Stream, project
from jaxspec.layers.row_tiles import in_tiles
from pallas_kernels import attention as attention_op
from pallas_kernels import rope_cache as rope_op

KV_SCALES = ("k_scale", "v_scale")  # of a layer whose checkpoint has scales for fp8 caches


def attention_specs(
    prefix: str, cfg: AttentionConfig, input_size: int, output_size: int
) -> dict[str, Any]:
    """Return the layer's weights under `prefix` ("...self_attn").

    An EAGLE-3 layer has inputs of width 2D and outputs of width D.
    """
    heads, kv_heads, head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    q_size, kv_size = heads * head_dim, kv_heads * head_dim

    def rotated(part: str, count: int, axis: str) -> ParamSpec:
        name = f"{prefix}.{part}_proj.weight"
        return rotated_matrix(name, input_size, count, 0, cfg, ("embed", axis))

    q, k = rotated("q", heads, "heads"), rotated("k", kv_heads, "kv_heads")
    v = matrix(f"{prefix}.v_proj.weight", input_size, kv_size, ("embed", "kv_heads"))
    specs: dict[str, Any] = {
        "qkv_proj": weight(joined(f"{prefix}.{{q,k,v}}_proj.weight", (q, k, v))),
        "o_proj": projection(f"{prefix}.o_proj.weight", q_size, output_size, ("head_out", "embed")),
    }
    if cfg.qkv_bias:
        assert not cfg.rope_interleave  # no family has both
        biases = (
            vector(f"{prefix}.q_proj.bias", q_size, "heads"),
            vector(f"{prefix}.k_proj.bias", kv_size, "kv_heads"),
            vector(f"{prefix}.v_proj.bias", kv_size, "kv_heads"),
        )
        specs["qkv_bias"] = joined(f"{prefix}.{{q,k,v}}_proj.bias", biases)
    if cfg.o_bias:
        specs["o_bias"] = vector(f"{prefix}.o_proj.bias", output_size)
    if cfg.qk_norm:
        specs["q_norm"] = vector(f"{prefix}.q_norm.weight", head_dim)
        specs["k_norm"] = vector(f"{prefix}.k_norm.weight", head_dim)
    if cfg.sinks:
        specs["sinks"] = ParamSpec(f"{prefix}.sinks", (heads,), ("heads",), dtype="float32")
    return specs


def project_qkv(
    params: Params, cfg: AttentionConfig, x: Stream, ops: Ops, *, norm: Norm | None
) -> jax.Array:
    """Project (the norm of) x [batch, rows, in] to queries, keys and values, side by side.

    Returns [batch, rows, (num_heads + 2 num_kv_heads) head_dim].
    """
    bias = params["qkv_bias"] if cfg.qkv_bias else None
    return project(x, qkv_weights(params), ops, norm=norm, bias=bias)


def qkv_weights(params: Params) -> tuple[AnyWeight, ...]:
    """Return the projections to queries, keys and values: one matrix, or several side by side."""
    return side_by_side(params["qkv_proj"])


def rotated_matrix(
    name: str,
    depth: int,
    num_heads: int,
    before: int,
    cfg: AttentionConfig | MLAConfig,
    axes: tuple[str | None, str | None],
) -> ParamSpec:
    """Return a projection whose output has rotated dimensions.

    Each head of the output has `before` plain dimensions, and then the rotated ones as halves.
    """
    width = num_heads * (before + cfg.rope_dim)
    if not cfg.rope_interleave:
        return matrix(name, depth, width, axes)
    order = partial(halves_of_pairs, num_heads=num_heads, before=before)
    return AssembledSpec(name, (depth, width), axes, sources=((name, (width, depth)),), build=order)


def halves_of_pairs(arrays: Sequence[np.ndarray], *, num_heads: int, before: int) -> np.ndarray:
    """Reorder each head's rows after `before`, and transpose [out, in] to [in, out].

    The rows are rotated as pairs (0, 1), (2, 3), ... in the checkpoint, and as halves here.
    """
    (array,) = arrays
    per_head = array.reshape(num_heads, -1, *array.shape[1:])
    ordered = np.concatenate(
        [per_head[:, :before], per_head[:, before::2], per_head[:, before + 1 :: 2]], axis=1
    )
    return ordered.reshape(array.shape).T


def attend(
    params: Params,
    cfg: AttentionConfig,
    x: Stream,
    cache: FullCache,
    pass_: Pass,
    *,
    norm: Norm | None,
    group: int = 0,
    window: int | None = None,
    query_scale: jax.Array | None = None,
) -> tuple[jax.Array, FullCache]:
    """Run attention on (the norm of) x [batch, rows, in].

    norm: the norm before the projections; None if x is normed. The other arguments, and what is
    returned, are attend_qkv's.
    """
    qkv = project_qkv(params, cfg, x, pass_.ops, norm=norm)
    return attend_qkv(
        params, cfg, qkv, cache, pass_, group=group, window=window, query_scale=query_scale
    )


def write_keys(
    params: Params,
    cfg: AttentionConfig,
    kv: jax.Array,
    cache: FullCache,
    pass_: Pass,
    *,
    group: int = 0,
) -> FullCache:
    """Rotate keys and write keys and values of rows that have no queries.

    kv:    [batch, rows, 2 num_kv_heads head_dim], keys and values side by side
    group: index of the layer's KV-cache group in the pass's metadata
    """
    assert pass_.rope is not None
    batch, rows = kv.shape[:2]
    cos, sin = (table.reshape(batch * rows, -1) for table in pass_.rope)
    k_norm = params["k_norm"] if cfg.qk_norm else None
    k_scale, v_scale = _cache_scales(params, cache)
    projected = rope_op.Inputs(
        qkv=kv.reshape(batch * rows, -1),
        cos=cos,
        sin=sin,
        slot_mapping=pass_.metadata[group].slot_mapping.reshape(-1),
        k_cache=cache.k,
        v_cache=cache.v,
        q_norm=k_norm,  # of no query
        k_norm=k_norm,
        k_scale=k_scale,
        v_scale=v_scale,
        num_heads=0,
        eps=cfg.rms_norm_eps,
    )
    _, k, v = rope_op.rope_and_write(projected, implementation=pass_.ops.rope_cache)
    return FullCache(k, v)


def _cache_scales(params: Params, cache: FullCache) -> tuple[jax.Array | None, jax.Array | None]:
    """Return a checkpoint's scales of keys and values; None for a cache that is not in fp8."""
    is_fp8 = cache.k.dtype.itemsize == 1
    k_scale, v_scale = (params.get(name) if is_fp8 else None for name in KV_SCALES)
    return k_scale, v_scale


def attend_qkv(
    params: Params,
    cfg: AttentionConfig,
    qkv: jax.Array,
    cache: FullCache,
    pass_: Pass,
    *,
    group: int = 0,
    window: int | None = None,
    query_scale: jax.Array | None = None,
) -> tuple[jax.Array, FullCache]:
    """Rotate queries and keys, write keys and values, and attend.

    qkv:         [batch, rows, (num_heads + 2 num_kv_heads) head_dim], as project_qkv returns it
    group:       index of the layer's KV-cache group in the pass's metadata
    window:      the most keys that a row of this group sees; None for all
    query_scale: [batch, rows], factor of the queries

    Returns [batch, rows, num_heads * head_dim], and the cache with these rows written.
    """
    assert pass_.rope is not None
    ops, metadata, flat = pass_.ops, pass_.metadata[group], pass_.flat
    batch, rows = qkv.shape[:2]
    cos, sin = (table.reshape(batch * rows, -1) for table in pass_.rope)
    requests, request_rows = metadata.positions.shape
    packed = query_scale is None and attention_op.packs(
        ops.attention, rows=request_rows, queries_per_kv=cfg.num_heads // cfg.num_kv_heads
    )
    # Packed queries go to their requests in the rope kernel, and results come back in attention's.
    places = flat if packed else None
    k_scale, v_scale = _cache_scales(params, cache)
    projected = rope_op.Inputs(
        qkv=qkv.reshape(batch * rows, -1),
        cos=cos,
        sin=sin,
        slot_mapping=metadata.slot_mapping.reshape(-1),
        k_cache=cache.k,
        v_cache=cache.v,
        q_norm=params["q_norm"] if cfg.qk_norm else None,
        k_norm=params["k_norm"] if cfg.qk_norm else None,
        k_scale=k_scale,
        v_scale=v_scale,
        num_heads=cfg.num_heads,
        eps=cfg.rms_norm_eps,
        pack=request_rows if packed else None,
        places=None if places is None else places.place,
        num_requests=None if places is None else requests,
    )
    q, k_cache, v_cache = rope_op.rope_and_write(projected, implementation=ops.rope_cache)
    q = q if packed else q.reshape(batch, rows, cfg.num_heads, cfg.head_dim)
    if query_scale is not None:
        q = (q.astype(jnp.float32) * query_scale[..., None, None]).astype(q.dtype)
    if flat is not None and not packed:
        q = flat.by_request(q)
    queries = attention_op.Inputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=metadata.block_table,
        positions=metadata.positions if metadata.last_keys is None else metadata.last_keys,
        seq_lens=metadata.seq_lens,
        window_start=metadata.window_start,
        sinks=params["sinks"] if cfg.sinks else None,
        bounds=metadata.bounds,
        k_scale=k_scale,
        v_scale=v_scale,
        scale=cfg.head_dim**-0.5,
        window=window,
        packed_heads=cfg.num_heads if packed else None,
        out_rows=None if places is None else places.index,
        num_out_rows=None if places is None else rows,
    )
    if ops.rows_alike:
        attended = _attend_in_tiles(queries)
    else:
        attended = attention_op.paged_attention(queries, implementation=ops.attention)
    if ops.in_halves:  # the next half writes this cache in place, once its reader has ended
        attended, k_cache, v_cache = lax.optimization_barrier((attended, k_cache, v_cache))
    if flat is not None and not packed:
        attended = flat.flatten(attended)
    return attended.reshape(batch, rows, -1), FullCache(k_cache, v_cache)


def _attend_in_tiles(queries: attention_op.Inputs) -> jax.Array:
    """Attend in tiles of rows; see Ops.rows_alike."""

    def attend(q: jax.Array, positions: jax.Array, window_start: jax.Array) -> jax.Array:
        few = replace(queries, q=q, positions=positions, window_start=window_start, bounds=None)
        return attention_op.paged_attention(few, implementation="reference")

    return in_tiles(attend, queries.q, queries.positions, queries.window_start, axis=1)
