"""Rotate and write in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope_and_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    num_heads: int,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See pallas_kernels.rope_cache.rope_and_write."""
    num_kv_heads, head_dim = k_cache.shape[2:]
    heads = qkv.reshape(qkv.shape[0], -1, head_dim)
    q, k, v = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads], heads[:, num_heads + num_kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = _norm(q, q_norm, eps), _norm(k, k_norm, eps)
    return _rotate(q, cos, sin), _write(k_cache, _rotate(k, cos, sin), slot_mapping), _write(v_cache, v, slot_mapping)


def _norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * weight.astype(x.dtype)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def _write(cache: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    flat = cache.reshape(-1, *cache.shape[2:])
    return flat.at[slots].set(rows.astype(cache.dtype), mode="drop").reshape(cache.shape)
