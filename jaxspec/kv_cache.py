"""The paged KV cache: an array pair per layer, or a latent array, addressed by slot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import AttentionConfig, MLAConfig

# A masked row's slot. It is out of range of any cache, so a scatter with mode="drop" leaves the cache alone;
# -1 would wrap around and dynamic_update_slice would clamp, both overwriting good data.
PAD_SLOT = np.iinfo(np.int32).max


@struct.dataclass
class FullCache:
    """Keys and values of one layer. k, v: [num_blocks, block_size, num_kv_heads, head_dim], the model's dtype."""

    k: jax.Array
    v: jax.Array


@struct.dataclass
class LatentCache:
    """One layer of multi-head latent attention. latent: [num_blocks, block_size, 1, kv_lora_rank + rope_head_dim]."""

    latent: jax.Array


KVCache = tuple[Any, ...]  # a FullCache or a LatentCache a layer


def init_cache(attention: AttentionConfig | MLAConfig, num_layers: int, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVCache:
    """Empty caches for num_layers layers: one array pair each, since a stacked pool is copied at every kernel call."""
    shape = (num_blocks, block_size, attention.num_kv_heads, attention.head_dim)
    if isinstance(attention, MLAConfig):
        return tuple(LatentCache(jnp.zeros(shape, dtype)) for _ in range(num_layers))
    return tuple(FullCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


def write(cache: FullCache, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> FullCache:
    """Store rows k, v [batch, rows, num_kv_heads, head_dim] at slot_mapping [batch, rows]; PAD_SLOT rows are dropped."""
    return FullCache(write_rows(cache.k, k, slot_mapping), write_rows(cache.v, v, slot_mapping))


def write_rows(pool: jax.Array, rows: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """The pool [num_blocks, block_size, heads, width] with rows [batch, rows, heads, width] at slot_mapping [batch, rows]."""
    flat = pool.reshape(-1, *pool.shape[2:])
    rows, slots = rows.reshape(-1, *rows.shape[2:]).astype(pool.dtype), slot_mapping.reshape(-1)
    if slots.shape[0] == 1:  # XLA makes a scatter of one row a choice between two whole caches: a copy of each, every step
        rows, slots = jnp.concatenate([rows, rows]), jnp.concatenate([slots, jnp.full(1, PAD_SLOT, slots.dtype)])
    return flat.at[slots].set(rows, mode="drop", unique_indices=False).reshape(pool.shape)
