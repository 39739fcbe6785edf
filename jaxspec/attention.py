"""One self-attention layer, target's or draft's: project, rotate, write keys and values, attend."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import REFERENCE_KERNELS, AttentionConfig, Kernels
from jaxspec.kv_cache import FullCache
from jaxspec.layers import apply_rope, linear, product, rms_norm
from jaxspec.metadata import AttentionMetadata
from jaxspec.params import Params, ParamSpec, matrix, vector
from pallas_kernels.attention import packs, paged_attention
from pallas_kernels.rope_cache import rope_and_write

RopeTables = tuple[jax.Array, jax.Array]


def attention_specs(prefix: str, cfg: AttentionConfig, input_size: int, output_size: int) -> dict[str, ParamSpec]:
    """The layer's weights under `prefix` ("...self_attn"); an EAGLE-3 layer reads 2D wide and writes D wide."""
    q_size, kv_size = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    specs = {
        "q_proj": matrix(f"{prefix}.q_proj.weight", input_size, q_size, ("embed", "heads")),
        "k_proj": matrix(f"{prefix}.k_proj.weight", input_size, kv_size, ("embed", "kv_heads")),
        "v_proj": matrix(f"{prefix}.v_proj.weight", input_size, kv_size, ("embed", "kv_heads")),
        "o_proj": matrix(f"{prefix}.o_proj.weight", q_size, output_size, ("heads", "embed")),
    }
    if cfg.qkv_bias:
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


def project_qkv(params: Params, cfg: AttentionConfig, x: jax.Array, rope: RopeTables) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x [batch, rows, in] -> q [batch, rows, num_heads, head_dim] and k, v with num_kv_heads; normed and rotated."""

    def heads(name: str, num_heads: int) -> jax.Array:
        return linear(x, params[f"{name}_proj"], params.get(f"{name}_bias")).reshape(*x.shape[:2], num_heads, cfg.head_dim)

    q, k, v = heads("q", cfg.num_heads), heads("k", cfg.num_kv_heads), heads("v", cfg.num_kv_heads)
    if cfg.qk_norm:
        q = rms_norm(q, params["q_norm"], cfg.rms_norm_eps)
        k = rms_norm(k, params["k_norm"], cfg.rms_norm_eps)
    return apply_rope(q, rope), apply_rope(k, rope), v


def self_attention(
    params: Params,
    cfg: AttentionConfig,
    x: jax.Array,
    rope: RopeTables,
    metadata: AttentionMetadata,
    cache: FullCache,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    norm: jax.Array | None = None,
    residual: jax.Array | None = None,
    window: int | None = None,
) -> tuple[jax.Array, FullCache]:
    """(residual +) o_proj(attention((norm of) x)): x [batch, rows, in] -> [batch, rows, out], and the cache with these rows written.

    norm: the gain [in] of the RMS norm before the projections, with cfg.rms_norm_eps.
    window: the most keys that a row of this metadata sees, by its window_start; None for all.
    """
    batch, rows = x.shape[:2]
    names = ("q", "k", "v")
    if cfg.qkv_bias:
        normed = x if norm is None else rms_norm(x, norm, cfg.rms_norm_eps)
        qkv = jnp.concatenate([linear(normed, params[f"{n}_proj"], params.get(f"{n}_bias")) for n in names], axis=-1)
    else:
        qkv = product(x, tuple(params[f"{n}_proj"] for n in names), kernels, norm=norm, eps=cfg.rms_norm_eps)
    cos, sin = (table.reshape(batch * rows, -1) for table in rope)
    packed = packs(kernels.attention, rows=rows, num_heads=cfg.num_heads, num_kv_heads=cfg.num_kv_heads)
    q, k_cache, v_cache = rope_and_write(
        qkv.reshape(batch * rows, -1),
        cos,
        sin,
        metadata.slot_mapping.reshape(-1),
        cache.k,
        cache.v,
        num_heads=cfg.num_heads,
        q_norm=params["q_norm"] if cfg.qk_norm else None,
        k_norm=params["k_norm"] if cfg.qk_norm else None,
        eps=cfg.rms_norm_eps,
        pack=rows if packed else None,
        implementation=kernels.rope_cache,
    )
    attended = paged_attention(
        q if packed else q.reshape(batch, rows, cfg.num_heads, cfg.head_dim),
        k_cache,
        v_cache,
        metadata.block_table,
        metadata.positions,
        metadata.seq_lens,
        metadata.window_start,
        params["sinks"] if cfg.sinks else None,
        scale=cfg.head_dim**-0.5,
        window=window,
        packed_heads=cfg.num_heads if packed else None,
        implementation=kernels.attention,
    ).reshape(batch, rows, -1)
    cache = FullCache(k_cache, v_cache)
    if cfg.o_bias:
        out = linear(attended, params["o_proj"], params.get("o_bias"))
        return (out if residual is None else residual + out), cache
    return product(attended, (params["o_proj"],), kernels, residual=residual), cache
