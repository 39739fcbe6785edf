"""Many rows between products of fp8 weights: SwiGLU, and sums under a norm, come quantised by
token, with the bits of the ops one by one."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.fp8_matmul import (
    Fp8Weight,
    Inputs,
    RowNorm,
    Rows,
    fp8_matmul,
    product_and_norm,
    quantise,
    quantised_swiglu,
    quantises_next,
)
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_fp8_matmul import bits, fp8_weight, gain_of, residual_of, rows_of
from tests.support.slow import slow, slow_unless


def codes_of(rows: Rows) -> np.ndarray:
    return np.asarray(rows.codes).view(np.uint8)


def assert_same_rows(got: Rows, expected: Rows) -> None:
    np.testing.assert_array_equal(codes_of(got), codes_of(expected))
    np.testing.assert_array_equal(bits(got.scales), bits(expected.scales))


def assert_close_rows(got: Rows, expected: Rows, same: float, rest: float = 1 / 64) -> None:
    """The next code, where a rounding before it differs. same: least share of equal codes. rest: of
    a row's scale, by which values that are small in their row may differ"""
    a, b = (
        np.asarray(r.codes).astype(np.float64) * np.asarray(r.spread()) for r in (got, expected)
    )
    size = np.asarray(expected.spread())
    assert (np.abs(a - b) <= np.abs(b) / 6 + size * rest).all()
    assert (codes_of(got) == codes_of(expected)).mean() >= same


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


def uniform(seed: int, *shape: int) -> jax.Array:
    return jax.random.uniform(jax.random.key(seed), shape, jnp.float32, 0.5, 2.0)


def rounded(x: jax.Array) -> jax.Array:
    """x in bfloat16's precision. XLA drops a cast to bfloat16 and back."""
    return lax.reduce_precision(x, 8, 7)


# ---- the reference


def swiglu_inputs(rows: int, depth: int, width: int) -> Inputs[Fp8Weight]:
    weights = fp8_weight(0, width, depth, "channel"), fp8_weight(1, width, depth, "channel")
    return Inputs(x=rows_of(0, rows, depth, jnp.bfloat16), weights=weights, swiglu=True)


def sum_inputs(rows: int, depth: int, width: int) -> Inputs[Fp8Weight]:
    weights, residual = (fp8_weight(0, width, depth, "channel"),), residual_of(rows, width)
    return Inputs(x=rows_of(0, rows, depth, jnp.bfloat16), weights=weights, residual=residual)


def test_the_reference_is_the_ops_one_by_one() -> None:
    norm, gate_up, o = (
        RowNorm(gain_of(256), 1e-5),
        swiglu_inputs(5, 256, 64),
        sum_inputs(5, 256, 256),
    )
    expected = quantise(fp8_matmul(gate_up, norm=norm), "token")
    assert_same_rows(quantised_swiglu(gate_up, norm=norm), expected)
    stream, rows = product_and_norm(o, norm)
    np.testing.assert_array_equal(bits(stream), bits(fp8_matmul(o)))
    x = quantise(o.x, "token")
    given = dataclasses.replace(o, x=x.codes)
    np.testing.assert_array_equal(bits(fp8_matmul(given, scales=x.scales)), bits(stream))
    # The next product multiplies the codes as those of the norm that it would make itself.
    following = Inputs(x=stream, weights=(fp8_weight(7, 64, 256, "channel"),))
    got = fp8_matmul(dataclasses.replace(following, x=rows.codes), scales=rows.scales)
    np.testing.assert_array_equal(bits(got), bits(fp8_matmul(following, norm=norm)))


# ---- the kernels

# Rows, width. A CTA has two of more than 132 rows, and four warpgroups have 512 values in turn.
SWIGLU = {
    "few": (3, 1024),
    "65 rows": (65, 512),
    "three warpgroups' values": (66, 1536),
    "five warpgroups' values, odd rows in pairs": (133, 2560),
    "200 rows": (200, 1024),
    "256 rows": (256, 512),
    "too wide for two rows a CTA": (134, 16896),
    "llama-3-8b": (3, 14336),
}
SWIGLU_OFTEN = (
    "few",
    "five warpgroups' values, odd rows in pairs",
    "too wide for two rows a CTA",
)


