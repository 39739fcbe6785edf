"""Products of fp8 weights and rows equal float64 products of what their codes stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8_matmul import (
    Fp8Weight,
    Inputs,
    RowNorm,
    Rows,
    fp8_matmul,
    measured_swiglu,
    quantise,
    reference,
    takes_largest,
    takes_norm,
)
from pallas_kernels.rms_norm import rms_norm
from tests.kernels.interpreter import interpreted, needs_mosaic

FORMS = ("channel", "scalar", "block", "static")
# Largest error, in units of the value's size plus the root mean square of the result: one rounding
# of the result to bfloat16, four with SwiGLU, or float32 sums of 300 terms.
TOLERANCE = {"bfloat16": 2 * 2.0**-8, "swiglu": 5 * 2.0**-8, "float32": 1e-6}


def fp8_weight(seed: int, width: int, depth: int, form: str) -> Fp8Weight:
    """All finite codes, with scales that differ by up to a factor of 4."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (width, depth), np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    shapes = {"channel": (width,), "block": (-(-width // 128), -(-depth // 128))}
    scales = rng.uniform(0.5, 2.0, shapes.get(form, ())).astype(np.float32) / depth
    static = form == "static"
    return Fp8Weight(
        jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)),
        jnp.asarray(scales),
        jnp.float32(0.01) if static else None,
        "static" if static else "block" if form == "block" else "token",
    )


