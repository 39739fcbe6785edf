"""Latent attention in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import attention
from pallas_kernels.attention.reference import paged_attention
from pallas_kernels.latent_attention.inputs import Inputs


def latent_attention(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.latent_attention.latent_attention.

    This is attention of one KV head whose values are the first part of its keys.
    """
    keys = attention.Inputs(
        q=inputs.q,
        k_cache=inputs.cache,
        v_cache=inputs.cache,
        block_table=inputs.block_table,
        positions=inputs.positions,
        seq_lens=inputs.seq_lens,
        window_start=jnp.zeros_like(inputs.positions),
        scale=inputs.scale,
    )
    return paged_attention(keys)[..., : inputs.kv_lora_rank]