def products_of(rows: int, width: int) -> Any:
    from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import Products

    gate, up = (100 * normal(seed, rows, width) for seed in (0, 1))
    return Products(
        gate, up, uniform(2, width) / 50, uniform(3, width) / 50, 4 * uniform(4, rows) - 2
    )


@jax.jit
def expected_swiglu(products: Any) -> jax.Array:
    """silu(gate) * up, rounded where the kernel rounds."""
    by_row = products.rows[:, None]
    gate = rounded(products.gate * products.gate_columns * by_row)
    up = rounded(products.up * products.up_columns * by_row)
    return rounded(rounded(gate / (1.0 + jnp.exp(-gate))) * up)


@needs_mosaic
@pytest.mark.parametrize("name", slow_unless(SWIGLU_OFTEN, SWIGLU))
def test_swiglu_of_sums_is_quantised_as_it_would_be_alone(name: str) -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import swiglu_rows

    products = products_of(*SWIGLU[name])
    with interpreted():
        got = swiglu_rows(products)
    assert_same_rows(got, quantise(expected_swiglu(products), "token"))


@needs_mosaic
def test_swiglu_of_nan_infinity_zeros_and_the_largest_values_stays_in_its_row() -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import swiglu_rows

    plain = products_of(8, 1024)._replace(rows=jnp.ones((8,)))
    gate, up = np.asarray(plain.gate).copy(), np.asarray(plain.up).copy()
    gate[1, 700], up[2, 900], gate[3] = np.nan, np.inf, 0.0
    gate[4], up[4] = 1e4, 3e38  # past the largest bfloat16
    gate[5], up[5] = 2e3, 1e37
    gate[6] = -1e30  # exp overflows
    products = plain._replace(gate=jnp.asarray(gate), up=jnp.asarray(up))
    with interpreted():
        got, alone = swiglu_rows(products), swiglu_rows(plain)
    expected = quantise(expected_swiglu(products), "token")
    for row in (0, 3, 5, 6, 7):
        assert_same_rows(got.take_rows(row, row + 1), expected.take_rows(row, row + 1))
    for row in (0, 7):
        assert_same_rows(got.take_rows(row, row + 1), alone.take_rows(row, row + 1))
    values = np.asarray(got.codes.astype(jnp.float32) * got.spread())
    finite = [row for row in range(8) if np.isfinite(values[row]).all()]
    assert finite == [0, 3, 5, 6, 7]
    assert np.asarray(got.scales)[3] == 1.0 and (values[3] == 0).all()
    assert np.abs(np.asarray(got.codes)[0].astype(np.float32)).max() == 448.0


@needs_mosaic
@pytest.mark.parametrize("place", [0, 130, 700, 1023])
def test_swiglu_finds_the_largest_magnitude_wherever_it_lies(place: int) -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import swiglu_rows

    products = products_of(2, 1536)
    gate = products.gate.at[:, place].set(3e4)
    products = products._replace(gate=gate, up=products.up.at[:, place].set(-3e4))
    with interpreted():
        got = swiglu_rows(products)
    assert_same_rows(got, quantise(expected_swiglu(products), "token"))
    assert (np.abs(np.asarray(got.codes)[:, place].astype(np.float32)) == 448.0).all()


# ---- gate, up and SwiGLU in one kernel

# Rows, depth, width, and a tuning: tile, cluster, stages, CTAs at once. The interpreter has no
# clusters.
TILED: dict[str, tuple[int, int, int, tuple[int, ...] | None]] = {
    "one step, one tile": (128, 128, 64, None),
    "a tile of 112 columns, two row tiles": (256, 256, 112, None),
    "more steps than stages": (128, 896, 96, (96, 1, 3)),
    "three tiles of a CTA, two of another": (128, 384, 320, (64, 1, 4, 2)),
    "two row tiles, CTAs of several tiles": (256, 256, 336, (112, 1, 5, 4)),
    "a tile of 80 columns": (128, 256, 80, (80, 1, 2)),
}


