"""One self-attention layer, target's or draft's: project, rotate, write keys and values, attend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache.arrays import FullCache
from jaxspec.cache.metadata import AttentionMetadata
from jaxspec.config import REFERENCE_KERNELS, AttentionConfig, Kernels, MLAConfig
from jaxspec.layers.params import AssembledSpec, Params, ParamSpec, matrix, vector
from jaxspec.layers.products import (
    ResidualStream,
    product,
    rope_tables,
    values_of,
)
from pallas_kernels import attention as attention_op
from pallas_kernels import rope_cache as rope_op

RopeTables = tuple[jax.Array, jax.Array]


def rope_of(cfg: AttentionConfig, metadata: AttentionMetadata) -> RopeTables:
    """cos and sin of a pass, as rope_tables makes them: the metadata's, if its kernel has made them."""
    return (
        rope_tables(cfg.rope, cfg.rope_dim, metadata.positions)
        if metadata.rope is None
        else metadata.rope
    )


def attention_specs(
    prefix: str, cfg: AttentionConfig, input_size: int, output_size: int
) -> dict[str, ParamSpec]:
    """The layer's weights under `prefix` ("...self_attn"); an EAGLE-3 layer reads 2D wide and writes D wide."""
    q_size, kv_size = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    specs = {
        "q_proj": rotated_matrix(
            f"{prefix}.q_proj.weight", input_size, cfg.num_heads, 0, cfg, ("embed", "heads")
        ),
        "k_proj": rotated_matrix(
            f"{prefix}.k_proj.weight", input_size, cfg.num_kv_heads, 0, cfg, ("embed", "kv_heads")
        ),
        "v_proj": matrix(f"{prefix}.v_proj.weight", input_size, kv_size, ("embed", "kv_heads")),
        "o_proj": matrix(f"{prefix}.o_proj.weight", q_size, output_size, ("heads", "embed")),
    }
    if cfg.qkv_bias:
        assert not cfg.rope_interleave  # no family has both
        specs["q_bias"] = vector(f"{prefix}.q_proj.bias", q_size, "heads")
        specs["k_bias"] = vector(f"{prefix}.k_proj.bias", kv_size, "kv_heads")
        specs["v_bias"] = vector(f"{prefix}.v_proj.bias", kv_size, "kv_heads")
    if cfg.o_bias:
        specs["o_bias"] = vector(f"{prefix}.o_proj.bias", output_size)
    if cfg.qk_norm:
        specs["q_norm"] = vector(f"{prefix}.q_norm.weight", cfg.head_dim)
        specs["k_norm"] = vector(f"{prefix}.k_norm.weight", cfg.head_dim)
    if cfg.sinks:
        specs["sinks"] = ParamSpec(f"{prefix}.sinks", (cfg.num_heads,), ("heads",), dtype="float32")
    return specs


def join_projections(params: Any) -> Any:
    """The weights of any model with projections of one input in one array: query, key and value as qkv_proj (and qkv_bias), or the two
    projections to latents, if there are two, as qkv_a_proj (and qkv_a_bias).

    XLA joins products of one input by itself, and then copies their weights together in every pass: 25 us a layer of Llama-3-8B's on an
    H200. Weights in the structure of param_specs, or already joined; other weights stay as they are.
    """
    if isinstance(params, Mapping):
        joined = {name: join_projections(value) for name, value in params.items()}
        for together, parts in (("qkv", ("q", "k", "v")), ("qkv_a", ("q_a", "kv_a"))):
            for kind in ("proj", "bias"):
                names = [f"{part}_{kind}" for part in parts]
                if all(name in joined for name in names):
                    joined[f"{together}_{kind}"] = jnp.concatenate(
                        [joined.pop(name) for name in names], axis=-1
                    )
        return joined
    return [join_projections(value) for value in params] if isinstance(params, list) else params


def _qkv(
    params: Params,
    cfg: AttentionConfig,
    x: jax.Array | ResidualStream,
    kernels: Kernels,
    norm: jax.Array | None,
) -> jax.Array:
    """x [batch, rows, in] -> queries, keys and values side by side [batch, rows, (num_heads + 2 num_kv_heads) head_dim]."""
    names = ("qkv",) if "qkv_proj" in params else ("q", "k", "v")
    weights = tuple(params[f"{n}_proj"] for n in names)
    bias = jnp.concatenate([params[f"{n}_bias"] for n in names]) if cfg.qkv_bias else None
    return biased_product(x, weights, bias, kernels, norm=norm, eps=cfg.rms_norm_eps)


