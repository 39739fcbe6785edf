"""Queries as a decode step's attention kernel reads them: all rows of a request that share a KV head, side by side."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def packed_size(columns: int) -> int:
    """rows x heads a KV head, padded to what wgmma and tiled shared memory take."""
    return -(-columns // 8) * 8


def pack(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """q [batch, rows, num_heads, head_dim] -> [batch, num_kv_heads, packed_size, head_dim]: row * group + head in the group, then zeros."""
    batch, rows, num_heads, head_dim = q.shape
    group = num_heads // num_kv_heads
    q = (
        q.reshape(batch, rows, num_kv_heads, group, head_dim)
        .transpose(0, 2, 1, 3, 4)
        .reshape(batch, num_kv_heads, rows * group, head_dim)
    )
    return jnp.pad(q, ((0, 0), (0, 0), (0, packed_size(rows * group) - rows * group), (0, 0)))


def unpack(packed: jax.Array, rows: int, num_heads: int) -> jax.Array:
    """What `pack` has packed."""
    batch, num_kv_heads, _, head_dim = packed.shape
    group = num_heads // num_kv_heads
    q = packed[:, :, : rows * group].reshape(batch, num_kv_heads, rows, group, head_dim)
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, rows, num_heads, head_dim)


def padded_heads(rows: int, num_heads: int) -> int:
    """Heads of a request's queries [rows, heads, width] whose rows x heads are a multiple of 8."""
    return num_heads if rows * num_heads % 8 == 0 else packed_size(num_heads)
