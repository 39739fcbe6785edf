"""Products of many rows in order, those of prefill: they equal float64, and a row's bits depend
neither on tile, ring or neighbours nor on the number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import Inputs, Product, unsupported
from pallas_kernels.matmul.shapes import SHAPES, Shape, make_inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_matmul import (
    assert_bits_are_the_rows_own,
    assert_close,
    ground_truth,
    implementations,
    near_ties,
    take,
)
from tests.kernels.test_matmul import run as run_as_given

# Small enough for the interpreter.
SMALL = {
    "one tile": Shape(128, 128, (64,)),
    "fewer rows than a tile": Shape(72, 128, (64,)),
    "rows beyond the last tile, an odd number of steps": Shape(144, 192, (128,)),
    "residual": Shape(200, 128, (192,), residual=True),
    "residual, more pieces than slots": Shape(128, 128, (256,), residual=True),
    "bias": Shape(144, 128, (192,), bias=True),
    "bias and residual": Shape(72, 192, (64,), bias=True, residual=True),
    "several weights": Shape(144, 128, (192, 64, 64)),
    "bias, residual and several weights": Shape(72, 128, (128, 64), bias=True, residual=True),
    "swiglu": Shape(144, 192, (128, 128), swiglu=True),
    "swiglu and residual": Shape(72, 128, (64, 64), swiglu=True, residual=True),
    "logits": Shape(72, 128, (64,), out_dtype="float32"),
    "logits of a tied head": Shape(136, 192, (64,), transposed=True, out_dtype="float32"),
}
# Calls of prefill: 48 rows a tile, and these many tiles.
CALLS = tuple(48 * tiles for tiles in (3, 4, 6, 8, 12, 16, 24, 32, 42))
REAL = tuple(
    f"{model} {product}"
    for model in ("llama-3-8b", "smollm2")
    for product in ("qkv", "o", "gate_up", "down")
)


def run(inputs: Inputs, implementation: str = "mosaic_gpu") -> np.ndarray:
    """The public op's result in order, widened without loss."""
    return run_as_given(replace(inputs, in_order=True), implementation)


def assert_same_in_calls(multiply: Callable[[Inputs], jax.Array], inputs: Inputs) -> None:
    """Multiply the first rows in calls of all sizes, as one program each."""
    program = jax.jit(multiply)
    expected = np.asarray(program(inputs))
    for rows in CALLS:
        got = program(take(inputs, slice(rows)))
        np.testing.assert_array_equal(np.asarray(got), expected[:rows], err_msg=f"{rows} rows")


def kernel(inputs: Inputs, *tuning: int, races: bool = False) -> np.ndarray:
    """The kernel with a tuning of its own: rows and columns of a tile, and CTAs."""
    from pallas_kernels.matmul.mosaic_gpu import any_rows

    with interpreted(races=races):
        out = any_rows.matmul(inputs, tuning=any_rows.Tuning(*tuning) if tuning else None)
    return np.asarray(out).astype(np.float32)


def assert_same_with_tunings(
    multiply: Callable[..., np.ndarray], inputs: Inputs, number: int
) -> None:
    """Multiply with this number of tilings, by two CTAs, which have several tiles.

    multiply: takes rows and columns of a tile, and CTAs
    """
    from pallas_kernels.matmul.mosaic_gpu import any_rows

    expected = multiply(inputs, 128, 64)
    assert np.abs(expected).max() > 0
    tunings = any_rows.tunings(Product.of(inputs))
    assert len(tunings) == number
    for tuning in tunings:
        got = multiply(inputs, tuning.rows, tuning.tile, 2)
        np.testing.assert_array_equal(got, expected, err_msg=str(tuning))


def ties(shape: Shape, seed: int) -> Inputs:
    """Sums that cancel, with a term in each step, in the kernel's dtype."""
    return replace(near_ties(shape, seed=seed, step=64), out_dtype=jnp.dtype("bfloat16"))


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs, implementation), ground_truth(inputs))


@needs_mosaic
@pytest.mark.parametrize(("rows", "swiglu"), [(72, False), (200, True)])
def test_bits_do_not_depend_on_tile_ring_or_ctas(rows: int, swiglu: bool) -> None:
    widths = (256, 256) if swiglu else (768,)
    inputs = ties(Shape(rows, 384, widths, swiglu=swiglu, residual=not swiglu), seed=rows)
    assert_same_with_tunings(kernel, inputs, 4 if swiglu else 8)


