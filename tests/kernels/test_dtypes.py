"""The references where the cache's dtype differs from that of queries and projections: nothing is
rounded but what is stored in a narrower dtype, and that once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attention, latent_attention, latent_cache, rope_cache
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.dtypes import rounded_division, wider
from pallas_kernels.latent_attention import shapes as latent_attention_shapes
from pallas_kernels.latent_cache import shapes as latent_cache_shapes
from pallas_kernels.rope_cache import shapes as rope_cache_shapes

FLOAT32, BFLOAT16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
mixed = pytest.mark.parametrize(
    ("dtype", "cache_dtype"), [(BFLOAT16, FLOAT32), (FLOAT32, BFLOAT16)], ids=str
)

ATTENTION = attention_shapes.Shape(
    lengths=(5, 17), rows=2, num_heads=4, num_kv_heads=2, head_dim=64, block_size=8, dtype="float32"
)
LATENT_ATTENTION = latent_attention_shapes.Shape(
    lengths=(5, 17),
    rows=2,
    num_heads=4,
    kv_lora_rank=64,
    rope_head_dim=64,
    block_size=8,
    dtype="float32",
)
ROPE = rope_cache_shapes.Shape(
    2, 3, num_heads=4, num_kv_heads=2, head_dim=64, block_size=8, packed=False, dtype="float32"
)
LATENTS = latent_cache_shapes.Shape(
    3, q_lora_rank=64, kv_lora_rank=64, block_size=8, dtype="float32"
)


def cast(inputs: Any, dtype: jnp.dtype, *names: str) -> Any:
    """The inputs with these arrays in this dtype."""
    return replace(inputs, **{name: getattr(inputs, name).astype(dtype) for name in names})


def assert_equal(got: jax.Array, expected: jax.Array) -> None:
    """To the bit, dtype included; unwritten cache slots are NaN in both."""
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(*(np.asarray(x.astype(FLOAT32)) for x in (got, expected)))


@pytest.mark.parametrize("shape", [(64, 1), (512,), ()], ids=str)
def test_division_is_rounded_once_whatever_is_broadcast(shape: tuple[int, ...]) -> None:
    """XLA multiplies by the inverse where it sees a broadcast."""
    rng = np.random.default_rng(len(shape))
    x = rng.normal(size=(64, 512)).astype(np.float32)
    x[:3, 0] = np.nan, np.inf, 0.0
    divisor = np.abs(rng.normal(size=shape)).astype(np.float32)
    expected = x / divisor
    np.testing.assert_array_equal(jax.jit(rounded_division)(x, divisor), expected)
    plain = jax.jit(lambda x, divisor: x / divisor)(x, divisor)
    assert (np.nan_to_num(plain) != np.nan_to_num(expected)).any()


def test_the_wider_dtype_has_more_bits() -> None:
    assert wider(jnp.bfloat16, jnp.float32) == wider(jnp.float32, jnp.bfloat16) == FLOAT32
    assert wider(jnp.bfloat16, jnp.bfloat16) == BFLOAT16


@mixed
def test_attention_computes_in_the_wider_dtype(dtype: jnp.dtype, cache_dtype: jnp.dtype) -> None:
    inputs = attention_shapes.make_inputs(ATTENTION, seed=0)
    given = cast(cast(inputs, dtype, "q"), cache_dtype, "k_cache", "v_cache")
    wide = cast(given, FLOAT32, "q", "k_cache", "v_cache")
    expected = attention.paged_attention(wide).astype(dtype)
    assert_equal(attention.paged_attention(given), expected)


@mixed
def test_latent_attention_computes_in_the_wider_dtype(
    dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> None:
    inputs = latent_attention_shapes.make_inputs(LATENT_ATTENTION, seed=0)
    given = cast(cast(inputs, dtype, "q"), cache_dtype, "cache")
    expected = latent_attention.latent_attention(cast(given, FLOAT32, "q", "cache")).astype(dtype)
    assert_equal(latent_attention.latent_attention(given), expected)


@mixed
def test_a_rotated_key_is_rounded_to_the_caches_dtype_alone(
    dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> None:
    inputs = rope_cache_shapes.make_inputs(ROPE, seed=0)
    empty = jnp.zeros_like(inputs.k_cache)
    inputs = replace(inputs, k_cache=empty, v_cache=empty)
    given = cast(cast(inputs, dtype, "qkv"), cache_dtype, "k_cache", "v_cache")
    wide = cast(given, FLOAT32, "qkv", "k_cache", "v_cache")
    q, k, v = rope_cache.rope_and_write(given)
    exact_q, exact_k, exact_v = rope_cache.rope_and_write(wide)
    assert_equal(q, exact_q.astype(dtype))
    assert_equal(k, exact_k.astype(cache_dtype))
    assert_equal(v, exact_v.astype(cache_dtype))
    in_both = rope_cache.rope_and_write(cast(given, BFLOAT16, "qkv", "k_cache", "v_cache"))[1]
    if cache_dtype == FLOAT32:
        assert (k != in_both.astype(FLOAT32)).any(), "bfloat16 holds these keys as well"


@mixed
def test_a_cached_latent_is_rounded_to_the_caches_dtype_alone(
    dtype: jnp.dtype, cache_dtype: jnp.dtype
) -> None:
    """The norm of a latent has the dtype of its projection, as everywhere."""
    inputs = latent_cache_shapes.make_inputs(LATENTS, seed=0)
    inputs = replace(inputs, cache=jnp.zeros_like(inputs.cache))
    given = cast(cast(inputs, dtype, "latents"), cache_dtype, "cache")
    q, cache = latent_cache.norm_and_write(given)
    exact_q, exact = latent_cache.norm_and_write(cast(given, FLOAT32, "latents", "cache"))
    same_q, same = latent_cache.norm_and_write(cast(given, dtype, "latents", "cache"))
    rank = LATENTS.kv_lora_rank
    assert q is not None and exact_q is not None and same_q is not None
    assert_equal(q, same_q)
    assert_equal(cache[..., rank:], exact[..., rank:].astype(cache_dtype))
    assert_equal(cache[..., :rank], same[..., :rank].astype(cache_dtype))
    if cache_dtype == FLOAT32:
        keys = cache[..., rank:]
        assert (keys != same[..., rank:].astype(FLOAT32)).any(), "bfloat16 holds these keys as well"
