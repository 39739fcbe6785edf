"""Products of many rows with int4 weights: they equal products with Int4Weight.to_array, and the
depth is summed in order unless it has parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int4_matmul import Inputs, Int4Weight, Product, int4_matmul, unsupported
from pallas_kernels.int4_matmul.shapes import SHAPES, make_inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_int4_matmul import assert_close, int4_weight
from tests.kernels.test_matmul import assert_bits_are_the_rows_own, take
from tests.kernels.test_matmul_any_rows import CALLS, assert_same_in_calls

pytestmark = needs_mosaic

REAL = tuple(name for name in SHAPES if name.endswith("rows 1") and "head" not in name)


def product(
    rows: int,
    depth: int,
    widths: tuple[int, ...],
    *fused: str,
    group: int = 128,
    zeros: bool = True,
    scale_dtype: Any = jnp.bfloat16,
    out_dtype: Any = jnp.bfloat16,
) -> Inputs[Int4Weight]:
    """fused: names of Inputs' fields that are not None or False."""
    rng, width = np.random.default_rng(rows), widths[0] if "swiglu" in fused else sum(widths)
    of = {"group": group, "zeros": zeros, "scale_dtype": scale_dtype}

    def normal(name: str, *shape: int) -> jax.Array | None:
        return jnp.asarray(rng.normal(size=shape), jnp.bfloat16) if name in fused else None

    return Inputs(
        x=jnp.asarray(rng.normal(size=(rows, depth)), jnp.bfloat16),
        weights=tuple(int4_weight(i, w, depth, **of)[0] for i, w in enumerate(widths)),
        bias=normal("bias", width),
        residual=normal("residual", rows, width),
        swiglu="swiglu" in fused,
        in_order="in_order" in fused,
        out_dtype=jnp.dtype(out_dtype),
    )


def rounded(inputs: Inputs[Int4Weight]) -> list[np.ndarray]:
    """The weights as the kernel multiplies them, in float64."""
    arrays = (weight.to_array(jnp.bfloat16) for weight in inputs.weights)
    return [np.asarray(array).astype(np.float64) for array in arrays]


def run(inputs: Inputs[Int4Weight]) -> np.ndarray:
    with interpreted():
        made = int4_matmul(inputs, implementation="mosaic_gpu")
    assert isinstance(made, jax.Array)
    return np.asarray(made).astype(np.float32)


def kernel(inputs: Inputs[Int4Weight], *tuning: int, races: bool = False) -> np.ndarray:
    """The kernel with rows of a warpgroup, blocks, parts, CTAs and sides: see many_rows.Tuning."""
    from pallas_kernels.int4_matmul.mosaic_gpu import many_rows

    with interpreted(races=races):
        out = many_rows.multiply(inputs, tuning=many_rows.Tuning(*tuning))
    return np.asarray(out).astype(np.float32)


def parts_of(inputs: Inputs[Int4Weight]) -> int:
    from pallas_kernels.int4_matmul.mosaic_gpu import many_rows

    return many_rows.choose_tuning(Product.of(inputs)).parts


def assert_bits_of_weights(scale_dtype: str, zeros: bool) -> None:
    """Rows of the identity multiply each weight by one."""
    dtype = jnp.dtype(scale_dtype)
    inputs = product(128, 128, (64,), group=64, zeros=zeros, scale_dtype=dtype)
    inputs = replace(inputs, x=jnp.eye(128, dtype=jnp.bfloat16))
    expected = np.asarray(inputs.weights[0].to_array(jnp.bfloat16)).astype(np.float32)
    np.testing.assert_array_equal(run(inputs), expected)


CASES: dict[str, Callable[[], Inputs[Int4Weight]]] = {
    "one step": partial(product, 72, 64, (64,), group=64),
    "one block of columns": partial(product, 72, 256, (64,)),
    "two blocks of one weight": partial(product, 128, 256, (128,), zeros=False),
    "an odd number of blocks, groups of 64": partial(product, 144, 192, (192,), group=64),
    "one group for all depths": partial(product, 65, 256, (64,), group=256),
    "scales in float16": partial(product, 72, 256, (128,), scale_dtype=jnp.float16),
    "scales in float32": partial(product, 72, 256, (64,), scale_dtype=jnp.float32, zeros=False),
    "bias": partial(product, 200, 128, (128,), "bias", "in_order"),
    "bias, residual and several weights": partial(product, 72, 256, (128, 64), "bias", "residual"),
    "residual, more pieces than slots": partial(product, 300, 128, (128,), "residual"),
    "swiglu": partial(product, 200, 256, (128, 128), "swiglu"),
    "swiglu and residual": partial(product, 72, 256, (64, 64), "swiglu", "residual"),
    "logits": partial(product, 72, 256, (64,), out_dtype=jnp.float32),
    "parts of the depth": partial(product, 72, 2048, (128,)),
    "parts of the depth, bias, residual": partial(product, 144, 2048, (64,), "bias", "residual"),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name: str) -> None:
    inputs = CASES[name]()
    assert (parts_of(inputs) > 1) == name.startswith("parts")
    assert_close(inputs, rounded(inputs), run(inputs))


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])
def test_weights_have_the_bits_of_the_definition(scale_dtype: str, zeros: bool) -> None:
    assert_bits_of_weights(scale_dtype, zeros)


