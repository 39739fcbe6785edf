"""The paged KV cache: an array pair per layer, or a latent array, addressed by cache slot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config import (
    AttentionConfig,
    CompressedAttentionConfig,
    MLAConfig,
    TokenHistoryConfig,
)

# The cache slot of a masked row. It is out of range of any cache, so a scatter with mode="drop"
# leaves the cache alone. -1 would wrap around and dynamic_update_slice would clamp, and both would
# overwrite good data.
PAD_SLOT = np.iinfo(np.int32).max


@struct.dataclass
class FullCache:
    """Keys and values of one layer.

    k, v: [num_blocks, block_size, num_kv_heads, head_dim], in the model's dtype
    """

    k: jax.Array
    v: jax.Array


@struct.dataclass
class LatentCache:
    """The cache of one layer of multi-head latent attention.

    latent: [num_blocks, block_size, 1, kv_lora_rank + rope_head_dim], in the model's dtype
    """

    latent: jax.Array


@struct.dataclass
class CompressorCache:
    """The cache of one compressor.

    It is addressed by position like keys and values, so that a rejection needs no rollback.

    inputs:  float32 [num_blocks, block_size, 1, 2 * series * width], each token's values and gates,
             at the token's cache slot
    entries: [num_blocks, entries a block, 1, width] in the model's dtype, each entry in the block
             of the last token that it is made of
    """

    inputs: jax.Array
    entries: jax.Array


@struct.dataclass
class CompressedCache:
    """The cache of one layer of DeepSeek-V4.

    kv:         [num_blocks, block_size, 1, head_dim], in the model's dtype
    compressor: None for a layer without a compressor
    indexer:    None for a layer without an indexer
    """

    kv: jax.Array
    compressor: CompressorCache | None
    indexer: CompressorCache | None


@struct.dataclass
class TokenCache:
    """The token ids of the text, for drafters that look tokens up.

    tokens: int32 [num_blocks, block_size]
    """

    tokens: jax.Array


LayerCache = FullCache | LatentCache | CompressedCache | TokenCache
KVCache = tuple[Any, ...]  # a LayerCache per layer


def init_cache(
    attention: AttentionConfig | MLAConfig | CompressedAttentionConfig | TokenHistoryConfig,
    num_blocks: Sequence[int],
    block_size: int,
    dtype: jnp.dtype,
) -> KVCache:
    """Return empty caches, one per layer, of num_blocks[layer] blocks each.

    Each layer has its own arrays, since a stacked pool is copied at every kernel call.
    """
    if isinstance(attention, TokenHistoryConfig):
        return tuple(TokenCache(jnp.zeros((n, block_size), jnp.int32)) for n in num_blocks)
    shapes = [
        (blocks, block_size, attention.num_kv_heads, attention.head_dim) for blocks in num_blocks
    ]
    if isinstance(attention, CompressedAttentionConfig):
        return tuple(
            _compressed_cache(attention, kind, shape, dtype)
            for kind, shape in zip(attention.layer_types, shapes, strict=True)
        )
    if isinstance(attention, MLAConfig):
        return tuple(LatentCache(jnp.zeros(s, dtype)) for s in shapes)
    return tuple(FullCache(jnp.zeros(s, dtype), jnp.zeros(s, dtype)) for s in shapes)


def _compressed_cache(
    cfg: CompressedAttentionConfig, kind: str, shape: tuple[int, int, int, int], dtype: jnp.dtype
) -> CompressedCache:
    rate, sparse = cfg.rate(kind), kind == "compressed_sparse_attention"

    def compressor(width: int) -> CompressorCache:
        assert rate is not None
        inputs = jnp.zeros((*shape[:3], 2 * (2 if sparse else 1) * width), jnp.float32)
        return CompressorCache(
            inputs, jnp.zeros((shape[0], entries_a_block(shape[1], rate), 1, width), dtype)
        )

    kv = jnp.zeros(shape, dtype)
    return CompressedCache(
        kv,
        compressor(cfg.head_dim) if rate else None,
        compressor(cfg.index_head_dim) if sparse else None,
    )


def entries_a_block(block_size: int, rate: int) -> int:
    """Return the most entries of `rate` tokens each whose last tokens lie in one block.

    The last tokens of entries are `rate` apart.
    """
    return -(-block_size // rate)


def write(cache: FullCache, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> FullCache:
    """Store rows k, v [batch, rows, num_kv_heads, head_dim] at slot_mapping [batch, rows].

    Rows at PAD_SLOT are dropped.
    """
    return FullCache(write_rows(cache.k, k, slot_mapping), write_rows(cache.v, v, slot_mapping))


def write_rows(pool: jax.Array, rows: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Store rows [batch, rows, heads, width] in a pool [num_blocks, block_size, heads, width].

    slot_mapping: [batch, rows], the cache slot of each row; PAD_SLOT rows are dropped
    """
    flat = pool.reshape(-1, *pool.shape[2:])
    rows, slots = rows.reshape(-1, *rows.shape[2:]).astype(pool.dtype), slot_mapping.reshape(-1)
    # XLA turns a scatter of one row into a choice between two whole caches, and copies each of them
    # in every step.
    if slots.shape[0] == 1:
        rows, slots = (
            jnp.concatenate([rows, rows]),
            jnp.concatenate([slots, jnp.full(1, PAD_SLOT, slots.dtype)]),
        )
    return flat.at[slots].set(rows, mode="drop", unique_indices=False).reshape(pool.shape)


def write_tokens(cache: TokenCache, tokens: jax.Array, slot_mapping: jax.Array) -> TokenCache:
    """Store tokens int32 [batch, rows] at slot_mapping [batch, rows]; drop rows at PAD_SLOT."""
    pool = cache.tokens[..., None, None]
    return TokenCache(write_rows(pool, tokens[..., None, None], slot_mapping)[..., 0, 0])
