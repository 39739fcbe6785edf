"""Products of many rows with fp8 weights in blocks: they equal float64 of codes and scales, and a
row's bits depend on nothing beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8_matmul import Fp8Weight, Inputs, Product, fp8_matmul, quantise, unsupported
from pallas_kernels.fp8_matmul.shapes import SHAPES, make_inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_fp8_matmul import assert_close, fp8_weight, rows_of
from tests.kernels.test_matmul import assert_bits_are_the_rows_own, take
from tests.kernels.test_matmul_any_rows import (
    CALLS,
    assert_same_in_calls,
    assert_same_with_tunings,
)

pytestmark = needs_mosaic

REAL = tuple(
    f"{name} block rows 1"
    for name in (
        "llama-3-8b qkv",
        "llama-3-8b o",
        "llama-3-8b gate_up",
        "llama-3-8b down",
        "smollm2 q, k, v",
        "smollm2 gate_up",
        "smollm2 down",
    )
)


def product(rows: int, depth: int, widths: tuple[int, ...], *fused: str) -> Inputs[Fp8Weight]:
    """Rows of very different sizes, and scales of each block. fused: names of Inputs' fields"""
    width = widths[0] if "swiglu" in fused else sum(widths)
    rng = np.random.default_rng(rows)
    return Inputs(
        x=rows_of(rows, rows, depth, jnp.bfloat16),
        weights=tuple(fp8_weight(i, w, depth, "block") for i, w in enumerate(widths)),
        bias=jnp.asarray(rng.normal(size=width), jnp.bfloat16) if "bias" in fused else None,
        residual=(
            jnp.asarray(rng.normal(size=(rows, width)), jnp.bfloat16)
            if "residual" in fused
            else None
        ),
        swiglu="swiglu" in fused,
    )


def run(inputs: Inputs[Fp8Weight]) -> np.ndarray:
    with interpreted():
        made = fp8_matmul(inputs, implementation="mosaic_gpu")
    return np.asarray(made).astype(np.float32)


def kernel(inputs: Inputs[Fp8Weight], *tuning: int, races: bool = False) -> np.ndarray:
    """The kernel with a tuning of its own: rows and columns of a tile, and CTAs."""
    from pallas_kernels.fp8_matmul.mosaic_gpu import block_scales, quantised
    from pallas_kernels.matmul.mosaic_gpu.any_rows import Tuning

    with interpreted():
        rows = quantised(inputs)
    with interpreted(races=races):
        out = block_scales.multiply(rows, inputs, tuning=Tuning(*tuning))
    return np.asarray(out).astype(np.float32)


@pytest.mark.parametrize(
    ("rows", "depth", "widths", "fused"),
    [
        (72, 256, (128,), ()),
        (144, 576, (192, 64, 64), ("bias",)),  # half a block of depths, and of columns
        (200, 384, (320,), ("residual",)),
        (65, 512, (128, 128), ("swiglu",)),
        (300, 192, (64, 64), ("swiglu",)),
    ],
)
def test_equals_float64(
    rows: int, depth: int, widths: tuple[int, ...], fused: tuple[str, ...]
) -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu import block_scales

    inputs = product(rows, depth, widths, *fused)
    with mock.patch.object(block_scales, "multiply", wraps=block_scales.multiply) as multiply:
        assert_close(inputs, run(inputs))
    assert multiply.called


@pytest.mark.parametrize("swiglu", [False, True])
def test_bits_do_not_depend_on_tile_ring_or_ctas(swiglu: bool) -> None:
    widths, fused = ((256, 256), "swiglu") if swiglu else ((256,), "residual")
    assert_same_with_tunings(kernel, product(200, 384, widths, fused), 3 if swiglu else 6)


@pytest.mark.parametrize("depth", [640, 576])
def test_bits_depend_neither_on_the_number_of_rows_nor_on_their_places(depth: int) -> None:
    inputs = product(300, depth, (128,), "residual")
    assert_bits_are_the_rows_own(inputs, (65, 72, 144, 200), run)
    # Prefill in order multiplies by the same kernel.
    np.testing.assert_array_equal(run(replace(inputs, in_order=True)), run(inputs))


@pytest.mark.parametrize(
    ("shape", "tuning"),
    [
        ((144, 256, (256,), "residual"), (128, 128, 1)),
        ((144, 320, (256,), "bias"), (64, 128, 1)),
        ((200, 256, (128, 128), "swiglu"), (192, 64, 1)),
    ],
)
def test_no_copies_race(shape: tuple[Any, ...], tuning: tuple[int, ...]) -> None:
    """One CTA has all tiles, whose pieces go through the same slots."""
    inputs = product(*shape)
    assert_close(inputs, kernel(inputs, *tuning, races=True))


