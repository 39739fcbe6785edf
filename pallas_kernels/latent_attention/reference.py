"""Latent attention in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.attention.reference import paged_attention


def latent_attention(
    q: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    *,
    kv_lora_rank: int,
    scale: float,
) -> jax.Array:
    """See pallas_kernels.latent_attention.latent_attention: attention of one KV head whose values are the first part of its keys."""
    out = paged_attention(
        q, cache, cache, block_table, positions, seq_lens, jnp.zeros_like(positions), scale=scale
    )
    return out[..., :kv_lora_rank]