def tiled_inputs(rows: int, depth: int, width: int) -> tuple[Rows, Fp8Weight, Fp8Weight]:
    """Codes of random rows and weights, with products of about 1.5 and of 0.3."""

    def codes(seed: int, count: int) -> jax.Array:
        return jnp.clip(100 * normal(seed, count, depth), -448, 448).astype(jnp.float8_e4m3fn)

    sizes = (1.5e-4 / depth**0.5, 3e-5 / depth**0.5)
    scales = (size * uniform(seed, width) for seed, size in zip((3, 4), sizes, strict=True))
    gate, up = (Fp8Weight(codes(seed, width), s) for seed, s in zip((1, 2), scales, strict=True))
    return Rows(codes(0, rows), uniform(5, rows)), gate, up


def tiled(inputs: tuple[Rows, Fp8Weight, Fp8Weight], tuning: tuple[int, ...] | None) -> jax.Array:
    from pallas_kernels.fp8_matmul.mosaic_gpu import many_rows_swiglu as many

    with interpreted(races=True):
        return many.swiglu(*inputs, tuning=None if tuning is None else many.Tuning(*tuning))


class Exact(NamedTuple):
    """SwiGLU in float64, and the largest error of a value that roundings explain."""

    values: np.ndarray
    errors: np.ndarray


# Of a sum: its largest error beside its magnitude plus its row's root mean square.
FLOAT32 = 1e-5
TENSOR_CORES = 2.0**-6  # keep 14 bits of a sum; emulated at a depth of 4,096: up to 0.005


def swiglu_in_float64(x: Rows, gate: Fp8Weight, up: Fp8Weight, sums: float = FLOAT32) -> Exact:
    """Return SwiGLU of rows. Gate, up, silu(gate) and the product are rounded to bfloat16."""
    codes = np.asarray(x.codes, np.float64)

    def product(weight: Fp8Weight) -> tuple[np.ndarray, np.ndarray]:
        total = codes @ np.asarray(weight.codes, np.float64).T
        error = sums * (np.abs(total) + np.sqrt(np.mean(total**2, axis=1, keepdims=True)))
        scales = np.asarray(x.scales, np.float64)[:, None] * np.asarray(weight.scales, np.float64)
        return total * scales, np.abs(scales) * (error + 2.0**-8 * np.abs(total))

    (g, error_of_g), (u, error_of_u) = product(gate), product(up)
    silu = g / (1 + np.exp(-g))
    error_of_silu = 1.1 * error_of_g  # the steepest slope of silu
    errors = error_of_silu * (np.abs(u) + error_of_u) + np.abs(silu) * error_of_u
    return Exact(silu * u, errors + 2.1 * 2.0**-8 * np.abs(silu * u))


def assert_swiglu(got: jax.Array, expected: Exact) -> None:
    error = np.abs(np.asarray(got, np.float64) - expected.values)
    assert (error <= expected.errors).all(), (error / (expected.errors + 1e-30)).max()
    assert np.median(error / (np.abs(expected.values) + 1e-3)) <= 1.2 * 2.0**-8


@needs_mosaic
@pytest.mark.parametrize("name", TILED)
def test_gate_up_and_swiglu_in_one_kernel_equal_float64(name: str) -> None:
    *shape, tuning = TILED[name]
    inputs = tiled_inputs(*shape)
    got, exact = tiled(inputs, tuning), swiglu_in_float64(*inputs)
    assert_swiglu(got, exact)
    error = np.abs(np.asarray(got, np.float64) - exact.values)
    # Results that are small beside the others have their error from the gate's size.
    assert (error <= 6 * 2.0**-9 * (np.abs(exact.values) + exact.values.std())).all()


@needs_mosaic
def test_bits_do_not_depend_on_tile_ring_ctas_or_neighbours() -> None:
    x, gate, up = tiled_inputs(256, 384, 448)
    expected = bits(tiled((x, gate, up), (112, 1, 5)))
    for tuning in ((64, 1, 2), (64, 1, 7, 6), (112, 1, 3, 2)):
        np.testing.assert_array_equal(bits(tiled((x, gate, up), tuning)), expected)
    order = np.random.default_rng(0).permutation(256)[:128]
    few = Rows(x.codes[order], x.scales[order])
    np.testing.assert_array_equal(bits(tiled((few, gate, up), (112, 1, 5))), expected[order])