@needs_mosaic
def test_bits_depend_neither_on_the_number_of_rows_nor_on_their_places() -> None:
    inputs = ties(Shape(384, 640, (192,), residual=True), seed=1)
    assert_bits_are_the_rows_own(replace(inputs, in_order=True), (72, 144, 192, 288))


@needs_mosaic
def test_the_depth_is_summed_in_order() -> None:
    """A step has one term, so that the order of steps is the order of all terms."""
    inputs = ties(Shape(128, 1280, (64,)), seed=2)
    x, weight = (np.asarray(a).astype(np.float32) for a in (inputs.x, inputs.weights[0]))
    total = np.zeros((128, 64), np.float32)
    for k in range(0, 1280, 64):
        total += x[:, k, None] * weight[None, k]
    np.testing.assert_array_equal(run(inputs), rounded(total))
    backwards, halves = np.zeros_like(total), np.zeros((2, 128, 64), np.float32)
    for k in range(1280 - 64, -1, -64):
        backwards += x[:, k, None] * weight[None, k]
    for k in range(0, 1280, 64):
        halves[k // 640] += x[:, k, None] * weight[None, k]
    for other in (backwards, halves[0] + halves[1]):
        assert (rounded(other) != rounded(total)).any(), "the sums tell no order"


def rounded(sums: np.ndarray) -> np.ndarray:
    return np.asarray(jnp.asarray(sums, jnp.bfloat16)).astype(np.float32)


@needs_mosaic
@pytest.mark.parametrize("transposed", [False, True])
def test_logits_of_many_rows_have_the_bits_of_few(transposed: bool) -> None:
    """A call of prefill has a row of logits for each tile, up to 86 by default on two devices."""
    shape = Shape(88, 768, (128,), transposed=transposed, out_dtype="float32")
    inputs = near_ties(shape, seed=4, step=128)
    expected = run(inputs)
    for rows in (3, 40, 64):
        np.testing.assert_array_equal(run(take(inputs, slice(rows))), expected[:rows])


@needs_mosaic
@pytest.mark.parametrize(
    ("shape", "tuning"),
    [
        (Shape(144, 256, (256,), residual=True), (128, 256, 1)),
        (Shape(144, 640, (256,), bias=True), (64, 128, 1)),
        (Shape(144, 256, (256,)), (128, 256, 1)),
        (Shape(200, 128, (128, 128), swiglu=True), (192, 64, 1)),
    ],
)
def test_no_copies_race(shape: Shape, tuning: tuple[int, ...]) -> None:
    """One CTA has all tiles, whose pieces go through the same slots."""
    inputs = make_inputs(shape, seed=3)
    assert_close(shape, kernel(inputs, *tuning, races=True), ground_truth(inputs))


@needs_mosaic
def test_gates_far_from_zero() -> None:
    """silu of -120 is 0 though exp(120) is infinite in float32, of 120 it is 120."""
    gates = np.repeat([-120.0, -30.0, 0.0, 30.0, 120.0], [24, 24, 32, 24, 24])
    x, weight = np.zeros((128, 128), np.float32), np.zeros((128, 64), np.float32)
    x[:, 0], weight[0] = gates, 1.0
    weights = (jnp.asarray(weight, jnp.bfloat16),) * 2
    inputs = Inputs(x=jnp.asarray(x, jnp.bfloat16), weights=weights, swiglu=True)
    expected = np.repeat((gates / (1 + np.exp(-gates)) * gates)[:, None], 64, axis=1)
    np.testing.assert_allclose(run(inputs), expected, rtol=2 * 2.0**-8, atol=1e-40)


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "rows", "tile"),
    [  # the fastest of those measured (docs/notes/prefill-products.md), or within 3 % of it
        ("o", 144, (64, 128)),
        ("o", 384, (128, 128)),
        ("o", 768, (192, 128)),
        ("down", 144, (64, 128)),
        ("down", 1536, (192, 128)),
        ("down", 2016, (128, 256)),
        ("qkv", 576, (128, 256)),
        ("qkv", 1536, (128, 192)),
        ("gate_up", 768, (192, 64)),
        ("gate_up", 2016, (128, 128)),
    ],
)
def test_llamas_tiles(name: str, rows: int, tile: tuple[int, int]) -> None:
    from pallas_kernels.matmul.mosaic_gpu import any_rows

    tuning = any_rows.choose_tuning(_product(name, rows))
    assert (tuning.rows, tuning.tile) == tile
    assert tuning.stages(2 if name == "gate_up" else 1) >= 4


