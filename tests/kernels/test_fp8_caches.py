"""Keys and values in fp8: divided by their scales, saturated and stored, and read with them."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import attention, rope_cache
from pallas_kernels.attention import shapes as attention_shapes
from pallas_kernels.dtypes import narrowed
from pallas_kernels.rope_cache import shapes as rope_cache_shapes
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_dtypes import ATTENTION, ROPE

FP8 = jnp.float8_e4m3fn
SCALES = {"a head": np.array([0.02, 0.5], np.float32), "all heads": np.array([0.1], np.float32)}


def test_what_is_too_large_becomes_the_largest_number() -> None:
    values = jnp.array([1e9, -1e9, 448.0, 460.0, 0.3, 0.0])
    stored = np.asarray(narrowed(values, FP8).astype(jnp.float32))
    np.testing.assert_array_equal(stored[:4], [448, -448, 448, 448])
    np.testing.assert_allclose(stored[4:], [0.3, 0], rtol=1 / 16)
    assert narrowed(values, jnp.bfloat16).dtype == jnp.bfloat16


@needs_mosaic
@pytest.mark.parametrize("kind", SCALES)
def test_the_kernel_stores_the_reference_codes(kind: str) -> None:
    shape = replace(ROPE, batch=1, head_dim=64, dtype="bfloat16", packed=True, fp8=True)
    inputs = rope_cache_shapes.make_inputs(shape, seed=0)
    scale = jnp.asarray(SCALES[kind] / 40)  # the largest rows saturate
    inputs = replace(inputs, k_scale=scale, v_scale=2 * scale)
    expected = rope_cache.rope_and_write(inputs)
    assert np.abs(np.asarray(expected[1]).astype(np.float32)).max() == 448
    from pallas_kernels.rope_cache import mosaic_gpu

    with interpreted():
        got = mosaic_gpu.rope_and_write(inputs, pdl=False)
    for mine, theirs in zip(got[1:], expected[1:], strict=True):
        codes, others = (np.asarray(x).astype(np.float32) for x in (mine, theirs))
        np.testing.assert_array_equal(codes, others)


@pytest.mark.parametrize("kind", SCALES)
def test_rows_are_stored_over_their_scales(kind: str) -> None:
    inputs = rope_cache_shapes.make_inputs(ROPE, seed=0)
    empty = jnp.zeros(inputs.k_cache.shape, jnp.float32)
    k, v = rope_cache.rope_and_write(replace(inputs, k_cache=empty, v_cache=empty))[1:]
    scale = jnp.asarray(SCALES[kind])
    given = replace(
        inputs,
        k_cache=empty.astype(FP8),
        v_cache=empty.astype(FP8),
        k_scale=scale,
        v_scale=2 * scale,
    )
    _, k_codes, v_codes = rope_cache.rope_and_write(given)
    for codes, rows, factor in ((k_codes, k, scale), (v_codes, v, 2 * scale)):
        assert codes.dtype == FP8
        expected = np.clip(np.asarray(rows) / np.asarray(factor)[:, None], -448, 448)
        np.testing.assert_array_equal(
            np.asarray(codes.astype(jnp.float32)),
            expected.astype(ml_dtypes.float8_e4m3fn).astype(np.float32),
        )


@pytest.mark.parametrize("kind", SCALES)
def test_attention_reads_codes_times_scales(kind: str) -> None:
    """The specification: attention over dequantised keys and values in float32."""
    inputs = attention_shapes.make_inputs(ATTENTION, seed=0)
    k_scale = SCALES[kind]
    v_scale = 3 * k_scale[::-1]
    k, v = (narrowed(cache / 0.1, FP8) for cache in (inputs.k_cache, inputs.v_cache))
    scales = {"k_scale": jnp.asarray(k_scale), "v_scale": jnp.asarray(v_scale)}
    got = attention.paged_attention(replace(inputs, k_cache=k, v_cache=v, **scales))
    plain = [
        jnp.asarray(np.asarray(codes.astype(jnp.float32)) * scale[:, None])
        for codes, scale in ((k, k_scale), (v, v_scale))
    ]
    expected = attention.paged_attention(replace(inputs, k_cache=plain[0], v_cache=plain[1]))
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    swapped = replace(inputs, k_cache=k, v_cache=v, k_scale=scales["v_scale"], v_scale=None)
    assert np.abs(np.asarray(attention.paged_attention(swapped) - expected)).max() > 0.01
