"""Rotate and write in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm.reference import rms_norm


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
    q, k, v = (
        heads[:, :num_heads],
        heads[:, num_heads : num_heads + num_kv_heads],
        heads[:, num_heads + num_kv_heads :],
    )
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps=eps), rms_norm(k, k_norm, eps=eps)
    cos, sin = cos[:, None], sin[:, None]
    return (
        rotate(q, cos, sin),
        write(k_cache, rotate(k, cos, sin), slot_mapping),
        write(v_cache, v, slot_mapping),
    )


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [..., heads, head_dim] by cos, sin [..., 1, head_dim / 2], halves paired (Hugging Face's rotate_half layout), in float32."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate(
        [first * cos - second * sin, second * cos + first * sin], axis=-1
    ).astype(x.dtype)


def write(cache: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """cache [blocks, block_size, heads, width] with rows [rows, heads, width] at slots [rows]; slots outside of it are dropped."""
    flat = cache.reshape(-1, *cache.shape[2:])
    if (
        slots.shape[0] == 1
    ):  # XLA makes a scatter of one row a choice between two whole caches: a copy of each, every step
        slots = jnp.concatenate([slots, jnp.full(1, flat.shape[0], slots.dtype)])
        rows = jnp.concatenate([rows, rows])
    return flat.at[slots].set(rows.astype(cache.dtype), mode="drop").reshape(cache.shape)