@needs_mosaic
def test_gates_far_from_zero_and_nan_stay_in_their_row() -> None:
    x, gate, up = tiled_inputs(128, 128, 64)
    scales = np.asarray(x.scales).copy()
    scales[[3, 4, 5]] = 300.0, -300.0, np.nan  # gates of +-450
    far = Rows(x.codes, jnp.asarray(scales))
    got, plain = tiled((far, gate, up), None), tiled((x, gate, up), None)
    others = np.delete(np.arange(128), [3, 4, 5])
    np.testing.assert_array_equal(bits(got)[others], bits(plain)[others])
    assert np.isnan(np.asarray(got[5], np.float32)).all()
    with np.errstate(over="ignore"):
        expected = swiglu_in_float64(far, gate, up).values[[3, 4]]
    np.testing.assert_allclose(np.asarray(got[3:5], np.float64), expected, rtol=0.02, atol=1e-4)


@needs_mosaic
def test_the_op_takes_that_kernel_and_has_the_bits_of_the_ops_one_by_one() -> None:
    """Of 128 rows, 7,168 columns fill an H200."""
    from pallas_kernels.fp8_matmul import mosaic_gpu

    x, gate, up = tiled_inputs(128, 256, 7168)
    inputs = Inputs(x=x.codes, weights=(gate, up), swiglu=True)
    with (
        interpreted(),
        mock.patch.object(
            mosaic_gpu.many_rows_swiglu, "swiglu", wraps=mosaic_gpu.many_rows_swiglu.swiglu
        ) as kernel,
    ):
        got = quantised_swiglu(inputs, scales=x.scales, implementation="mosaic_gpu")
        inner = kernel(x, gate, up)
    assert kernel.call_count == 2
    assert_same_rows(got, quantise(inner, "token"))
    assert_close_rows(got, quantised_swiglu(inputs, scales=x.scales), 0.9)


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "depth", "width", "tuning"),
    [
        (256, 4096, 14336, (112, 2, 4)),  # Llama-3-8B: two tiles for each of 128 CTAs
        (128, 4096, 14336, (112, 2, 4)),
        (256, 4096, 12288, (96, 2, 4)),
        (128, 4096, 12288, (96, 2, 4)),
        (256, 2048, 8192, (64, 2, 6)),
        (256, 4096, 11264, (64, 2, 6)),
        (128, 5120, 10240, (80, 2, 5)),
    ],
)
def test_which_gate_and_up_have_a_kernel(
    rows: int, depth: int, width: int, tuning: tuple[int, ...]
) -> None:
    from pallas_kernels.fp8_matmul import mosaic_gpu
    from pallas_kernels.fp8_matmul.mosaic_gpu import many_rows_swiglu as many

    assert many.choose_tuning(rows, width) == many.Tuning(*tuning)
    assert many.takes(rows, depth, width)
    others = ((192, depth, width), (384, depth, width), (rows, 4160, width), (rows, 128, width))
    for other in others:
        assert not many.takes(*other)
    assert not many.takes(rows, depth, width + 16)
    assert not many.takes(rows, depth, 1024)  # too few tiles for 132 SMs
    assert mosaic_gpu._swiglu_has_kernel(rows, depth, width)
    # Rows that the kernel behind does not quantise.
    assert not any(mosaic_gpu._swiglu_has_kernel(rows, depth, other) for other in (13824, 24576))


SUMS = {
    "65 rows": (1, 65, 1024),
    "four parts": (4, 130, 1024),
    "256 rows": (1, 256, 1024),
    "llama-3-8b's down": (4, 3, 4096),
    "no power of two": (4, 5, 5120),
}


def sums_of(parts: int, rows: int, width: int) -> Any:
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import Sums

    residual = rows_of(4, rows, width, jnp.bfloat16)
    sums = 100 * normal(0, parts, rows, width)
    return Sums(sums, uniform(1, width) / 50, uniform(2, rows), residual)


@jax.jit
def expected_stream(sums: Any) -> jax.Array:
    total = sums.parts[0]
    for part in sums.parts[1:]:
        total = total + part
    product = rounded(total * sums.columns * sums.rows[:, None])
    return rounded(sums.residual.astype(jnp.float32) + product).astype(jnp.bfloat16)


