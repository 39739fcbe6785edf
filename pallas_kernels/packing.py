"""Queries as a decode step's attention kernel reads them.

All rows of a request that share a KV head lie side by side.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def packed_size(columns: int) -> int:
    """Return rows x queries_per_kv, padded for wgmma and tiled shared memory."""
    return -(-columns // 8) * 8


def pack(q: jax.Array, num_kv_heads: int) -> jax.Array:
    """Pack q [batch, rows, num_heads, head_dim] to [batch, num_kv_heads, packed_size, head_dim].

    The order is row * queries_per_kv + head of the KV head, then zeros.
    """
    batch, rows, num_heads, head_dim = q.shape
    queries_per_kv = num_heads // num_kv_heads
    q = (
        q.reshape(batch, rows, num_kv_heads, queries_per_kv, head_dim)
        .transpose(0, 2, 1, 3, 4)
        .reshape(batch, num_kv_heads, rows * queries_per_kv, head_dim)
    )
    return jnp.pad(
        q, ((0, 0), (0, 0), (0, packed_size(rows * queries_per_kv) - rows * queries_per_kv), (0, 0))
    )


def unpack(packed: jax.Array, rows: int, num_heads: int) -> jax.Array:
    """Return the queries that `pack` packed."""
    batch, num_kv_heads, _, head_dim = packed.shape
    queries_per_kv = num_heads // num_kv_heads
    q = packed[:, :, : rows * queries_per_kv].reshape(
        batch, num_kv_heads, rows, queries_per_kv, head_dim
    )
    return q.transpose(0, 2, 1, 3, 4).reshape(batch, rows, num_heads, head_dim)


def padded_heads(rows: int, num_heads: int) -> int:
    """Return a number of heads, num_heads or more, with rows x heads a multiple of 8."""
    return num_heads if rows * num_heads % 8 == 0 else packed_size(num_heads)
