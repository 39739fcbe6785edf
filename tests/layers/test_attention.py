"""The writes of keys and values, with queries beside them and without."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.arrays import FullCache, init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS, AttentionConfig, CacheGroup, RopeConfig
from jaxspec.layers.attention import attend_qkv, write_keys
from jaxspec.layers.context import Pass

CFG = AttentionConfig(
    num_heads=4, num_kv_heads=2, head_dim=16, rope=RopeConfig.from_hf({"rope_theta": 1e4})
)
ROWS, BLOCK_SIZE = 6, 4


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float32"])
def test_rows_without_queries_are_written_as_rows_with_them(dtype: str) -> None:
    """A checkpoint's scales too, which an fp8 cache alone reads."""
    groups = (CacheGroup(BLOCK_SIZE, 16, None),)
    table = jnp.asarray([[2, 0, 3, 1]], jnp.int32)
    start, num = jnp.asarray([1], jnp.int32), jnp.asarray([ROWS], jnp.int32)
    metadata = build_metadata(groups, (table,), start, num, ROWS, attention=CFG, ops=REFERENCE_OPS)
    pass_ = Pass(metadata, REFERENCE_OPS).with_rope(CFG)
    (cache,) = init_cache(CFG, [4], BLOCK_SIZE, jnp.dtype(dtype))
    assert isinstance(cache, FullCache)
    params = {
        "k_scale": jnp.asarray([0.25, 2.0], jnp.float32),
        "v_scale": jnp.asarray([0.5, 3.0], jnp.float32),
    }
    heads = CFG.num_heads + 2 * CFG.num_kv_heads
    qkv = jax.random.normal(jax.random.key(0), (1, ROWS, heads * CFG.head_dim), jnp.float32)
    _, expected = attend_qkv(params, CFG, qkv, cache, pass_)
    kv = qkv[..., CFG.num_heads * CFG.head_dim :]
    written = write_keys(params, CFG, kv, cache, pass_)
    for ours, theirs in ((written.k, expected.k), (written.v, expected.v)):
        values = np.asarray(theirs, np.float32)
        assert np.count_nonzero(values) >= ROWS * CFG.num_kv_heads * CFG.head_dim // 2
        np.testing.assert_array_equal(np.asarray(ours, np.float32), values)
