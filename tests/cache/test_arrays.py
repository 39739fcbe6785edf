"""Cache writes: a masked row never writes, and no block but the addressed ones changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import models
from jaxspec.cache.arrays import (
    CACHE_KINDS,
    PAD_SLOT,
    ArraySpec,
    CompressedCache,
    CompressorCache,
    FullCache,
    LatentCache,
    TokenCache,
    cache_specs,
    init_cache,
    resolve_cache_dtype,
    write,
)
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, AttentionConfig, CacheGroup, TokenHistoryConfig
from jaxspec.drafts.ngram import NgramConfig
from tests.support.families import PAIRS, draft_config, target_config

SENTINEL = 1234.5
BLOCKS, HEADS, DIM = 9, 2, 4


def sentinel_cache(block_size: int) -> FullCache:
    shape = (BLOCKS, block_size, HEADS, DIM)
    return FullCache(
        jnp.full(shape, SENTINEL, jnp.float32), jnp.full(shape, -SENTINEL, jnp.float32)
    )


def rows(batch: int, count: int) -> tuple[jax.Array, jax.Array]:
    k = jnp.arange(batch * count * HEADS * DIM, dtype=jnp.float32).reshape(batch, count, HEADS, DIM)
    return k, k + 0.5


def written_slots(cache: FullCache) -> set[int]:
    k, v = np.asarray(cache.k).reshape(-1, HEADS, DIM), np.asarray(cache.v).reshape(-1, HEADS, DIM)
    changed = (k != SENTINEL).any((1, 2))
    assert np.array_equal(changed, (v != -SENTINEL).any((1, 2)))
    return set(np.flatnonzero(changed).tolist())


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_rows_land_in_their_slots_and_nowhere_else(block_size: int) -> None:
    slots = (
        np.random.default_rng(0).permutation(BLOCKS * block_size)[:6].reshape(2, 3).astype(np.int32)
    )
    k, v = rows(2, 3)
    cache = write(sentinel_cache(block_size), k, v, jnp.asarray(slots))
    assert written_slots(cache) == set(slots.ravel().tolist())
    np.testing.assert_array_equal(np.asarray(cache.k).reshape(-1, HEADS, DIM)[slots], k)
    np.testing.assert_array_equal(np.asarray(cache.v).reshape(-1, HEADS, DIM)[slots], v)


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_a_masked_row_writes_nothing(block_size: int) -> None:
    k, v = rows(2, 3)
    cache = write(sentinel_cache(block_size), k, v, jnp.full((2, 3), PAD_SLOT, jnp.int32))
    assert written_slots(cache) == set()


@pytest.mark.parametrize("block_size", [1, 2, 16])
@pytest.mark.parametrize("start", [0, 3, 14, 15, 16, 17])
def test_rows_past_max_model_len_and_guard_blocks_are_left_alone(
    block_size: int, start: int
) -> None:
    """max_model_len 16; the block after a request's last belongs to nobody, and is where a clamp or
    a wrap would write."""
    group, count = CacheGroup(block_size, 16), 4
    pages = 16 // block_size
    if pages + 2 > BLOCKS:
        cache = FullCache(
            *(
                jnp.full((pages + 2, block_size, HEADS, DIM), s, jnp.float32)
                for s in (SENTINEL, -SENTINEL)
            )
        )
    else:
        cache = sentinel_cache(block_size)
    table = jnp.arange(1, pages + 1, dtype=jnp.int32)[
        None
    ]  # block 0 and those past the last are guards
    (metadata,) = build_metadata(
        (group,),
        (table,),
        jnp.asarray([start], jnp.int32),
        jnp.asarray([count - 1], jnp.int32),
        count,
        attention=AttentionConfig(HEADS, HEADS, DIM),
        ops=REFERENCE_OPS,
    )
    cache = write(cache, *rows(1, count), metadata.slot_mapping)
    assert written_slots(cache) == {
        block_size + p for p in range(start, start + count - 1) if p < 16
    }


def test_writes_take_the_caches_dtype() -> None:
    cache = FullCache(
        jnp.zeros((2, 2, HEADS, DIM), jnp.bfloat16), jnp.zeros((2, 2, HEADS, DIM), jnp.bfloat16)
    )
    assert write(cache, *rows(1, 1), jnp.asarray([[3]], jnp.int32)).k.dtype == jnp.bfloat16


# --- specs

FLOAT32, BFLOAT16, INT32 = (jnp.dtype(d) for d in (jnp.float32, jnp.bfloat16, jnp.int32))
N, B = 3, 5  # blocks, and tokens of a block


def rows_spec(heads: int, width: int, *, axis: str | None = None, per_block: int = B) -> ArraySpec:
    return ArraySpec((N, per_block, heads, width), BFLOAT16, (None, None, axis, None))


def compressor_spec(width: int, series: int, entries: int) -> CompressorCache[ArraySpec]:
    inputs = ArraySpec((N, B, 1, 2 * series * width), FLOAT32, (None,) * 4)
    return CompressorCache(inputs, rows_spec(1, width, per_block=entries))


KEYS = rows_spec(2, 8, axis="kv_heads")
# By hand, for the tiny configs of tests.support.families. 5 tokens close at most two windows of 3
# tokens (ceil(5 / 3)), and one of 7.
EXPECTED = {
    "llama": (FullCache(KEYS, KEYS),) * 2,
    "gpt_oss": (FullCache(KEYS, KEYS),) * 2,
    "llama4_text": (FullCache(KEYS, KEYS),) * 2,
    "deepseek_v3": (LatentCache(rows_spec(1, 16 + 8)),) * 2,
    "deepseek_v4": (
        CompressedCache(rows_spec(1, 8), None, None),
        CompressedCache(rows_spec(1, 8), compressor_spec(8, 2, 2), compressor_spec(8, 2, 2)),
        CompressedCache(rows_spec(1, 8), compressor_spec(8, 1, 1), None),
    ),
    "ngram": (TokenCache(ArraySpec((N, B), INT32, (None, None))),),
}


def config(name: str) -> Any:
    return NgramConfig(48, 5, 1) if name == "ngram" else target_config(name)


@pytest.mark.parametrize("name", EXPECTED)
def test_each_kind_declares_its_arrays(name: str) -> None:
    cfg, layers = config(name), len(EXPECTED[name])
    assert cfg.num_layers == layers
    assert cache_specs(cfg.attention, (N,) * layers, B, jnp.bfloat16) == EXPECTED[name]


def test_every_kind_is_declared_above() -> None:
    assert {type(config(name).attention) for name in EXPECTED} == set(CACHE_KINDS)
    assert type(NgramConfig(48, 5, 1).attention) is TokenHistoryConfig


DRAFTS = sorted({*PAIRS, ("llama", "eagle"), ("llama", "eagle3")})


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT32])
@pytest.mark.parametrize("name", [*models.FAMILIES, *DRAFTS, "ngram"], ids=str)
def test_the_arrays_are_those_of_the_specs(name: str | tuple[str, str], dtype: jnp.dtype) -> None:
    """For every target and every draft, in pools of different sizes."""
    cfg = config(name) if isinstance(name, str) else draft_config(name[1], target_config(name[0]))
    num_blocks = tuple(range(2, 2 + cfg.num_layers))
    specs = cache_specs(cfg.attention, num_blocks, B, dtype)
    arrays = init_cache(cfg.attention, num_blocks, B, dtype)
    assert jax.tree.structure(specs) == jax.tree.structure(arrays)
    for spec, array in zip(jax.tree.leaves(specs), jax.tree.leaves(arrays), strict=True):
        assert (array.shape, array.dtype, array.nbytes) == (spec.shape, spec.dtype, spec.nbytes)
        assert len(spec.axes) == array.ndim
        assert not np.asarray(array).any()
    assert [jax.tree.leaves(layer)[0].shape[0] for layer in arrays] == list(num_blocks)
    assert len({x.unsafe_buffer_pointer() for x in jax.tree.leaves(arrays)}) == len(
        jax.tree.leaves(arrays)
    ), "each array has memory of its own, since programs write in place"


def test_auto_is_the_dtype_of_the_weights() -> None:
    for weights in (BFLOAT16, FLOAT32):
        assert resolve_cache_dtype("auto", weights) == weights
        assert resolve_cache_dtype("bfloat16", weights) == BFLOAT16
        assert resolve_cache_dtype("float32", weights) == FLOAT32
