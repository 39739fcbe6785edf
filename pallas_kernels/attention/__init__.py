"""Attention over a paged KV cache: the public op. Plain arrays in, plain arrays out."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention import reference

IMPLEMENTATIONS = {"reference": reference.paged_attention}


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    window_start: jax.Array,
    *,
    scale: float,
    implementation: str = "reference",
) -> jax.Array:
    """Causal grouped-query attention of a few query rows a request over its cached keys and values.

    q:                [batch, rows, num_heads, head_dim]
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the query's own rows already written
    block_table:      int32 [batch, pages], the blocks that hold a request's tokens in order
    positions:        int32 [batch, rows]; a row sees the keys window_start .. position, below seq_lens
    seq_lens:         int32 [batch], tokens in the cache; 0 for an idle request, whose output is finite and meaningless
    window_start:     int32 [batch, rows]
    scale:            factor on q . k, usually head_dim ** -0.5

    Returns [batch, rows, num_heads, head_dim] in q's dtype. Raises ValueError for shapes that do not fit together and
    for an implementation that does not exist.
    """
    batch, rows, num_heads, head_dim = q.shape
    if k_cache.shape != v_cache.shape or k_cache.ndim != 4 or k_cache.shape[3] != head_dim:
        raise ValueError(
            f"k_cache and v_cache: expected [blocks, block_size, kv_heads, {head_dim}] both, got {k_cache.shape} and {v_cache.shape}"
        )
    if num_heads % k_cache.shape[2]:
        raise ValueError(f"num_heads: expected a multiple of the cache's {k_cache.shape[2]} KV heads, got {num_heads}")
    for name, array, shape in (
        ("positions", positions, (batch, rows)),
        ("window_start", window_start, (batch, rows)),
        ("seq_lens", seq_lens, (batch,)),
        ("block_table", block_table, (batch, block_table.shape[-1])),
    ):
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name}: expected int32 {shape}, got {array.dtype} {array.shape}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
    return IMPLEMENTATIONS[implementation](q, k_cache, v_cache, block_table, positions, seq_lens, window_start, scale=scale)