def test_a_block_of_zeros_or_of_large_values_keeps_its_own_scale() -> None:
    inputs = product(72, 384, (128,))
    x = np.array(inputs.x, np.float32)
    x[:, :128], x[:, 128:256] = 0.0, x[:, 128:256] * 1e30
    inputs = replace(inputs, x=jnp.asarray(x, jnp.bfloat16))
    assert_close(inputs, run(inputs))


def test_nan_stays_in_its_row_or_column() -> None:
    inputs = product(72, 256, (128,))
    codes = np.array(inputs.weights[0].codes).view(np.uint8)
    codes[5, 130] = 0x7F
    weight = replace(inputs.weights[0], codes=jnp.asarray(codes).view(jnp.float8_e4m3fn))
    x = jnp.asarray(inputs.x).at[70, 3].set(jnp.nan)
    lost = np.zeros((72, 128), bool)
    lost[:, 5] = lost[70] = True
    np.testing.assert_array_equal(np.isnan(run(replace(inputs, x=x, weights=(weight,)))), lost)


@pytest.mark.parametrize(("depth", "out_dtype"), [(128, "bfloat16"), (256, "float32")])
def test_what_the_kernel_does_not_take_is_multiplied_64_rows_at_a_time(
    depth: int, out_dtype: str
) -> None:
    from pallas_kernels.fp8_matmul import mosaic_gpu

    inputs = replace(product(72, depth, (128,)), out_dtype=jnp.dtype(out_dtype))
    with mock.patch.object(mosaic_gpu, "multiply", wraps=mosaic_gpu.multiply) as multiply:
        assert_close(inputs, run(inputs))
    assert [call.args[1].x.shape[0] for call in multiply.call_args_list] == [64, 8]


def test_prefill_in_order_has_no_other_product() -> None:
    """Then XLA multiplies, and the log gives the reason."""
    weight = jax.eval_shape(lambda: fp8_weight(0, 128, 128, "block"))
    product = Product(jax.ShapeDtypeStruct((72, 128), jnp.bfloat16), (weight,))
    assert unsupported(product) is None
    expected = "expected a depth that is a multiple of 64 from 192 on, got 128"
    assert unsupported(replace(product, in_order=True)) == expected


@pytest.mark.parametrize(
    ("reason", "depth", "widths", "change"),
    [
        ("expected scales of blocks, of rows and weights", 256, (128,), {"form": "channel"}),
        ("expected a result in bfloat16, got float32", 256, (128,), {"out_dtype": jnp.float32}),
        ("expected no norm with many rows, got one", 256, (128,), {"norms": True}),
        ("expected a depth that is a multiple of 64 from 192 on, got 128", 128, (128,), {}),
        ("expected a depth that is a multiple of 64 from 192 on, got 288", 288, (128,), {}),
        ("expected widths that are multiples of 64, got (96,)", 256, (96,), {}),
    ],
)
def test_what_the_kernel_cannot_multiply_it_says(
    reason: str, depth: int, widths: tuple[int, ...], change: dict[str, Any]
) -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu import block_scales

    options = {"form": "block"} | change
    form = options.pop("form")
    weights = tuple(
        jax.eval_shape(lambda width=width: fp8_weight(0, width, depth, form)) for width in widths
    )
    product = Product(jax.ShapeDtypeStruct((72, depth), jnp.bfloat16), weights, **options)
    assert block_scales.unsupported(product) == reason


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_bits_on_the_gpu_are_the_same_in_calls_of_all_sizes(name: str) -> None:
    """One program with the kernel that quantises the rows. 65 rows are no whole tiles of TMA."""
    inputs = make_inputs(replace(SHAPES[name], rows=CALLS[-1]), seed=5)
    multiply = partial(fp8_matmul, implementation="mosaic_gpu")
    assert_same_in_calls(multiply, inputs)
    expected = jax.jit(multiply)(inputs)
    np.testing.assert_array_equal(jax.jit(multiply)(take(inputs, slice(65))), expected[:65])


@pytest.mark.gpu
@pytest.mark.parametrize("depth", [192, 256, 320, 384])
@pytest.mark.parametrize("fused", ["bias", "residual", "swiglu"])
def test_few_steps_on_the_gpu(depth: int, fused: str) -> None:
    """LLVM unrolls such loops, and may then read a sum before it is made."""
    from pallas_kernels.fp8_matmul.mosaic_gpu import block_scales

    inputs = product(144, depth, (128,) * (1 + (fused == "swiglu")), fused)
    rows = quantise(inputs.x, "block")
    assert_close(inputs, block_scales.multiply(rows, inputs), rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [72, 144, 256, 2016])
@pytest.mark.parametrize("name", REAL)
def test_equals_float64_on_the_gpu_at_real_shapes(name: str, rows: int) -> None:
    inputs = make_inputs(replace(SHAPES[name], rows=rows), seed=rows)
    got = run(inputs)
    some = [0, 1, 63, 64, rows - 1]  # float64 of all rows would take minutes
    assert np.isfinite(got).all() and np.abs(got).max(axis=1).min() > 0
    assert_close(take(inputs, some), got[some])
