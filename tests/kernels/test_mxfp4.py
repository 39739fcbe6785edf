"""MXFP4 in the kernel's order: every code and scale has its value; the op's results have the bits
of the dequantised experts'."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.moe import Mxfp4Weight, dequantise, experts
from pallas_kernels.moe.mxfp4 import (
    BLOCK,
    CODE_WORDS,
    LARGEST_NARROW,
    LEFT,
    NAN,
    NORMALISE,
    SPREAD,
    pack,
    power_words,
    registers,
)
from pallas_kernels.moe.shapes import SHAPES, Shape, make_inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_moe import assert_close, ground_truth, plain

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])  # by a code's last three bits


def codes_and_scales(
    seed: int, shape: tuple[int, int, int], scales: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random codes with these scales, shuffled: blocks, scales, and the weights in float64.

    shape: [experts, depth, width]
    """
    rng = np.random.default_rng(seed)
    count, depth, width = shape
    codes = rng.integers(0, 16, (count, width, depth)).astype(np.uint8)
    of_block = np.resize(rng.permutation(scales), (count, width, depth // BLOCK)).astype(np.uint8)
    pairs = codes.reshape(count, width, depth // BLOCK, BLOCK // 2, 2)
    blocks = pairs[..., 0] | pairs[..., 1] << 4
    powers = np.where(of_block == NAN, np.nan, 2.0 ** (of_block.astype(float) - 127))
    signs = np.where(codes >> 3, -1.0, 1.0)
    values = signs * MAGNITUDES[codes & 7] * np.repeat(powers, BLOCK, axis=-1)
    return blocks, of_block, values.swapaxes(1, 2)


def same_bits(got: Any, expected: Any) -> bool:
    """NaN equals NaN, and -0 is not 0."""
    width = f"uint{8 * np.asarray(got).dtype.itemsize}"
    got, expected = np.asarray(got), np.asarray(expected)
    nan = np.isnan(got.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(expected.astype(np.float32)))
    return bool((got.view(width) == expected.view(width))[~nan].all())


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_every_code_at_every_scale_has_its_value(dtype: Any) -> None:
    """Subnormal, infinite and NaN among them; the 256 scales stand at all places of a unit."""
    blocks, scales, values = codes_and_scales(0, (2, 96, 48), np.arange(256))
    weight = Mxfp4Weight(jnp.asarray(pack(blocks, scales)), wide=True)
    assert weight.shape == values.shape
    with np.errstate(over="ignore"):
        expected = values.astype(dtype)
    assert same_bits(weight.to_array(dtype), expected)


@pytest.mark.parametrize("wide", [False, True])
def test_the_kernels_arithmetic_gives_the_value(wide: bool) -> None:
    """What a lane does with its words, in numpy; float64 rounds to bfloat16 as the GPU does."""
    scales = np.arange(256 if wide else LARGEST_NARROW + 1)
    blocks, scales, values = codes_and_scales(1, (1, 128, 64), scales)
    units = pack(blocks, scales)[0].view(np.uint32)
    least, more = power_words(wide)

    def halves(word: Any) -> np.ndarray:
        return np.asarray(word, np.uint32)[..., None].view(ml_dtypes.bfloat16)

    def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore", invalid="ignore"):
            wide_product = a.astype(np.float64) * b.astype(np.float64)
            return wide_product.astype(ml_dtypes.bfloat16)

    with np.errstate(over="ignore"):
        expected = values[0].astype(ml_dtypes.bfloat16)
    for column, block in np.ndindex(*units.shape[:2]):
        unit = units[column, block]
        words = unit[:CODE_WORDS].reshape(8, 4, 2)
        found = registers(
            words[..., 0],
            words[..., 1],
            rotate=lambda w, bits: (w >> np.uint32(bits)) | (w << np.uint32(32 - bits)),
            blend=lambda a, b: (a & LEFT) | (b & ~LEFT),
        )
        powers = unit[CODE_WORDS:].view(np.uint8).reshape(8, 2).astype(np.uint32) * SPREAD
        powers = np.maximum(powers, least) if wide else powers + more
        for register, pairs in enumerate(found):
            j, k, h = register >> 2, (register >> 1) & 1, register & 1
            value = halves(pairs)  # [g, t, depth of the pair]
            if wide:
                value = product(value, halves(np.uint32(NORMALISE)))
            value = product(value, halves(powers[:, h])[:, None])
            first = BLOCK * block + 16 * j + 8 * k
            depths = first + np.arange(8)
            columns = 16 * column + 8 * h + np.arange(8)
            assert same_bits(value.reshape(8, 8).T, expected[np.ix_(depths, columns)])


# Small enough for the interpreter.
SMALL = {
    "few rows": Shape(3, 4, 2, 128, 64, gate="clamped", bias=True, mxfp4=True),
    "few rows, a last item that overlaps": Shape(4, 4, 2, 192, 64, mxfp4=True),
    "many rows": Shape(20, 4, 2, 64, 192, gate="clamped_silu", bias=True, mxfp4=True),
    "one expert of 40 rows": Shape(40, 4, 2, 64, 64, bias=True, routing="same", mxfp4=True),
}


@needs_mosaic
@pytest.mark.parametrize("name", SMALL)
def test_packed_experts_equal_float64(name: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    with interpreted():
        got = np.asarray(experts(inputs, implementation="mosaic_gpu")).astype(np.float32)
    assert_close(shape, got, ground_truth(inputs))
    reference = np.asarray(experts(inputs)).astype(np.float32)
    np.testing.assert_array_equal(reference, np.asarray(experts(plain(inputs))).astype(np.float32))


@needs_mosaic
def test_a_device_with_some_of_the_packed_experts_adds_those_alone() -> None:
    inputs = make_inputs(SMALL["many rows"], seed=3)
    ids = np.asarray(inputs.ids)
    here = (ids >= 1) & (ids < 3)
    held: dict[str, Any] = {
        name: dataclasses.replace(getattr(inputs, name), units=getattr(inputs, name).units[1:3])
        for name in ("gate_up", "down")
    } | {name: getattr(inputs, name)[1:3] for name in ("gate_up_bias", "down_bias")}
    some = dataclasses.replace(inputs, first_expert=jnp.int32(1), **held)
    masked = dataclasses.replace(inputs, weights=jnp.where(here, inputs.weights, 0))
    with interpreted():
        got, expected = (
            np.asarray(experts(i, implementation="mosaic_gpu")).astype(np.float32)
            for i in (some, masked)
        )
    np.testing.assert_array_equal(got, expected)


@needs_mosaic
def test_the_kernel_dequantises_the_experts_that_are_named() -> None:
    weight: Any = make_inputs(Shape(1, 3, 1, 192, 64, mxfp4=True), seed=0).gate_up
    chosen = jnp.asarray([2, 0, 2, 1, 1], jnp.int32)
    one = lambda e: dequantise(weight, e, jnp.bfloat16, implementation="mosaic_gpu")  # noqa: E731
    with interpreted():
        got = jax.vmap(one)(chosen)
        alone = one(chosen[0])
    expected = weight.to_array(jnp.bfloat16)[np.asarray(chosen)]
    assert same_bits(got, expected) and same_bits(alone, expected[0])
    reference = jax.vmap(lambda e: dequantise(weight, e, jnp.float32))(chosen)
    assert same_bits(reference, weight.to_array(jnp.float32)[np.asarray(chosen)])


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.mxfp4])
@pytest.mark.parametrize("routing", ["random", "same", "spread"])
def test_packed_experts_have_the_bits_of_plain_ones(name: str, routing: str) -> None:
    inputs = make_inputs(dataclasses.replace(SHAPES[name], routing=routing), seed=7)
    got = experts(inputs, implementation="mosaic_gpu")
    assert same_bits(got, experts(plain(inputs), implementation="mosaic_gpu"))


@pytest.mark.gpu
def test_a_packed_rows_bits_do_not_depend_on_its_neighbours() -> None:
    inputs = make_inputs(SHAPES["gpt-oss-20b mxfp4 rows 96"], seed=5)
    everything = np.asarray(experts(inputs, implementation="mosaic_gpu"))
    for rows in (1, 4, 8, 16, 64):
        some = {name: getattr(inputs, name)[:rows] for name in ("x", "ids", "weights")}
        got = experts(dataclasses.replace(inputs, **some), implementation="mosaic_gpu")
        assert same_bits(got, everything[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [4, 40])
def test_every_scale_has_the_bits_of_plain_experts(rows: int) -> None:
    """All 256 scales, NaN among them, in some experts; up to 2 ** 1 in others."""
    inputs = make_inputs(Shape(rows, 4, 2, 512, 256, mxfp4=True), seed=2)
    inputs = dataclasses.replace(inputs, x=inputs.x * jnp.bfloat16(2.0**-30))
    weights = {}
    for name in ("gate_up", "down"):
        shape = getattr(inputs, name).shape
        blocks, scales, _ = codes_and_scales(3, shape, np.arange(256))
        scales[0] = np.minimum(scales[0], 200)
        scales[2:] = np.minimum(scales[2:], LARGEST_NARROW)
        weights[name] = Mxfp4Weight(jnp.asarray(pack(blocks, scales)), wide=True)
    inputs = dataclasses.replace(inputs, **weights)
    got = experts(inputs, implementation="mosaic_gpu")
    expected = experts(plain(inputs), implementation="mosaic_gpu")
    assert same_bits(got, expected)
    assert 0 < np.isnan(np.asarray(expected).astype(np.float32)).mean() < 1


@pytest.mark.gpu
def test_dequantised_experts_have_every_bit() -> None:
    blocks, scales, _ = codes_and_scales(4, (3, 576, 256), np.arange(256))
    for wide in (False, True):
        kept = scales if wide else np.minimum(scales, LARGEST_NARROW)
        weight = Mxfp4Weight(jnp.asarray(pack(blocks, kept)), wide)
        got = jax.vmap(
            lambda e, w=weight: dequantise(w, e, jnp.bfloat16, implementation="mosaic_gpu")
        )(jnp.arange(3))
        assert same_bits(got, weight.to_array(jnp.bfloat16))
