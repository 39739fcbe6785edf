"""Rotate and write in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import packing
from pallas_kernels.dtypes import narrowed, rounded_division, wider
from pallas_kernels.rms_norm.reference import rms_norm
from pallas_kernels.rope_cache.inputs import Inputs


def rope_and_write(inputs: Inputs) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.rope_cache.rope_and_write.

    Padding of packed rows is zero, and so are rows that no place names. A rotated key is rounded
    once, to the cache's dtype.
    """
    num_heads, slots, eps = inputs.num_heads, inputs.slot_mapping, inputs.eps
    num_kv_heads, head_dim = inputs.k_cache.shape[2:]
    heads = inputs.qkv.reshape(inputs.qkv.shape[0], -1, head_dim)
    q, k, v = (
        heads[:, :num_heads],
        heads[:, num_heads : num_heads + num_kv_heads],
        heads[:, num_heads + num_kv_heads :],
    )
    if inputs.q_norm is not None and inputs.k_norm is not None:
        q, k = rms_norm(q, inputs.q_norm, eps=eps), rms_norm(k, inputs.k_norm, eps=eps)
    cos, sin = inputs.cos[:, None], inputs.sin[:, None]
    q, k = rotate(q, cos, sin), k.astype(wider(k.dtype, inputs.k_cache.dtype))
    k_cache = write(inputs.k_cache, _divided(rotate(k, cos, sin), inputs.k_scale), slots)
    v_cache = write(inputs.v_cache, _divided(v, inputs.v_scale), slots)
    if inputs.pack is not None:
        if inputs.places is not None:
            every = jnp.zeros((inputs.packed_requests * inputs.pack, *q.shape[1:]), q.dtype)
            q = every.at[inputs.places].set(q)
        q = packing.pack(q.reshape(-1, inputs.pack, num_heads, head_dim), num_kv_heads)
    return q, k_cache, v_cache


def _divided(rows: jax.Array, scale: jax.Array | None) -> jax.Array:
    """Return rows [rows, heads, head_dim] over the scale of each head, in float32."""
    if scale is None:
        return rows
    return rounded_division(rows.astype(jnp.float32), scale[:, None])


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate x [..., heads, head_dim] by cos and sin [..., 1, head_dim / 2], in float32.

    Halves are paired (Hugging Face's rotate_half layout).
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def write(cache: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """Return cache [blocks, block_size, heads, width] with rows [rows, heads, width] written.

    slots: int32 [rows], cache slots; those outside the cache are dropped.
    """
    flat = cache.reshape(-1, *cache.shape[2:])
    if slots.shape[0] == 1:
        # XLA makes a scatter of one row a select between two caches, which copies the cache.
        slots = jnp.concatenate([slots, jnp.full(1, flat.shape[0], slots.dtype)])
        rows = jnp.concatenate([rows, rows])
    rows = narrowed(rows, cache.dtype)
    return flat.at[slots].set(rows, mode="drop").reshape(cache.shape)
