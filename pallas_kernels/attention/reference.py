"""Paged attention in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import packing
from pallas_kernels.attention.inputs import Inputs
from pallas_kernels.dtypes import wider

_MASKED = -1e30  # finite: a row that sees nothing (an idle request) stays free of NaN


def paged_attention(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.attention.paged_attention.

    Reads every page of the block table. The softmax is float32, and products take operands of the
    wider of the queries' and the cache's dtypes.
    """
    heads, q, sinks = inputs.heads, inputs.q, inputs.sinks
    if inputs.packed_heads is not None:
        q = packing.unpack(q, heads.rows, heads.num_heads)
    batch, rows, num_heads, head_dim = q.shape
    num_kv_heads, block_table = heads.num_kv_heads, inputs.block_table
    # [batch, keys, kv_heads, head_dim]: the pages of each request side by side
    k = inputs.k_cache[block_table].reshape(batch, -1, num_kv_heads, head_dim)
    v = inputs.v_cache[block_table].reshape(batch, -1, num_kv_heads, head_dim)
    key = jnp.arange(k.shape[1], dtype=jnp.int32)
    written = key < inputs.seq_lens[:, None]  # [batch, keys]
    # Unwritten cache slots, and those before every row's window (whose blocks another request may
    # own), must not leak in: 0 * NaN is NaN.
    seen = written & (key >= inputs.window_start.min(axis=1)[:, None])
    v = jnp.where(seen[..., None, None], v, jnp.zeros((), v.dtype))
    # [batch, rows, keys]
    causal = written[:, None, :] & (key <= inputs.positions[..., None])
    visible = causal & (key >= inputs.window_start[..., None])

    dtype = wider(q.dtype, k.dtype)
    k, v = k.astype(dtype), v.astype(dtype)
    grouped = q.reshape(batch, rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    grouped = grouped.astype(dtype)
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, k, preferred_element_type=jnp.float32)
    scores = scores * inputs.scale
    if inputs.k_scale is not None:
        scores = scores * inputs.k_scale[:, None, None, None]
    scores = jnp.where(visible[:, None, None], scores, _MASKED)
    if sinks is not None:  # one more key for each head, whose value is zero
        sink = sinks.reshape(1, num_kv_heads, -1, 1, 1)
        scores = jnp.concatenate((scores, jnp.broadcast_to(sink, (*scores.shape[:-1], 1))), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    out = jnp.einsum(
        "bhgqk,bkhd->bqhgd", weights.astype(dtype), v, preferred_element_type=jnp.float32
    )
    if inputs.v_scale is not None:
        out = out * inputs.v_scale[:, None, None]
    out = out.reshape(batch, rows, num_heads, head_dim).astype(q.dtype)
    if inputs.out_rows is None:
        return out
    kept = jnp.zeros((inputs.num_out_rows or 0, num_heads, head_dim), q.dtype)
    return kept.at[inputs.out_rows].set(out, mode="drop")
