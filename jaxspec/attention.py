"""One self-attention layer, target's or draft's: project, rotate, write keys and values, attend."""

from __future__ import annotations

import jax

from jaxspec.config import AttentionConfig
from jaxspec.kv_cache import FullCache, write
from jaxspec.layers import apply_rope, linear, rms_norm
from jaxspec.metadata import AttentionMetadata
from jaxspec.params import Params, ParamSpec, matrix, vector
from pallas_kernels.attention import paged_attention

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
    implementation: str = "reference",
) -> tuple[jax.Array, FullCache]:
    """x [batch, rows, in] -> ([batch, rows, out], the cache with these rows' keys and values written)."""
    q, k, v = project_qkv(params, cfg, x, rope)
    cache = write(cache, k, v, metadata.slot_mapping)
    attended = paged_attention(
        q,
        cache.k,
        cache.v,
        metadata.block_table,
        metadata.positions,
        metadata.seq_lens,
        metadata.window_start,
        scale=cfg.head_dim**-0.5,
        implementation=implementation,
    )
    return linear(attended.reshape(*x.shape[:2], -1), params["o_proj"], params.get("o_bias")), cache
