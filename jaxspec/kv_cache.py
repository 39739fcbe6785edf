"""The paged KV cache: one array pair per layer, addressed by slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import AttentionConfig

# A masked row's slot. It is out of range of any cache, so a scatter with mode="drop" leaves the cache alone;
# -1 would wrap around and dynamic_update_slice would clamp, both overwriting good data.
PAD_SLOT = np.iinfo(np.int32).max


@struct.dataclass
class FullCache:
    """Keys and values of one layer. k, v: [num_blocks, block_size, num_kv_heads, head_dim], the model's dtype."""

    k: jax.Array
    v: jax.Array


KVCache = tuple[FullCache, ...]


def init_cache(attention: AttentionConfig, num_layers: int, num_blocks: int, block_size: int, dtype: jnp.dtype) -> KVCache:
    """Empty caches for num_layers layers: one array pair each, since a stacked pool is copied at every kernel call."""
    shape = (num_blocks, block_size, attention.num_kv_heads, attention.head_dim)
    return tuple(FullCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


def write(cache: FullCache, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> FullCache:
    """Store rows k, v [batch, rows, num_kv_heads, head_dim] at slot_mapping [batch, rows]; PAD_SLOT rows are dropped."""
    slots = slot_mapping.reshape(-1)

    def store(pool: jax.Array, rows: jax.Array) -> jax.Array:
        flat = pool.reshape(-1, *pool.shape[2:])
        rows = rows.reshape(-1, *rows.shape[2:]).astype(pool.dtype)
        return flat.at[slots].set(rows, mode="drop", unique_indices=False).reshape(pool.shape)

    return FullCache(store(cache.k, k), store(cache.v, v))
