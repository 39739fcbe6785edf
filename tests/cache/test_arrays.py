"""Cache writes: a masked row never writes, and no block but the addressed ones changes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.arrays import PAD_SLOT, FullCache, write
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, AttentionConfig, CacheGroup

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