def biased_product(
    x: jax.Array | ResidualStream,
    weights: tuple[jax.Array, ...],
    bias: jax.Array | None,
    kernels: Kernels,
    **options: Any,
) -> jax.Array:
    """product, plus bias if there is one; rounded to x's dtype once, after the sum."""
    if bias is None:
        return product(x, weights, kernels, **options)
    return (
        product(x, weights, kernels, out_dtype=jnp.float32, **options) + bias.astype(jnp.float32)
    ).astype(values_of(x).dtype)


def rotated_matrix(
    name: str,
    depth: int,
    num_heads: int,
    before: int,
    cfg: AttentionConfig | MLAConfig,
    axes: tuple[str | None, str | None],
) -> ParamSpec:
    """A projection whose output is, for each head, `before` plain dimensions and then the rotated ones, as halves."""
    width = num_heads * (before + cfg.rope_dim)
    if not cfg.rope_interleave:
        return matrix(name, depth, width, axes)
    order = partial(halves_of_pairs, num_heads=num_heads, before=before)
    return AssembledSpec(name, (depth, width), axes, sources=((name, (width, depth)),), build=order)


def halves_of_pairs(arrays: Sequence[np.ndarray], *, num_heads: int, before: int) -> np.ndarray:
    """Rows of each head after `before`, rotated as pairs (0, 1), (2, 3), ... -> rotated as halves; then [out, in] -> [in, out]."""
    (array,) = arrays
    per_head = array.reshape(num_heads, -1, *array.shape[1:])
    ordered = np.concatenate(
        [per_head[:, :before], per_head[:, before::2], per_head[:, before + 1 :: 2]], axis=1
    )
    return ordered.reshape(array.shape).T


def self_attention(
    params: Params,
    cfg: AttentionConfig,
    x: jax.Array,
    rope: RopeTables,
    metadata: AttentionMetadata,
    cache: FullCache,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    residual: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, FullCache]:
    """(residual +) o_proj(attend(x, **options)): x [batch, rows, in] -> [batch, rows, out], and the cache with these rows written."""
    attended, cache = attend(params, cfg, x, rope, metadata, cache, kernels, **options)
    if cfg.o_bias:
        out = biased_product(attended, (params["o_proj"],), params["o_bias"], kernels)
        return (out if residual is None else residual + out), cache
    return product(attended, (params["o_proj"],), kernels, residual=residual), cache


def attend(
    params: Params,
    cfg: AttentionConfig,
    x: jax.Array | ResidualStream,
    rope: RopeTables,
    metadata: AttentionMetadata,
    cache: FullCache,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    norm: jax.Array | None = None,
    window: int | None = None,
    query_scale: jax.Array | None = None,
) -> tuple[jax.Array, FullCache]:
    """Attention of (the norm of) x [batch, rows, in] -> [batch, rows, num_heads * head_dim], and the cache with these rows written.

    norm: the gain [in] of the RMS norm before the projections, with cfg.rms_norm_eps.
    window: the most keys that a row of this metadata sees, by its window_start; None for all. query_scale: [batch, rows], on the queries.
    """
    batch, rows = values_of(x).shape[:2]
    qkv = _qkv(params, cfg, x, kernels, norm)
    cos, sin = (table.reshape(batch * rows, -1) for table in rope)
    packed = query_scale is None and attention_op.packs(
        kernels.attention, rows=rows, queries_per_kv=cfg.num_heads // cfg.num_kv_heads
    )
    projected = rope_op.Inputs(
        qkv=qkv.reshape(batch * rows, -1),
        cos=cos,
        sin=sin,
        slot_mapping=metadata.slot_mapping.reshape(-1),
        k_cache=cache.k,
        v_cache=cache.v,
        q_norm=params["q_norm"] if cfg.qk_norm else None,
        k_norm=params["k_norm"] if cfg.qk_norm else None,
        num_heads=cfg.num_heads,
        eps=cfg.rms_norm_eps,
        pack=rows if packed else None,
    )
    q, k_cache, v_cache = rope_op.rope_and_write(projected, implementation=kernels.rope_cache)
    q = q if packed else q.reshape(batch, rows, cfg.num_heads, cfg.head_dim)
    if query_scale is not None:
        q = (q * query_scale[..., None, None]).astype(q.dtype)
    queries = attention_op.Inputs(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        block_table=metadata.block_table,
        positions=metadata.positions,
        seq_lens=metadata.seq_lens,
        window_start=metadata.window_start,
        sinks=params["sinks"] if cfg.sinks else None,
        bounds=metadata.bounds,
        scale=cfg.head_dim**-0.5,
        window=window,
        packed_heads=cfg.num_heads if packed else None,
    )
    attended = attention_op.paged_attention(queries, implementation=kernels.attention)
    return attended.reshape(batch, rows, -1), FullCache(k_cache, v_cache)