def rows_of(seed: int, rows: int, depth: int, dtype: Any) -> jax.Array:
    """Rows of different sizes, one of zeros, and one with a value far above the others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, depth)) * 2.0 ** rng.integers(-6, 6, (rows, 1))
    x[0, 0] = 1000.0
    x[1:][-1:] = 0.0
    return jnp.asarray(x, dtype)


def quantised(x: jax.Array, weight: Fp8Weight) -> np.ndarray:
    """float64 values of the rows' codes times scales, from numpy alone."""
    values = np.asarray(x).astype(np.float32)
    if weight.activation_scale is not None:
        scale = np.full((len(values), 1), np.asarray(weight.activation_scale))
    elif weight.activation == "token":
        scale = np.abs(values).max(axis=1, keepdims=True) / np.float32(448)
    else:
        parts = [np.abs(values[:, i : i + 128]) for i in range(0, values.shape[1], 128)]
        largest = [part.max(axis=1, keepdims=True).repeat(part.shape[1], axis=1) for part in parts]
        scale = np.concatenate(largest, axis=1) / np.float32(448)
    scale = np.where(scale == 0, np.float32(1), scale).astype(np.float32)
    codes = np.clip(values / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * scale.astype(np.float64)


def values_of(rows: Rows) -> np.ndarray:
    """float64 values of codes times scales."""
    codes, scales = np.asarray(rows.codes), np.asarray(rows.spread())
    return codes.astype(np.float64) * scales.astype(np.float64)


def dequantised(weight: Fp8Weight) -> np.ndarray:
    """float64 [out, in]."""
    codes = np.asarray(weight.codes).astype(np.float64)
    scales = np.asarray(weight.scales).astype(np.float64)
    if scales.ndim == 2:
        scales = scales.repeat(128, axis=0).repeat(128, axis=1)[: len(codes), : codes.shape[1]]
    elif scales.ndim == 1:
        scales = scales[:, None]
    return codes * scales


def ground_truth(inputs: Inputs[Fp8Weight], rows: Rows | None = None) -> np.ndarray:
    """float64 [rows, width]; nothing but the operands is rounded.

    rows: inputs.x in fp8. XLA's division on a GPU is not exact, so its codes are not numpy's.
    """
    results = [
        (quantised(inputs.x, w) if rows is None else values_of(rows)) @ dequantised(w).T
        for w in inputs.weights
    ]
    if inputs.swiglu:
        gate, up = results
        results = [gate / (1 + np.exp(np.minimum(-gate, 700.0))) * up]
    result = np.concatenate(results, axis=1)
    if inputs.bias is not None:
        result = result + np.asarray(inputs.bias).astype(np.float64)
    if inputs.residual is None:
        return result
    return result + np.asarray(inputs.residual).astype(np.float64)


def assert_close(inputs: Inputs[Fp8Weight], got: Any, rows: Rows | None = None) -> None:
    expected, got = ground_truth(inputs, rows), np.asarray(got).astype(np.float64)
    assert got.shape == expected.shape and np.isfinite(got).all()
    kind = "swiglu" if inputs.swiglu else jnp.dtype(inputs.out_dtype).name
    error = np.abs(got - expected) / (np.abs(expected) + np.sqrt(np.square(expected).mean()))
    assert error.max() <= TOLERANCE[kind], error.max()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_equals_float64(form: str, dtype: str) -> None:
    weights = fp8_weight(0, 200, 300, form), fp8_weight(1, 128, 300, form)
    x = rows_of(2, 5, 300, dtype)
    inputs = Inputs(x=x, weights=weights, out_dtype=jnp.dtype(dtype))
    assert_close(inputs, fp8_matmul(inputs))


def test_a_narrow_result_is_the_sum_of_parts_of_the_depth() -> None:
    rng = np.random.default_rng(0)
    x, codes = (rng.integers(-8, 9, (n, 12288)).astype(np.float32) for n in (256, 200))
    parts = reference.products_of_parts(jnp.asarray(x), jnp.asarray(codes))
    assert len(parts) == 4
    got = reference.add_parts(parts)
    np.testing.assert_array_equal(got, x @ codes.T)  # integers: float32 holds every sum


@pytest.mark.parametrize(
    ("rows", "depth", "width", "parts"),
    [
        (256, 14336, 4096, 4),
        (192, 12288, 4096, 4),
        (256, 28672, 8192, 1),  # wide
        (128, 14336, 4096, 1),
        (512, 14336, 1024, 1),
        (256, 4096, 4096, 1),
        (256, 14336 + 128, 4096, 1),  # no parts of whole blocks
    ],
)
def test_only_narrow_results_from_great_depths_are_multiplied_in_parts(
    rows: int, depth: int, width: int, parts: int
) -> None:
    operands = (jax.ShapeDtypeStruct((n, depth), jnp.float8_e4m3fn) for n in (rows, width))
    made = jax.eval_shape(reference.products_of_parts, *operands)
    assert made.shape == (parts, rows, width)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_fuses_swiglu_and_residual(form: str) -> None:
    weights = fp8_weight(0, 64, 300, form), fp8_weight(1, 64, 300, form)
    residual = jax.random.normal(jax.random.key(0), (5, 64), jnp.bfloat16)
    x = rows_of(2, 5, 300, jnp.bfloat16)
    inputs = Inputs(x=x, weights=weights, residual=residual, swiglu=True)
    assert_close(inputs, fp8_matmul(inputs))


def test_codes_of_nan_give_nan_in_their_column_alone() -> None:
    weight = fp8_weight(0, 64, 128, "channel")
    for code in (0x7F, 0xFF):
        codes = np.asarray(weight.codes).view(np.uint8).copy()
        codes[3, 5] = code
        damaged = dataclasses.replace(
            weight, codes=jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn))
        )
        x = jnp.ones((2, 128), jnp.float32)
        got = fp8_matmul(Inputs(x=x, weights=(damaged,), out_dtype=jnp.float32))
        assert (np.isnan(got) == (np.arange(64) == 3)).all()


@pytest.mark.parametrize("activation", ["token", "block"])
def test_a_row_is_quantised_alike_beside_any_other(activation: Any) -> None:
    x = rows_of(0, 8, 300, jnp.bfloat16)
    together = quantise(x, activation)
    for row in range(8):
        alone = quantise(x[row : row + 1], activation)
        assert (alone.scales == together.scales[..., row : row + 1]).all()
        assert (alone.codes.view(jnp.uint8) == together.codes[row].view(jnp.uint8)).all()