def add(sums: Any, norm: RowNorm) -> tuple[jax.Array, Rows, Rows]:
    """The stream, its norm in fp8, and what the kernel of the norm alone makes of the stream."""
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import add_and_quantise
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import quantise as quantise_by_kernel

    with interpreted():
        stream, rows = add_and_quantise(sums, norm)
        return stream, rows, quantise_by_kernel(stream, "token", None, norm)


@needs_mosaic
@pytest.mark.parametrize("name", slow_unless(SUMS.keys() - {"65 rows", "256 rows"}, SUMS))
def test_a_sum_under_its_norm_has_the_bits_of_two_kernels(name: str) -> None:
    sums, norm = sums_of(*SUMS[name]), RowNorm(gain_of(SUMS[name][2]), 1e-5)
    stream, rows, alone = add(sums, norm)
    np.testing.assert_array_equal(bits(stream), bits(expected_stream(sums)))
    count = len(stream)
    assert_same_rows(rows.take_rows(0, count), alone.take_rows(0, count))


@needs_mosaic
def test_a_sum_of_nan_infinity_or_zeros_stays_in_its_row() -> None:
    plain, norm = sums_of(2, 6, 1024), RowNorm(gain_of(1024), 1e-5)
    parts, residual = np.asarray(plain.parts).copy(), np.asarray(plain.residual, np.float32)
    parts[1, 1, 700], parts[0, 2, 900] = np.nan, np.inf
    parts[:, 3], residual[3] = 0.0, 0.0
    sums = plain._replace(parts=jnp.asarray(parts), residual=jnp.asarray(residual, jnp.bfloat16))
    (stream, rows, alone), (_, others, _) = add(sums, norm), add(plain, norm)
    expected = np.asarray(expected_stream(sums), np.float32)
    np.testing.assert_array_equal(np.asarray(stream, np.float32), expected)
    assert_same_rows(rows.take_rows(0, 6), alone.take_rows(0, 6))
    for row in (0, 4, 5):
        assert_same_rows(rows.take_rows(row, row + 1), others.take_rows(row, row + 1))
    values = np.asarray(rows.codes.astype(jnp.float32) * rows.spread())
    assert np.isnan(values[[1, 2]]).any(axis=1).all() and (values[3] == 0).all()


@needs_mosaic
def test_rows_have_the_bits_of_any_other_number_of_rows() -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import Sums
    from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import Products, swiglu_rows

    norm = RowNorm(gain_of(1024), 1e-5)
    products, sums = products_of(135, 1024), sums_of(2, 135, 1024)
    with interpreted():
        many = swiglu_rows(products)
        gate, up, gate_columns, up_columns, by_row = products
        few = swiglu_rows(Products(gate[:65], up[:65], gate_columns, up_columns, by_row[:65]))
    assert_same_rows(few, many.take_rows(0, 65))
    stream, rows, _ = add(sums, norm)
    less = Sums(sums.parts[:, :65], sums.columns, sums.rows[:65], sums.residual[:65])
    few_stream, few_rows, _ = add(less, norm)
    np.testing.assert_array_equal(bits(few_stream), bits(stream[:65]))
    assert_same_rows(few_rows, rows.take_rows(0, 65))


# ---- the ops


@needs_mosaic
@pytest.mark.parametrize("rows", [65, slow(200)])
def test_the_ops_with_kernels_are_the_reference_within_rounding(rows: int) -> None:
    """XLA on a CPU rounds the logistic function, and norms keep more bits in the interpreter."""
    norm, gate_up = RowNorm(gain_of(1024), 1e-5), swiglu_inputs(rows, 1024, 1536)
    x = quantise(gate_up.x, "token")
    gate_up = dataclasses.replace(gate_up, x=x.codes)
    with interpreted():
        inner = quantised_swiglu(gate_up, scales=x.scales, implementation="mosaic_gpu")
    assert_close_rows(inner, quantised_swiglu(gate_up, scales=x.scales), 0.9)
    down = dataclasses.replace(sum_inputs(rows, 1536, 1024), x=inner.codes)
    with interpreted():
        stream, normed = product_and_norm(
            down, norm, scales=inner.scales, implementation="mosaic_gpu"
        )
    expected, reference = product_and_norm(down, norm, scales=inner.scales)
    np.testing.assert_array_equal(bits(stream), bits(expected))
    assert_close_rows(normed, reference, 0.97)
    qkv = Inputs(x=normed.codes, weights=(fp8_weight(5, 64, 1024, "channel"),))
    with interpreted():
        got = fp8_matmul(qkv, scales=normed.scales, implementation="mosaic_gpu")
    np.testing.assert_array_equal(bits(got), bits(fp8_matmul(qkv, scales=normed.scales)))


