"""The paged KV cache: the arrays of each kind of layer, addressed by cache slot."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from typing_extensions import TypeVar

from jaxspec.config import (
    AttentionConfig,
    AttentionKind,
    CompressedAttentionConfig,
    ConfigError,
    DraftConfig,
    KVCacheDtype,
    MLAConfig,
    TargetConfig,
    TokenHistoryConfig,
)
from jaxspec.config.quantization import quantization_of
from pallas_kernels.dtypes import narrowed

# The cache slot of a masked row. It is out of range of any cache, so a scatter with mode="drop"
# leaves the cache alone. -1 would wrap around and dynamic_update_slice would clamp, and both would
# overwrite good data.
PAD_SLOT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class ArraySpec:
    """One array of a cache.

    shape: the first dimension counts blocks
    dtype: of its numbers
    axes:  a logical axis name per dimension, for sharding; see ParamSpec
    """

    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str | None, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def own_cache_dtype(kv_cache_dtype: KVCacheDtype, cfg: TargetConfig | DraftConfig) -> KVCacheDtype:
    """Return the setting of a model's caches; "auto" becomes fp8 as its checkpoint says.

    A checkpoint says so by the settings that vLLM reads.
    """
    quantization = quantization_of(cfg)
    latent = isinstance(cfg.attention, MLAConfig | CompressedAttentionConfig)
    if kv_cache_dtype == "auto" and quantization and quantization.has_fp8_caches and not latent:
        return "fp8"
    return kv_cache_dtype


def resolve_cache_dtype(kv_cache_dtype: KVCacheDtype, dtype: DTypeLike) -> jnp.dtype:
    """Return the dtype of keys and values; "auto" is that of the weights, `dtype`."""
    if kv_cache_dtype == "fp8":
        return jnp.dtype(jnp.float8_e4m3fn)
    return jnp.dtype(dtype if kv_cache_dtype == "auto" else kv_cache_dtype)


def resolve_draft_cache_dtype(
    draft_kv_cache_dtype: KVCacheDtype | None,
    draft: DraftConfig | None,
    kv_cache_dtype: KVCacheDtype,
    dtype: DTypeLike,
) -> jnp.dtype:
    """Return the dtype of the draft's keys and values.

    An "auto" that is still open is fp8 if the draft's checkpoint says so, as in vLLM. An explicit
    "auto" of the draft asks that checkpoint alone.

    draft_kv_cache_dtype: None for the target's setting
    draft:                None for plain decoding
    kv_cache_dtype:       the target's setting, as own_cache_dtype returns it
    dtype:                of the weights
    """
    chosen = kv_cache_dtype if draft_kv_cache_dtype is None else draft_kv_cache_dtype
    if draft is not None:
        chosen = own_cache_dtype(chosen, draft)
    return resolve_cache_dtype(chosen, dtype)


# The leaves of a cache: its arrays, or their ArraySpecs.
Leaf = TypeVar("Leaf", default=jax.Array)


@struct.dataclass
class FullCache(Generic[Leaf]):
    """Keys and values of one layer.

    k, v: [num_blocks, block_size, num_kv_heads, head_dim], in the cache's dtype
    """

    k: Leaf
    v: Leaf


@struct.dataclass
class LatentCache(Generic[Leaf]):
    """The cache of one layer of multi-head latent attention.

    latent: [num_blocks, block_size, 1, kv_lora_rank + rope_head_dim], in the cache's dtype
    """

    latent: Leaf


@struct.dataclass
class CompressorCache(Generic[Leaf]):
    """The cache of one compressor.

    It is addressed by position like keys and values, so that a rejection needs no rollback.

    inputs:  float32 [num_blocks, block_size, 1, 2 * series * width], each token's values and gates,
             at the token's cache slot
    entries: [num_blocks, entries a block, 1, width] in the cache's dtype, each entry in the block
             of the last token that it is made of
    """

    inputs: Leaf
    entries: Leaf


@struct.dataclass
class CompressedCache(Generic[Leaf]):
    """The cache of one layer of DeepSeek-V4.

    kv:         [num_blocks, block_size, 1, head_dim], in the cache's dtype
    compressor: None for a layer without a compressor
    indexer:    None for a layer without an indexer
    """

    kv: Leaf
    compressor: CompressorCache[Leaf] | None
    indexer: CompressorCache[Leaf] | None


@struct.dataclass
class TokenCache(Generic[Leaf]):
    """The token ids of the text, for drafters that look tokens up.

    tokens: int32 [num_blocks, block_size]
    """

    tokens: Leaf


LayerCache = FullCache[Leaf] | LatentCache[Leaf] | CompressedCache[Leaf] | TokenCache[Leaf]
KVCache = tuple[Any, ...]  # a LayerCache per layer


@dataclass(frozen=True)
class Blocks:
    """The blocks of one layer.

    num_blocks: blocks of the layer's pool
    block_size: tokens of a block
    dtype:      of keys, values and what else attention reads
    """

    num_blocks: int
    block_size: int
    dtype: jnp.dtype

    def rows(self, heads: int, width: int, axis: str | None = None) -> ArraySpec:
        """Return an array with a row [heads, width] for each token; axis: that of the heads."""
        shape = (self.num_blocks, self.block_size, heads, width)
        return ArraySpec(shape, self.dtype, (None, None, axis, None))


def full_cache(cfg: AttentionConfig, layer: int, blocks: Blocks) -> FullCache[ArraySpec]:
    """Return the arrays of a layer with keys and values of each head."""
    rows = blocks.rows(cfg.num_kv_heads, cfg.head_dim, "kv_heads")
    return FullCache(rows, rows)


def latent_cache(cfg: MLAConfig, layer: int, blocks: Blocks) -> LatentCache[ArraySpec]:
    """Return the array of a layer of latents, which all heads share."""
    return LatentCache(blocks.rows(cfg.num_kv_heads, cfg.head_dim))


def compressed_cache(
    cfg: CompressedAttentionConfig, layer: int, blocks: Blocks
) -> CompressedCache[ArraySpec]:
    """Return the arrays of a layer of DeepSeek-V4, whose kind decides which compressors it has."""
    kind = cfg.layer_types[layer]
    rate, sparse = cfg.rate(kind), kind == "compressed_sparse_attention"

    def compressor(width: int) -> CompressorCache[ArraySpec]:
        assert rate is not None
        float32 = replace(blocks, dtype=jnp.dtype(jnp.float32))
        each = replace(blocks, block_size=entries_a_block(blocks.block_size, rate))
        return CompressorCache(
            float32.rows(1, 2 * (2 if sparse else 1) * width), each.rows(1, width)
        )

    return CompressedCache(
        blocks.rows(cfg.num_kv_heads, cfg.head_dim),
        compressor(cfg.head_dim) if rate else None,
        compressor(cfg.index_head_dim) if sparse else None,
    )


def token_cache(cfg: TokenHistoryConfig, layer: int, blocks: Blocks) -> TokenCache[ArraySpec]:
    """Return the array of a text's tokens."""
    shape = (blocks.num_blocks, blocks.block_size)
    return TokenCache(ArraySpec(shape, jnp.dtype(jnp.int32), (None, None)))