@pytest.mark.parametrize("fused", ["residual", "swiglu"])
def test_bits_do_not_depend_on_tile_ring_or_ctas(fused: str) -> None:
    widths = (128, 128) if fused == "swiglu" else (256,)
    inputs = product(300, 320, widths, fused, group=64)
    expected = kernel(inputs, 64, 2)
    assert np.abs(expected).max() > 0
    for own_rows, sides in itertools.product((64, 96, 128), (1, 2)):
        for blocks in (2,) if fused == "swiglu" else (1, 2):
            got = kernel(inputs, own_rows, blocks, 1, 2, sides)
            np.testing.assert_array_equal(got, expected, err_msg=f"{own_rows}, {blocks}, {sides}")


def test_bits_in_order_depend_neither_on_the_number_of_rows_nor_on_their_places() -> None:
    """Few rows of a deep product would have parts."""
    inputs = product(300, 2048, (64,), "residual")
    assert parts_of(take(inputs, slice(72))) > 1
    inputs = replace(inputs, in_order=True)
    assert parts_of(take(inputs, slice(72))) == 1
    assert_bits_are_the_rows_own(inputs, (65, 72, 144, 200), run)


@pytest.mark.parametrize(
    ("shape", "tuning"),
    [
        ((200, 256, (256,), "residual"), (64, 2, 1, 1)),
        ((200, 192, (128, 128), "swiglu"), (96, 2, 1, 1)),
        ((144, 512, (128,), "residual"), (128, 1, 2, 1)),
        ((200, 192, (256, 256), "swiglu"), (96, 2, 1, 1, 2)),
        ((200, 128, (256,), "residual"), (64, 2, 1, 1, 2)),
        ((144, 512, (256,), "bias"), (64, 2, 2, 1, 2)),
    ],
)
def test_no_copies_race(shape: tuple[Any, ...], tuning: tuple[int, ...]) -> None:
    """One CTA has all tiles, whose pieces go through the same slots. tuning: see kernel"""
    inputs = product(*shape, group=64)
    assert_close(inputs, rounded(inputs), kernel(inputs, *tuning, races=True))


def test_nan_stays_in_its_row_or_column() -> None:
    inputs = product(72, 256, (128,))
    weight = inputs.weights[0]
    weight = replace(weight, scales=weight.scales.at[1, 5].set(jnp.nan))
    inputs = replace(inputs, x=inputs.x.at[70, 3].set(jnp.nan), weights=(weight,))
    lost = np.zeros((72, 128), bool)
    lost[:, 5] = lost[70] = True
    np.testing.assert_array_equal(np.isnan(run(inputs)), lost)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"widths": (96,)}, "expected widths that are multiples of 64, got (96,)"),
        ({"group": 32}, "expected groups that are multiples of 64 with float scales, got 32 with"),
    ],
)
def test_what_the_kernel_cannot_multiply_it_says(change: dict[str, Any], reason: str) -> None:
    inputs = product(**{"rows": 144, "depth": 128, "widths": (64,)} | change)
    assert (unsupported(Product.of(inputs)) or "").startswith(reason)


def test_norms_and_wide_swiglu_are_refused() -> None:
    inputs = product(144, 256, (64, 64), "swiglu")
    wide = replace(Product.of(inputs), out_dtype=jnp.dtype("float32"))
    assert unsupported(wide) == "expected SwiGLU in bfloat16, got float32"
    normed = replace(Product.of(product(144, 256, (64,))), normed=True)
    assert unsupported(normed) == "expected no norm with many rows, got one"


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("scale_dtype", ["bfloat16", "float16", "float32"])
def test_weights_have_the_bits_of_the_definition_on_the_gpu(scale_dtype: str, zeros: bool) -> None:
    assert_bits_of_weights(scale_dtype, zeros)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_equals_float64_on_the_gpu(name: str) -> None:
    inputs = CASES[name]()
    assert_close(inputs, rounded(inputs), run(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, rows) for name in REAL for rows in (72, 256)),
        ("llama-3-8b o rows 1", 2016),
        ("llama-3-8b gate_up rows 1", 2016),
    ],
)
def test_equals_float64_on_the_gpu_at_real_shapes(name: str, rows: int) -> None:
    """The first rows are those of the identity, so that they are weights, to the bit."""
    inputs = make_inputs(replace(SHAPES[name], rows=rows), seed=rows)
    depth = inputs.x.shape[1]
    inputs = replace(inputs, x=inputs.x.at[:64].set(jnp.eye(64, depth, depth - 64, jnp.bfloat16)))
    got = run(inputs)
    some = [64, rows // 2, rows - 1]  # float64 of all rows would take minutes
    arrays = rounded(inputs)
    assert_close(take(inputs, some), arrays, got[some])
    if not inputs.swiglu and inputs.residual is None and inputs.bias is None:
        expected = np.concatenate([array[-64:] for array in arrays], axis=1)
        np.testing.assert_array_equal(got[:64], expected.astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "width", "group"), [(4096, 1024, 128), (576, 960, 64)])
def test_bits_on_the_gpu_are_the_same_in_calls_of_all_sizes(
    depth: int, width: int, group: int
) -> None:
    inputs = product(CALLS[-1], depth, (width,), "in_order", group=group)
    assert_same_in_calls(partial(int4_matmul, implementation="mosaic_gpu"), inputs)
