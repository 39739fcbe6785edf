"""Paged attention in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: a row that sees nothing (an idle request) stays free of NaN


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    window_start: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
) -> jax.Array:
    """See pallas_kernels.attention.paged_attention. Reads every page of the block table; softmax in float32."""
    batch, rows, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[2]
    # [batch, keys, kv_heads, head_dim]: the pages of each request, side by side
    k = k_cache[block_table].reshape(batch, -1, num_kv_heads, head_dim)
    v = v_cache[block_table].reshape(batch, -1, num_kv_heads, head_dim)
    key = jnp.arange(k.shape[1], dtype=jnp.int32)
    written = key < seq_lens[:, None]  # [batch, keys]
    # What lies in slots that nobody has written, or before every row's window (where blocks may be another's by now), must not leak in:
    # 0 * NaN is NaN.
    seen = written & (key >= window_start.min(axis=1)[:, None])
    v = jnp.where(seen[..., None, None], v, jnp.zeros((), v.dtype))
    visible = (
        written[:, None, :] & (key <= positions[..., None]) & (key >= window_start[..., None])
    )  # [batch, rows, keys]

    grouped = q.reshape(batch, rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    if sinks is not None:  # one more key a head, whose value is zero
        sink = sinks.reshape(1, num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate((scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    out = jnp.einsum(
        "bhgqk,bkhd->bqhgd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    return out.reshape(batch, rows, num_heads, head_dim).astype(q.dtype)
