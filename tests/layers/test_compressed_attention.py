"""Compressed attention where the cache's dtype differs from the weights': nothing is rounded but
what is stored in a narrower dtype, and that once."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.arrays import CompressedCache, CompressorCache, init_cache
from jaxspec.cache.metadata import AttentionMetadata, build_metadata
from jaxspec.config import REFERENCE_OPS
from jaxspec.layers import compressed_attention as layer
from jaxspec.layers.params import Params, init_random
from tests.support.families import target_config

FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
mixed = pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)], ids=str
)
TARGET = target_config("deepseek_v4")
CFG, SPARSE, BLOCK, ROWS = TARGET.attention, 1, 8, 8  # SPARSE: the layer with an indexer
KIND = CFG.layer_types[SPARSE]
# Sums of bfloat16 products in float32, in one order or another; a rounding to bfloat16 is 4e-3.
SUMS = 2e-6


def weights(dtype: jnp.dtype) -> Params:
    specs = layer.compressed_attention_specs("attn", CFG, KIND, TARGET.hidden_size)
    return init_random(specs, jax.random.key(0), dtype)


def inputs(dtype: jnp.dtype) -> jax.Array:
    shape = (1, ROWS, TARGET.hidden_size)
    return jax.random.normal(jax.random.key(1), shape, jnp.float32).astype(dtype)


def empty(cache_dtype: jnp.dtype) -> CompressedCache:
    return init_cache(CFG, (1,) * TARGET.num_layers, BLOCK, cache_dtype)[SPARSE]


def metadata() -> AttentionMetadata:
    zero = jnp.zeros(1, jnp.int32)
    (built,) = build_metadata(
        TARGET.cache_groups(BLOCK, BLOCK)[:1],
        (jnp.zeros((1, 1), jnp.int32),),
        zero,
        zero + ROWS,
        ROWS,
        attention=CFG,
        ops=REFERENCE_OPS,
    )
    return built


def compressed(dtype: jnp.dtype, cache_dtype: jnp.dtype, *, widened: bool) -> CompressorCache:
    """The entries of inputs and weights in `dtype`; widened: in these values, as float32."""
    params, x = weights(dtype)["compressor"], inputs(dtype)
    if widened:
        params, x = jax.tree.map(lambda a: a.astype(FLOAT32), (params, x))
    cache = empty(cache_dtype).compressor
    assert cache is not None
    return layer.compress(params, CFG.compressed_rope, CFG.sparse_rate, x, metadata(), cache, CFG)


def test_float32_entries_of_bfloat16_weights_are_not_rounded() -> None:
    got = compressed(BFLOAT16, FLOAT32, widened=False)
    exact = compressed(BFLOAT16, FLOAT32, widened=True)
    assert got.inputs.dtype == got.entries.dtype == FLOAT32
    assert np.count_nonzero(got.entries) >= 2 * CFG.head_dim, "two windows were closed"
    for mine, theirs in ((got.inputs, exact.inputs), (got.entries, exact.entries)):
        np.testing.assert_allclose(mine, theirs, rtol=SUMS, atol=SUMS)


def test_bfloat16_entries_of_float32_weights_are_rounded_once() -> None:
    got, exact = (compressed(FLOAT32, d, widened=False) for d in (BFLOAT16, FLOAT32))
    assert (got.inputs.dtype, got.entries.dtype) == (FLOAT32, BFLOAT16)
    np.testing.assert_array_equal(got.inputs, exact.inputs)
    np.testing.assert_array_equal(
        *(np.asarray(e, np.float32) for e in (got.entries, exact.entries.astype(BFLOAT16)))
    )


@mixed
def test_attention_and_index_scores_compute_in_the_wider_dtype(
    dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> None:
    keys = jax.random.split(jax.random.key(2), 3)

    def normal(key: Any, *shape: int, dtype: jnp.dtype) -> jax.Array:
        return jax.random.normal(key, shape, jnp.float32).astype(dtype)

    q = normal(keys[0], 1, ROWS, CFG.num_heads, CFG.head_dim, dtype=dtype)
    kv = normal(keys[1], 1, 5, CFG.head_dim, dtype=cache_dtype)
    parts = [(kv, jnp.ones((1, ROWS, 5), bool))]
    wide = [(kv.astype(FLOAT32), parts[0][1])]
    sinks = jnp.zeros(CFG.num_heads, jnp.float32)
    got = layer.attend(q, parts, sinks, 0.5)
    assert got.dtype == dtype
    np.testing.assert_array_equal(
        *(
            np.asarray(x, np.float32)
            for x in (got, layer.attend(q.astype(FLOAT32), wide, sinks, 0.5).astype(dtype))
        )
    )
    x, params = inputs(dtype), weights(dtype)["indexer"]
    latent = normal(keys[2], 1, ROWS, CFG.q_lora_rank, dtype=dtype)
    rope = (jnp.ones((1, ROWS, 1, 2)), jnp.zeros((1, ROWS, 1, 2)))
    entries = normal(keys[2], 1, 5, CFG.index_head_dim, dtype=cache_dtype)
    scores = layer.index_scores(params, CFG, x, latent, rope, entries)
    if cache_dtype == FLOAT32:
        narrow = layer.index_scores(params, CFG, x, latent, rope, entries.astype(BFLOAT16))
        assert (scores != narrow).any(), "keys are read as they are cached"
    else:
        exact = layer.index_scores(params, CFG, x, latent, rope, entries.astype(FLOAT32))
        np.testing.assert_array_equal(scores, exact)