# The arrays of a layer, by the type of its attention config: (config, index of the layer, blocks).
CACHE_KINDS: Mapping[type, Callable[[Any, int, Blocks], LayerCache[ArraySpec]]] = {
    AttentionConfig: full_cache,
    MLAConfig: latent_cache,
    CompressedAttentionConfig: compressed_cache,
    TokenHistoryConfig: token_cache,
}


def cache_specs(
    attention: AttentionKind, num_blocks: Sequence[int], block_size: int, cache_dtype: DTypeLike
) -> tuple[LayerCache[ArraySpec], ...]:
    """Return the arrays of a model's caches, one entry per layer, of num_blocks[layer] blocks each.

    Each layer has its own arrays, since a stacked pool is copied at every kernel call.

    ConfigError for a kind of attention that has no caches of this dtype.
    """
    kind, dtype = CACHE_KINDS[type(attention)], jnp.dtype(cache_dtype)
    check_cache_dtype(attention, dtype)
    return tuple(
        kind(attention, layer, Blocks(blocks, block_size, dtype))
        for layer, blocks in enumerate(num_blocks)
    )


def check_cache_dtype(
    attention: AttentionKind, cache_dtype: DTypeLike, key: str = "kv_cache_dtype"
) -> None:
    """Raise ConfigError for a kind of attention that has no caches of this dtype.

    key: the setting that asks for it
    """
    is_fp8 = jnp.dtype(cache_dtype).itemsize == 1
    if is_fp8 and isinstance(attention, MLAConfig | CompressedAttentionConfig):
        raise ConfigError(
            f"{key}: expected auto, bfloat16 or float32 for latent or compressed attention, "
            "got 'fp8'"
        )


def init_cache(
    attention: AttentionKind, num_blocks: Sequence[int], block_size: int, cache_dtype: DTypeLike
) -> KVCache:
    """Return empty caches; the arguments are those of cache_specs."""
    specs = cache_specs(attention, num_blocks, block_size, cache_dtype)
    return jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype), specs)


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
    rows, slots = narrowed(rows.reshape(-1, *rows.shape[2:]), pool.dtype), slot_mapping.reshape(-1)
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