@needs_mosaic
def test_swiglu_is_that_of_the_kernel_of_few_rows() -> None:
    gate_up = swiglu_inputs(66, 1024, 512)
    x = quantise(gate_up.x, "token")
    many = dataclasses.replace(gate_up, x=x.codes)
    few = dataclasses.replace(gate_up, x=gate_up.x[:16])
    with interpreted():
        got = quantised_swiglu(many, scales=x.scales, implementation="mosaic_gpu")
        inner = fp8_matmul(few, implementation="mosaic_gpu")
    # Float32 sums in another order: a value may be rounded to the next one.
    assert_close_rows(got.take_rows(0, 16), quantise(inner, "token"), 0.98)


@needs_mosaic
def test_a_product_of_codes_takes_a_bias() -> None:
    x, weight = rows_of(0, 72, 1024, jnp.bfloat16), fp8_weight(0, 128, 1024, "channel")
    rows, bias = quantise(x, "token"), 10 * normal(1, 128)
    codes = Inputs(x=rows.codes, weights=(weight,), bias=bias)
    with interpreted():
        got = fp8_matmul(codes, scales=rows.scales, implementation="mosaic_gpu")
    expected = fp8_matmul(dataclasses.replace(codes, x=x))
    np.testing.assert_array_equal(bits(got), bits(expected))


@needs_mosaic
def test_parts_of_the_depth_are_added_by_the_kernel() -> None:
    norm, down = RowNorm(gain_of(1024), 1e-5), sum_inputs(130, 12288, 1024)
    with interpreted():
        stream, rows = product_and_norm(down, norm, implementation="mosaic_gpu")
    expected, reference = product_and_norm(down, norm)
    np.testing.assert_array_equal(bits(stream), bits(expected))
    assert_close_rows(rows, reference, 0.97)


LLAMA = {"rows": 256, "width": 4096}


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"rows": 65}, True),
        ({"rows": 64}, False),  # kernels of few rows
        ({"rows": 257}, False),
        ({"width": 4096 + 512}, False),
        ({"width": 4096 + 512, "swiglu": True}, True),
        ({"width": 14336, "swiglu": True}, True),
        ({"width": 14336 + 256, "swiglu": True}, False),
        ({"width": 28672, "swiglu": True}, False),  # registers
        ({"width": 12288}, False),  # registers
    ],
)
def test_which_products_come_quantised(change: dict[str, Any], expected: bool) -> None:
    weight = fp8_weight(0, 64, 64, "channel")
    assert quantises_next(weights=(weight, weight), **(LLAMA | change)) == expected
    for form in ("block", "static", "scalar"):
        others = (weight, fp8_weight(0, 64, 64, form))
        assert not quantises_next(weights=others, **(LLAMA | change))