def _product(name: str, rows: int) -> Product:
    shape = replace(SHAPES[f"llama-3-8b {name} rows 1"], rows=rows)
    struct = jax.ShapeDtypeStruct
    weights = tuple(struct((shape.depth, width), jnp.bfloat16) for width in shape.widths)
    return Product(
        struct((rows, shape.depth), jnp.bfloat16),
        weights if shape.swiglu else (struct((shape.depth, shape.width), jnp.bfloat16),),
        swiglu=shape.swiglu,
        residual=shape.residual,
        in_order=True,
    )


OPERANDS = "expected bfloat16 operands and result, got"
ALONE = "expected no norm with many rows, got one"
DEPTH = "expected a depth that is a multiple of 64 from 128 on, got"
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "float32 rows": (f"{OPERANDS} bfloat16 and float32", {"dtype": jnp.float32}),
    "rows with their squares": (ALONE, {"normed": True}),
    "a gain": (ALONE, {"norms": True}),
    "logits of rows that are no whole eights": (
        "expected 1 to 8 rows, or a multiple of 8 up to 64, got 10",
        {"rows": 74, "out_dtype": jnp.float32},
    ),
    "one step": ("expected a depth that is a multiple of 64 from 128 on, got 64", {"depth": 64}),
    "half a step": (
        "expected a depth that is a multiple of 64 from 128 on, got 160",
        {"depth": 160},
    ),
    "a width between two tiles": (
        "expected widths that are multiples of 64, got (96,)",
        {"width": 96},
    ),
    "few rows": ("expected 1 to 8 rows, or a multiple of 8 up to 64, got 9", {"rows": 9}),
}


@needs_mosaic
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernel_cannot_multiply_it_says(name: str) -> None:
    reason, change = UNSUPPORTED[name]
    options = {"rows": 144, "depth": 128, "width": 128, "dtype": jnp.bfloat16} | change
    rows, depth, width, dtype = (options.pop(key) for key in ("rows", "depth", "width", "dtype"))
    weight = (width, depth) if options.get("transposed") else (depth, width)
    weights = (jax.ShapeDtypeStruct(weight, jnp.bfloat16),)
    product = Product(jax.ShapeDtypeStruct((rows, depth), dtype), weights, in_order=True, **options)
    assert unsupported(product) == reason


@needs_mosaic
def test_any_number_of_rows_above_64_is_taken() -> None:
    for rows in (65, 72, 127, 144, 2016, 4128, 10**8):
        assert unsupported(_product("gate_up", rows)) is None
        assert unsupported(_product("o", rows)) is None


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_bits_on_the_gpu_are_the_same_in_calls_of_all_sizes(name: str) -> None:
    shape = SHAPES[f"{name} rows 1"]
    widths = shape.widths if shape.swiglu else (shape.width,)
    inputs = near_ties(replace(shape, rows=CALLS[-1], widths=widths), seed=5)
    inputs = replace(inputs, out_dtype=jnp.dtype("bfloat16"), in_order=True)
    assert_bits_are_the_rows_own(inputs, (72, 96, *CALLS))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [72, 144, 384, 2016])
@pytest.mark.parametrize("name", REAL)
def test_equals_float64_on_the_gpu_at_real_shapes(name: str, rows: int) -> None:
    shape = replace(SHAPES[f"{name} rows 1"], rows=rows)
    inputs = make_inputs(shape, seed=rows)
    got = run(inputs)
    some = [0, 1, 63, 64, rows - 1]  # float64 of all rows would take minutes
    assert np.isfinite(got).all() and np.abs(got).max(axis=1).min() > 0
    assert_close(replace(shape, rows=len(some)), got[some], ground_truth(take(inputs, some)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64_on_the_gpu(name: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs), ground_truth(inputs))