def test_values_past_the_largest_saturate_and_ties_go_to_even() -> None:
    x = jnp.asarray([[448.0, 464.0, 465.0, -1e9, 17.0, 19.0]], jnp.float32)
    codes = np.asarray(quantise(x, "static", jnp.float32(1.0)).codes).astype(np.float64)
    assert codes.tolist() == [[448.0, 448.0, 448.0, -448.0, 16.0, 20.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": jnp.ones((3,))}, r"scales: expected \(\) or \(64,\) or \(1, 2\), got \(3,\)"),
        ({"activation_scale": jnp.float32(1)}, "activation_scale: expected none with 'token'"),
        ({"activation": "static"}, "activation_scale: expected a scale with 'static'"),
        ({"activation": "tensor"}, "activation: expected one of token, block, static"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    weight = dataclasses.replace(fp8_weight(0, 64, 256, "channel"), **change)
    with pytest.raises(ValueError, match=message):
        fp8_matmul(Inputs(x=jnp.ones((1, 256), jnp.bfloat16), weights=(weight,)))


# Small enough for the interpreter: depth, widths, rows, and what is fused.
SMALL: dict[str, tuple[int, tuple[int, ...], int, str]] = {
    "one row": (512, (64,), 1, ""),
    "sixteen rows, several tiles": (512, (192,), 16, ""),
    "40 rows, padded to 64": (256, (64,), 40, ""),
    "64 rows, more steps than stages": (2048, (64,), 64, ""),
    "steps of 64 in three warpgroups": (576, (128,), 4, ""),
    "a depth that is split": (4096, (64,), 4, "residual"),
    "residual, sixteen rows": (512, (128,), 16, "residual"),
    "bias": (512, (128,), 16, "bias"),
    "bias, four rows that the kernel may quantise": (1024, (64,), 4, "bias"),
    "bias, 72 rows": (1024, (64,), 72, "bias"),
    "swiglu": (512, (128, 128), 3, "swiglu"),
    "swiglu, 32 rows": (512, (64, 64), 32, "swiglu"),
    "float32": (512, (128,), 3, "float32"),
    "72 rows, by the kernel of many rows or by XLA": (1024, (64,), 72, "residual"),
    "three weights": (576, (320, 64, 64), 4, ""),
    "three weights, bias": (576, (320, 64, 64), 3, "bias"),
    "three weights, residual": (576, (128, 64, 64), 2, "residual"),
    "three weights, 72 rows": (1024, (192, 64, 64), 72, "bias"),
    "two weights, whose rows the kernel could quantise alone": (1024, (64, 64), 4, "float32"),
}


@needs_mosaic
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SMALL)
def test_the_kernel_equals_float64(name: str, form: str) -> None:
    depth, widths, rows, fused = SMALL[name]
    residual = None
    if fused == "residual":
        residual = jax.random.normal(jax.random.key(0), (rows, sum(widths)), jnp.bfloat16)
    inputs = Inputs(
        x=rows_of(len(name), rows, depth, jnp.bfloat16),
        weights=tuple(fp8_weight(i, width, depth, form) for i, width in enumerate(widths)),
        bias=jax.random.normal(jax.random.key(2), (sum(widths),)) if fused == "bias" else None,
        residual=residual,
        swiglu=fused == "swiglu",
        out_dtype=jnp.dtype("float32" if fused == "float32" else "bfloat16"),
    )
    with interpreted():
        assert_close(inputs, fp8_matmul(inputs, implementation="mosaic_gpu"))


@needs_mosaic
@pytest.mark.parametrize(
    ("form", "widths"), [("channel", (64,)), ("block", (64,)), ("block", (192, 64, 64))]
)
def test_a_row_has_the_bits_of_any_other_batch(form: str, widths: tuple[int, ...]) -> None:
    weights = tuple(fp8_weight(i, width, 1024, form) for i, width in enumerate(widths))
    x = rows_of(1, 64, 1024, jnp.bfloat16)
    with interpreted():
        made = [
            fp8_matmul(Inputs(x=x[:rows], weights=weights), implementation="mosaic_gpu")
            for rows in (1, 3, 16, 64)
        ]
        for few in made[:-1]:
            np.testing.assert_array_equal(few, made[-1][: len(few)])


@needs_mosaic
@pytest.mark.parametrize("activation", ["token", "block"])
def test_a_norm_and_its_codes_are_those_of_the_two_one_by_one(activation: Any) -> None:
    """The interpreter's XLA keeps more bits of the norm, so a code may be the next one."""
    form = "channel" if activation == "token" else "block"
    x, weight = rows_of(0, 3, 1024, jnp.bfloat16)[:2], fp8_weight(0, 64, 1024, form)
    gain = jax.random.normal(jax.random.key(0), (1024,), jnp.bfloat16)
    expected = quantise(rms_norm(x, gain, eps=1e-5), activation)
    inputs = Inputs(x=x, weights=(weight,))
    assert takes_norm(x, "mosaic_gpu") and not takes_norm(x, "reference")
    with interpreted():
        from pallas_kernels.fp8_matmul import mosaic_gpu

        rows = mosaic_gpu.quantised(inputs, RowNorm(gain, 1e-5))
    got, exact = (
        np.asarray(r.codes).astype(np.float64) * np.asarray(r.spread()) for r in (rows, expected)
    )
    assert (np.abs(got - exact) <= np.abs(exact) / 8 + 1e-9).all()
    same = np.asarray(rows.codes.view(jnp.uint8)) == np.asarray(expected.codes.view(jnp.uint8))
    assert same.mean() > 0.9


def bits(x: Any) -> np.ndarray:
    """The result as integers, so that NaN equals itself."""
    return np.asarray(x).view(np.uint16 if x.dtype == jnp.bfloat16 else np.uint32)


def separate(inputs: Inputs[Fp8Weight], norm: RowNorm | None = None) -> jax.Array:
    """The product after the kernel that quantises its rows."""
    from pallas_kernels.fp8_matmul import mosaic_gpu

    return mosaic_gpu.multiply_quantised(mosaic_gpu.quantised(inputs, norm), inputs)[0]


def residual_of(rows: int, width: int) -> jax.Array:
    return jax.random.normal(jax.random.key(rows), (rows, width), jnp.bfloat16)


# Depth, width, and whether the kernel before has measured the rows.
OWN = {
    "one step a warpgroup": (1024, 64, False),
    "two CTAs a tile": (4096, 64, False),
    "two CTAs, an odd number of steps": (5120, 128, False),
    "several tiles a CTA": (1024, 133 * 64, False),
    "measured": (4096, 64, True),
}


@needs_mosaic
@pytest.mark.parametrize("form", ["channel", "static"])
@pytest.mark.parametrize("rows", [1, 4, 6])
@pytest.mark.parametrize("name", OWN)
def test_a_product_that_quantises_its_rows_has_the_bits_of_two_kernels(
    name: str, rows: int, form: str, kernels: list[str]
) -> None:
    depth, width, is_measured = OWN[name]
    if is_measured and form == "static":
        pytest.skip("a scale that is known needs no measure")
    if width > 128 and (rows != 4 or form == "static"):
        pytest.skip("slow")
    x = rows_of(rows, rows, depth, jnp.bfloat16)
    inputs = Inputs(
        x=x, weights=(fp8_weight(0, width, depth, form),), residual=residual_of(rows, width)
    )
    largest = None
    if is_measured:
        pieces = jnp.max(jnp.abs(x.astype(jnp.float32)).reshape(rows, -1, 16), axis=2)
        largest = jnp.pad(pieces.T, ((0, 0), (0, 8 - rows)), constant_values=jnp.nan)
    with interpreted():
        expected = separate(inputs)
        assert any(kernel.startswith("quantise") for kernel in kernels)
        kernels.clear()
        got = fp8_matmul(inputs, largest=largest, implementation="mosaic_gpu")
    assert kernels == [f"fp8_matmul_{depth}x{width}_quantised_residual"]
    np.testing.assert_array_equal(bits(got), bits(expected))
    assert_close(inputs, got)


# Depth, widths: two widths are gate and up, which one warpgroup multiplies.
NORMED = {
    "one step a warpgroup": (1024, (64,)),
    "parts of a vector of four": (5120, (64,)),
    "several tiles a CTA": (1024, (133 * 64,)),
    "two CTAs a tile": (4096, (64,)),
    "gate and up": (1024, (64, 64)),
}


def gain_of(depth: int) -> jax.Array:
    return jax.random.normal(jax.random.key(depth), (depth,), jnp.bfloat16)


@needs_mosaic
@pytest.mark.parametrize("form", ["channel", "static"])
@pytest.mark.parametrize("name", NORMED)
def test_a_product_that_norms_its_row_has_the_bits_of_two_kernels(
    name: str, form: str, kernels: list[str]
) -> None:
    depth, widths = NORMED[name]
    x, norm = rows_of(0, 1, depth, jnp.bfloat16), RowNorm(gain_of(depth), 1e-5)
    weights = tuple(fp8_weight(seed, width, depth, form) for seed, width in enumerate(widths))
    inputs = Inputs(x=x, weights=weights, swiglu=len(widths) == 2)
    with interpreted():
        expected = separate(inputs, norm)
        assert kernels[0] == f"quantise_{depth}_normed"
        kernels.clear()
        got = fp8_matmul(inputs, norm=norm, implementation="mosaic_gpu")
    fused = "_swiglu" if inputs.swiglu else ""
    assert kernels == [f"fp8_matmul_{depth}x{widths[0]}_normed_quantised{fused}"]
    np.testing.assert_array_equal(bits(got), bits(expected))
    # The interpreter's XLA keeps more bits of the norm, so a code may be the next one.
    exact = ground_truth(dataclasses.replace(inputs, x=rms_norm(x, norm.gain, eps=norm.eps)))
    error = np.linalg.norm(np.asarray(got).astype(np.float64) - exact, axis=1)
    assert (error <= 0.1 * np.linalg.norm(exact, axis=1)).all()


@needs_mosaic
def test_the_norm_of_a_row_has_the_same_bits_alone_and_in_many(kernels: list[str]) -> None:
    norm = RowNorm(gain_of(2048), 1e-5)
    x = rows_of(0, 16, 2048, jnp.bfloat16)
    many = Inputs(x=x, weights=(fp8_weight(0, 64, 2048, "channel"),))
    with interpreted():
        expected = fp8_matmul(many, norm=norm, implementation="mosaic_gpu")
        assert kernels == ["quantise_2048_normed", "fp8_matmul_2048x64"]
        for row in (0, 7):
            alone = fp8_matmul(many.take_rows(row, row + 1), norm=norm, implementation="mosaic_gpu")
            np.testing.assert_array_equal(bits(alone), bits(expected[row : row + 1]))
        assert kernels[2:] == ["fp8_matmul_2048x64_normed_quantised"]


@needs_mosaic
def test_gate_and_up_under_a_norm_measure_their_result(kernels: list[str]) -> None:
    norm = RowNorm(gain_of(1024), 1e-5)
    weights = fp8_weight(0, 1024, 1024, "channel"), fp8_weight(1, 1024, 1024, "channel")
    inputs = Inputs(x=rows_of(0, 1, 1024, jnp.bfloat16), weights=weights, swiglu=True)
    with interpreted():
        inner, largest = measured_swiglu(inputs, norm=norm, implementation="mosaic_gpu")
        assert len(kernels) == 1
        np.testing.assert_array_equal(bits(inner), bits(separate(inputs, norm)))
    expected = jnp.abs(inner.astype(jnp.float32)).reshape(1, -1, 16).max(axis=2)
    np.testing.assert_array_equal(largest[:, :1].T, expected)


@needs_mosaic
def test_a_norm_that_no_kernel_makes_or_that_does_not_fit_is_refused() -> None:
    x = jnp.ones((2, 2560), jnp.bfloat16)
    inputs = Inputs(x=x, weights=(fp8_weight(0, 64, 2560, "channel"),))
    assert not takes_norm(x, "mosaic_gpu")
    with interpreted(), pytest.raises(ValueError, match="multiple of 1024 values, got 2560"):
        fp8_matmul(inputs, norm=RowNorm(gain_of(2560), 1e-5), implementation="mosaic_gpu")
    for implementation in ("reference", "mosaic_gpu"):
        with interpreted(), pytest.raises(ValueError, match=r"gain: expected \(2560,\), got"):
            norm = RowNorm(gain_of(1024), 1e-5)
            fp8_matmul(inputs, norm=norm, implementation=implementation)


@needs_mosaic
def test_a_row_of_nan_infinity_or_zeros_under_a_norm(kernels: list[str]) -> None:
    x = np.asarray(rows_of(0, 3, 1024, jnp.float32)).copy()
    x[0, 700], x[1, 900], x[2] = np.nan, np.inf, 0.0
    norm = RowNorm(gain_of(1024), 1e-5)
    weights = (fp8_weight(0, 64, 1024, "channel"),)
    inputs = Inputs(x=jnp.asarray(x, jnp.bfloat16), weights=weights)
    with interpreted():
        expected = separate(inputs, norm)
        kernels.clear()
        alone = [
            fp8_matmul(inputs.take_rows(i, i + 1), norm=norm, implementation="mosaic_gpu")
            for i in range(3)
        ]
    assert kernels == ["fp8_matmul_1024x64_normed_quantised"]
    np.testing.assert_array_equal(bits(jnp.concatenate(alone)), bits(expected))
    values = np.asarray(expected, np.float32)
    assert np.isnan(values[:2]).all() and (values[2] == 0).all()


@pytest.mark.parametrize("form", ["channel", "block", "static"])
def test_the_reference_norms_rows(form: str) -> None:
    x, norm = rows_of(2, 5, 256, "bfloat16"), RowNorm(gain_of(256), 1e-5)
    inputs = Inputs(x=x, weights=(fp8_weight(0, 128, 256, form),))
    got = fp8_matmul(inputs, norm=norm)
    alone = fp8_matmul(dataclasses.replace(inputs, x=rms_norm(x, norm.gain, eps=norm.eps)))
    np.testing.assert_array_equal(bits(got), bits(alone))


@needs_mosaic
@pytest.mark.parametrize("rows", [9, 16, 40, 64])
def test_more_rows_are_quantised_by_a_kernel_of_their_own(rows: int, kernels: list[str]) -> None:
    weight = fp8_weight(0, 64, 1024, "channel")
    inputs = Inputs(x=rows_of(0, 64, 1024, jnp.bfloat16), weights=(weight,))
    padded = -(-rows // 8) * 8
    with interpreted():
        many = fp8_matmul(inputs.take_rows(0, padded), implementation="mosaic_gpu")
        assert kernels[0].startswith("quantise") and len(kernels) == 2
        few = fp8_matmul(inputs.take_rows(0, 8), implementation="mosaic_gpu")
        assert kernels[2:] == ["fp8_matmul_1024x64_quantised"]
        for row in (0, 3):
            alone = fp8_matmul(inputs.take_rows(row, row + 1), implementation="mosaic_gpu")
            np.testing.assert_array_equal(bits(alone), bits(many[row : row + 1]))
    np.testing.assert_array_equal(bits(few), bits(many[:8]))


@needs_mosaic
@pytest.mark.parametrize("measured", [False, True])
def test_rows_that_a_product_quantises_saturate_and_keep_nan_to_themselves(measured: bool) -> None:
    """A row of NaN, one with infinity, the largest bfloat16, the smallest, and zeros."""
    depth = 1024
    x = np.asarray(rows_of(0, 8, depth, jnp.float32)).copy()
    x[1, 700], x[2, 900] = np.nan, np.inf
    x[3], x[4] = 3.3895314e38, 9.2e-41
    x[5, ::2] = -0.0
    x[6] = 0.0
    rows = jnp.asarray(x, jnp.bfloat16)
    inputs = Inputs(x=rows, weights=(fp8_weight(0, 64, depth, "channel"),))
    largest = None
    if measured:
        largest = jnp.max(jnp.abs(rows.astype(jnp.float32)).reshape(8, -1, 16), axis=2).T
    static = dataclasses.replace(inputs, weights=(fp8_weight(0, 64, depth, "static"),))
    with interpreted():
        got = fp8_matmul(inputs, largest=largest, implementation="mosaic_gpu")
        np.testing.assert_array_equal(bits(got), bits(separate(inputs)))
        is_nan = np.isnan(np.asarray(got, np.float32))
        assert is_nan[1].all() and not is_nan[[0, 3, 4, 5, 6, 7]].any()
        got = fp8_matmul(static, implementation="mosaic_gpu")
        np.testing.assert_array_equal(bits(got), bits(separate(static)))
        assert np.isfinite(np.asarray(got, np.float32)[[2, 3]]).all()  # at 448


@needs_mosaic
@pytest.mark.parametrize("measured", [False, True])
def test_a_scale_is_found_wherever_in_the_row_its_value_lies(measured: bool) -> None:
    """A warp reduces an eighth of each row, or a quarter of one that is measured."""
    depth = 1024
    x = jax.random.normal(jax.random.key(0), (8, depth), jnp.float32)
    x = x.at[jnp.arange(8), 100 + 128 * jnp.arange(8)].set(-50.0 - jnp.arange(8.0))
    rows = x.astype(jnp.bfloat16)
    inputs = Inputs(x=rows, weights=(fp8_weight(0, 64, depth, "channel"),))
    largest = None
    if measured:
        largest = jnp.max(jnp.abs(rows.astype(jnp.float32)).reshape(8, -1, 16), axis=2).T
    with interpreted():
        got = fp8_matmul(inputs, largest=largest, implementation="mosaic_gpu")
        np.testing.assert_array_equal(bits(got), bits(separate(inputs)))


@needs_mosaic
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("width", [1024, 2048])
def test_gate_and_up_measure_the_rows_that_down_quantises(
    rows: int, width: int, kernels: list[str]
) -> None:
    weights = fp8_weight(0, width, 256, "channel"), fp8_weight(1, width, 256, "channel")
    gate_up = Inputs(x=rows_of(0, rows, 256, jnp.bfloat16), weights=weights, swiglu=True)
    weight = fp8_weight(2, 64, width, "channel")
    assert takes_largest(rows, weight, "mosaic_gpu")
    with interpreted():
        alone = fp8_matmul(gate_up, implementation="mosaic_gpu")
        inner, largest = measured_swiglu(gate_up, implementation="mosaic_gpu")
        np.testing.assert_array_equal(bits(inner), bits(alone))
        expected = jnp.abs(inner.astype(jnp.float32)).reshape(rows, -1, 16).max(axis=2)
        np.testing.assert_array_equal(largest[:, :rows].T, expected)
        down = Inputs(x=inner, weights=(weight,), residual=residual_of(rows, 64))
        kernels.clear()
        got = fp8_matmul(down, largest=largest, implementation="mosaic_gpu")
        assert len(kernels) == 1
        np.testing.assert_array_equal(bits(got), bits(separate(down)))


def test_largest_magnitudes_are_refused_by_the_reference_and_with_a_norm() -> None:
    inputs = Inputs(
        x=rows_of(0, 1, 1024, jnp.bfloat16), weights=(fp8_weight(0, 64, 1024, "channel"),)
    )
    largest, norm = jnp.ones((16, 8), jnp.float32), RowNorm(gain_of(1024), 1e-5)
    for given, implementation in ((None, "reference"), (norm, "reference"), (norm, "mosaic_gpu")):
        with pytest.raises(
            ValueError, match="^largest: expected None with a norm or the reference"
        ):
            fp8_matmul(inputs, norm=given, largest=largest, implementation=implementation)


@pytest.mark.parametrize(
    ("rows", "depth", "width", "form", "expected"),
    [
        (1, 14336, 4096, "channel", True),
        (8, 14336, 4096, "channel", True),
        (9, 14336, 4096, "channel", False),  # too many reads of the L2 cache
        (4, 14336, 4096, "block", False),
        (4, 14336, 4096, "static", False),  # its scale is known
        (4, 18944, 3584, "channel", False),  # no steps of 256
        (4, 28672, 8192, "channel", False),  # rows do not fit
    ],
)
@needs_mosaic
def test_products_that_take_what_gate_and_up_measure(
    rows: int, depth: int, width: int, form: str, expected: bool
) -> None:
    weight = jax.eval_shape(lambda: fp8_weight(0, 64, 256, form))
    scales = {"channel": (width,), "block": (width // 128, depth // 128), "static": ()}[form]
    weight = dataclasses.replace(
        weight,
        codes=jax.ShapeDtypeStruct((width, depth), jnp.float8_e4m3fn),
        scales=jax.ShapeDtypeStruct(scales, jnp.float32),
    )
    assert takes_largest(rows, weight, "mosaic_gpu") == expected
    assert not takes_largest(rows, weight, "reference")


# ---- on the device

REAL = {
    "qkv": (4096, (6144,)),
    "o": (4096, (4096,)),
    "gate, up": (4096, (14336, 14336)),
    "down": (14336, (4096,)),
    "SmolLM2's q, k and v": (576, (576, 192, 192)),
    "SmolLM2's down": (1536, (576,)),
}


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("name", REAL)
def test_equals_float64_on_the_gpu(name: str, rows: int, form: str) -> None:
    """Rows without a value far above the others: tensor cores keep about 14 bits of a sum."""
    depth, widths = REAL[name]
    x = jax.random.normal(jax.random.key(rows), (rows, depth), jnp.bfloat16)
    weights = tuple(fp8_weight(i, width, depth, form) for i, width in enumerate(widths))
    inputs = Inputs(x=x, weights=weights, swiglu=name == "gate, up")
    got = fp8_matmul(inputs, implementation="mosaic_gpu")
    assert_close(inputs, got)
    for row in {0, rows - 1}:
        alone = fp8_matmul(inputs.take_rows(row, row + 1), implementation="mosaic_gpu")
        np.testing.assert_array_equal(bits(alone), bits(got[row : row + 1]))


@pytest.mark.gpu
def test_a_norm_has_the_bits_of_two_kernels_where_the_depth_is_no_power_of_two() -> None:
    """Codes seldom tell whether a factor's last bit differs: 3,200 rows."""
    depth, norm = 5120, RowNorm(gain_of(5120), 1e-5)
    weights = (fp8_weight(0, 64, depth, "channel"),)
    for seed in range(800):
        x = jax.random.normal(jax.random.key(seed), (4, depth), jnp.bfloat16)
        inputs = Inputs(x=x, weights=weights, out_dtype=jnp.float32)
        alone = [
            fp8_matmul(inputs.take_rows(i, i + 1), norm=norm, implementation="mosaic_gpu")
            for i in range(4)
        ]
        np.testing.assert_array_equal(bits(jnp.concatenate(alone)), bits(separate(inputs, norm)))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["channel", "static"])
@pytest.mark.parametrize("name", ["qkv", "gate, up"])
def test_a_norm_in_the_product_has_the_bits_of_two_kernels_on_the_gpu(name: str, form: str) -> None:
    depth, widths = REAL[name]
    norm = RowNorm(gain_of(depth), 1e-5)
    weights = tuple(fp8_weight(i, width, depth, form) for i, width in enumerate(widths))
    x = rows_of(0, 1, depth, jnp.bfloat16)
    inputs = Inputs(x=x, weights=weights, swiglu=name == "gate, up")
    expected = separate(inputs, norm)
    got = fp8_matmul(inputs, norm=norm, implementation="mosaic_gpu")
    for _ in range(20):
        np.testing.assert_array_equal(bits(got), bits(expected))
        got = fp8_matmul(inputs, norm=norm, implementation="mosaic_gpu")
    if name == "gate, up" and form == "channel":
        inner, largest = measured_swiglu(inputs, norm=norm, implementation="mosaic_gpu")
        np.testing.assert_array_equal(bits(inner), bits(expected))
        magnitudes = jnp.abs(inner.astype(jnp.float32)).reshape(1, -1, 16).max(axis=2)
        np.testing.assert_array_equal(largest[:, :1].T, magnitudes)
    else:
        normed = rms_norm(x, norm.gain, eps=norm.eps)
        exact = ground_truth(dataclasses.replace(inputs, x=normed))
        error = np.linalg.norm(np.asarray(got).astype(np.float64) - exact, axis=1)
        assert (error <= 0.1 * np.linalg.norm(exact, axis=1)).all()