def test_what_does_not_fit_is_refused() -> None:
    gate_up, o, norm = (
        swiglu_inputs(66, 1024, 512),
        sum_inputs(66, 1024, 1024),
        RowNorm(gain_of(1024), 1e-5),
    )
    with pytest.raises(ValueError, match="expected swiglu and no residual, got swiglu False"):
        quantised_swiglu(o)
    with pytest.raises(
        ValueError, match="expected one weight, a residual, and neither bias nor swiglu"
    ):
        product_and_norm(gate_up, norm)
    for change in ({"swiglu": True, "weights": 2 * o.weights}, {"bias": jnp.zeros(1024)}):
        with pytest.raises(ValueError, match="neither bias nor swiglu, got"):
            product_and_norm(dataclasses.replace(o, **change), norm)
    with pytest.raises(ValueError, match=r"gain: expected \(1024,\), got \(512,\)"):
        product_and_norm(o, RowNorm(gain_of(512), 1e-5))
    with pytest.raises(ValueError, match="expected them with rows in fp8 alone, got bfloat16 and"):
        fp8_matmul(o, scales=jnp.ones((66,)))
    rows = quantise(o.x, "token")
    codes = dataclasses.replace(o, x=rows.codes)
    with pytest.raises(ValueError, match="in fp8 alone, got float8_e4m3fn and none"):
        fp8_matmul(codes)
    with pytest.raises(ValueError, match=r"scales: expected \(66,\), got \(3,\)"):
        fp8_matmul(codes, scales=jnp.ones((3,)))
    with pytest.raises(ValueError, match="expected no norm, and activations by token"):
        fp8_matmul(codes, norm=norm, scales=rows.scales)
    with pytest.raises(ValueError, match="largest: expected None with scales"):
        fp8_matmul(
            codes, largest=jnp.ones((64, 66)), scales=rows.scales, implementation="mosaic_gpu"
        )


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 64}, "expected 65 to 256 rows, got 64"),
        ({"width": 256}, "expected a result that a kernel quantises, got one of 256 values"),
        ({"out_dtype": jnp.float32}, "expected a bfloat16 result and residual, got float32"),
    ],
)
def test_what_no_kernel_quantises_is_refused(change: dict[str, Any], message: str) -> None:
    inputs = swiglu_inputs(change.get("rows", 66), 1024, change.get("width", 512))
    inputs = dataclasses.replace(inputs, out_dtype=change.get("out_dtype", jnp.bfloat16))
    with interpreted(), pytest.raises(ValueError, match=message):
        quantised_swiglu(inputs, implementation="mosaic_gpu")


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 128, 200, 256])
def test_a_layers_products_of_many_rows_on_the_gpu(rows: int) -> None:
    """Of a layer of Llama-3-8B. Many products of SwiGLU differ from XLA's by the next code, since
    XLA rounds less and some of its sums keep more bits."""
    norm, gate_up = RowNorm(gain_of(4096), 1e-5), swiglu_inputs(rows, 4096, 14336)
    x = quantise(gate_up.x, "token")
    gate_up = dataclasses.replace(gate_up, x=x.codes)
    inner = quantised_swiglu(gate_up, scales=x.scales, implementation="mosaic_gpu")
    exact = swiglu_in_float64(x, *gate_up.weights, sums=TENSOR_CORES)
    scales = np.asarray(inner.scales, np.float64)[:, None]
    most = exact.errors + (np.abs(exact.values) + exact.errors) / 16 + scales * 2.0**-10
    error = np.abs(np.asarray(inner.codes, np.float64) * scales - exact.values)
    assert (error <= most).all(), (error / most).max()
    by_xla = quantised_swiglu(gate_up, scales=x.scales)
    assert (codes_of(inner) == codes_of(by_xla)).mean() >= 0.85
    down = dataclasses.replace(sum_inputs(rows, 14336, 4096), x=inner.codes)
    stream, normed = product_and_norm(down, norm, scales=inner.scales, implementation="mosaic_gpu")
    expected, _ = product_and_norm(down, norm, scales=inner.scales)
    a, b = (np.asarray(x, np.float32) for x in (stream, expected))
    assert (np.abs(a - b) <= 2.0**-7 * (np.abs(b) + 1)).all()
    alone = quantise_by_kernel(stream, norm)
    assert_same_rows(normed, alone)


def quantise_by_kernel(stream: jax.Array, norm: RowNorm) -> Rows:
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import quantise as kernel

    return kernel(stream, "token", None, norm)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [14336, 12288, 11264, 10240])
def test_gate_up_and_swiglu_in_one_kernel_on_the_gpu(width: int) -> None:
    """Clusters share weights (256 rows) or rows (128). A row has the same bits in both. With 11,264
    and 10,240 columns some CTAs have a tile more than others."""
    x, gate, up = tiled_inputs(256, 4096, width)
    got = tiled((x, gate, up), None)
    assert_swiglu(got, swiglu_in_float64(x, gate, up, sums=TENSOR_CORES))
    np.testing.assert_array_equal(bits(tiled((x, gate, up), None)), bits(got))
    order = np.random.default_rng(0).permutation(256)[:128]
    few = Rows(x.codes[order], x.scales[order])
    np.testing.assert_array_equal(bits(tiled((few, gate, up), None)), bits(got)[order])
