"""Products of few rows: the reference and the kernel equal float64, and a row's bits do not depend
on its neighbours."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import IMPLEMENTATIONS, Inputs, Product, matmul, plan, unsupported
from pallas_kernels.matmul.shapes import SHAPES, Shape, bytes_moved, flops, make_inputs
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic
from tests.support.slow import slow, slow_unless

implementations = by_implementation(IMPLEMENTATIONS)

# Largest error, in units of the value's size plus the root mean square of the result. bfloat16
# rounds a value to within 2^-8 of itself (half an ulp is 2^-9 at best, 2^-8 at worst); a residual
# sum rounds twice. SwiGLU rounds gate, up, silu and product. float32 keeps the sum itself, whose
# last bit Hopper's tensor cores cut off after every 16 terms: depth / 16 times 2^-24, 14336 deep at
# most.
TOLERANCE = {"bfloat16": 2 * 2.0**-8, "swiglu": 5 * 2.0**-8, "float32": 6e-5}
# The same for the median, which a wrong tile or a lost partial sum moves.
MEDIAN = {"bfloat16": 2.0**-9, "swiglu": 2.0**-8, "float32": 2e-5}

# Small enough for the interpreter.
SMALL = {
    "one row": Shape(1, 256, (64,)),
    "three rows": Shape(3, 256, (64,)),
    "eight rows": Shape(8, 256, (64,)),
    "sixteen rows": Shape(16, 256, (64,)),
    "32 rows": Shape(32, 256, (64,)),
    "40 rows, padded to 64": Shape(40, 256, (64,)),
    "several weights": Shape(3, 256, (128, 64, 64)),
    "an odd number of steps, three warpgroups": Shape(4, 192, (64, 128)),
    "one warpgroup": Shape(4, 320, (64,)),
    "more steps than stages": Shape(5, 2304, (64,)),
    "more steps than stages, a depth that is split": Shape(5, 4096, (64,)),
    "bias": Shape(3, 256, (128,), bias=True),
    "bias and several weights": Shape(16, 256, (64, 128), bias=True),
    "bias and residual, a depth that is split": Shape(5, 4096, (64,), bias=True, residual=True),
    "bias, float32": Shape(3, 256, (128,), bias=True, out_dtype="float32"),
    "residual": Shape(3, 256, (128,), residual=True),
    "residual, sixteen rows": Shape(16, 256, (128,), residual=True),
    "residual and several weights": Shape(8, 256, (64, 128), residual=True),
    "swiglu": Shape(3, 256, (128, 128), swiglu=True),
    "swiglu, three warpgroups": Shape(8, 192, (64, 64), swiglu=True),
    "swiglu, sixteen rows": Shape(16, 192, (64, 64), swiglu=True),
    "swiglu and residual": Shape(3, 128, (64, 64), swiglu=True, residual=True),
    "transposed": Shape(3, 256, (128,), transposed=True),
    "float32": Shape(3, 256, (128,), out_dtype="float32"),
    "float32, sixteen rows": Shape(16, 256, (128,), out_dtype="float32"),
    "tied head": Shape(5, 192, (192,), transposed=True, out_dtype="float32"),
}


def run(inputs: Inputs, implementation: str = "mosaic_gpu") -> np.ndarray:
    """The public op's result, widened without loss."""
    with interpreted() if implementation == "mosaic_gpu" else contextlib.nullcontext():
        return np.asarray(matmul(inputs, implementation=implementation)).astype(np.float32)


def kernel(inputs: Inputs, **changes: Any) -> np.ndarray:
    """The kernel with some of the tuning changed."""
    from pallas_kernels.matmul import mosaic_gpu

    tuning = plan.choose_tuning(Product.of(inputs))
    assert tuning is not None
    with interpreted():
        return np.asarray(
            mosaic_gpu.matmul(inputs, tuning=dataclasses.replace(tuning, **changes))
        ).astype(np.float32)


def ground_truth(inputs: Inputs) -> np.ndarray:
    """float64 [rows, width]; nothing is rounded on the way."""
    x, *weights = (np.asarray(a).astype(np.float64) for a in (inputs.x, *inputs.weights))
    results = [x @ (w.T if inputs.transposed else w) for w in weights]
    if inputs.swiglu:
        gate, up = results
        results = [gate / (1 + np.exp(-gate)) * up]
    result = np.concatenate(results, axis=1)
    if inputs.bias is not None:
        result = result + np.asarray(inputs.bias).astype(np.float64)
    return (
        result
        if inputs.residual is None
        else result + np.asarray(inputs.residual).astype(np.float64)
    )


def assert_close(shape: Shape, got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape and np.isfinite(got).all()
    kind = "swiglu" if shape.swiglu else shape.out_dtype
    error = np.abs(got - expected) / (np.abs(expected) + np.sqrt(np.square(expected).mean()))
    worst, median = float(error.max()), float(np.median(error))
    assert worst <= TOLERANCE[kind] and median <= MEDIAN[kind], (
        f"expected at most {TOLERANCE[kind]}, median {MEDIAN[kind]}; got {worst}, {median}"
    )


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs, implementation), ground_truth(inputs))


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "warpgroups", "blocks", "stages"),
    slow_unless(
        [  # each epilogue with both rings, each number of warpgroups with both
            ("several weights", 1, 1, 2),
            ("several weights", 2, 2, 3),
            ("residual, sixteen rows", 2, 1, 2),
            ("residual, sixteen rows", 3, 2, 3),
            ("swiglu and residual", 3, 1, 2),
            ("swiglu and residual", 1, 2, 3),
            ("tied head", 3, 1, 2),
            ("tied head", 1, 2, 3),
        ],
        (
            (name, warpgroups, *ring)
            for name in (
                *("several weights", "residual, sixteen rows"),
                *("swiglu and residual", "tied head"),
            )
            for warpgroups in (1, 2, 3)
            for ring in ((1, 2), (2, 3))
        ),
    ),
)
def test_tiles_in_turn_rings_and_warpgroups(
    name: str, warpgroups: int, blocks: int, stages: int
) -> None:
    """Fewer blocks than tiles, fewer slots than steps, every sharing of the depth; an input that
    stays and one that streams."""
    shape = dataclasses.replace(
        SMALL[name], depth=384, widths=tuple(3 * 64 if w == 64 else w for w in SMALL[name].widths)
    )
    inputs = make_inputs(shape, seed=1)
    assert_close(
        shape,
        kernel(inputs, tile_k=64, stripe_k=64, warpgroups=warpgroups, blocks=blocks, stages=stages),
        ground_truth(inputs),
    )


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("three rows", 1),
        slow("three rows", 3),
        slow("several weights", 1),
        ("several weights", 3),
        ("residual, sixteen rows", 1),
        slow("residual, sixteen rows", 3),
        slow("swiglu, sixteen rows", 1),
        ("swiglu, sixteen rows", 3),
        slow("tied head", 1),
        ("tied head", 3),
    ],
)
def test_an_input_that_streams_gives_the_same_bits(
    name: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pallas_kernels.matmul import mosaic_gpu

    shape = dataclasses.replace(SMALL[name], depth=768)
    inputs = make_inputs(shape, seed=2)
    stays = kernel(inputs, blocks=blocks, stages=2)
    monkeypatch.setattr(plan, "RESIDENT_BYTES", 0)
    # The limit is read while tracing.
    mosaic_gpu.matmul.clear_cache()  # type: ignore[attr-defined]
    try:
        assert not plan.is_resident(Product.of(inputs), shape.depth)
        assert_close(shape, kernel(inputs, blocks=blocks, stages=2), ground_truth(inputs))
        np.testing.assert_array_equal(kernel(inputs, blocks=blocks, stages=2), stays)
    finally:
        mosaic_gpu.matmul.clear_cache()  # type: ignore[attr-defined]


def near_ties(shape: Shape, seed: int, step: int = 1) -> Inputs:
    """Inputs whose sums cancel to nearly nothing, so that another order of summation gives other
    bits.

    step: all but every step-th place of the depth is zero. With the kernel's step no wgmma has more
    than one term to add up, whose order the CPU's products, unlike wgmma, choose by the number of
    rows.
    """
    inputs = make_inputs(shape, seed)
    rng = np.random.default_rng(seed)
    x = np.zeros((shape.rows, shape.depth), np.float32)
    kept = x[:, ::step].shape
    x[:, ::step] = rng.normal(size=kept)
    x[:, step :: 2 * step] = x[:, :: 2 * step] + rng.normal(size=(shape.rows, kept[1] // 2)) / 64
    weights = []
    for weight in inputs.weights:
        w = np.array(weight.T if shape.transposed else weight).astype(np.float32)
        w[step :: 2 * step] = -w[:: 2 * step]
        weights.append(jnp.asarray(w.T if shape.transposed else w, jnp.bfloat16))
    return dataclasses.replace(
        inputs,
        x=jnp.asarray(x, jnp.bfloat16),
        weights=tuple(weights),
        out_dtype=jnp.dtype("float32"),
    )


def take(inputs: Inputs, rows: slice | list[int]) -> Inputs:
    """The same weights with some of the rows."""
    index = np.arange(inputs.x.shape[0])[rows]
    residual = None if inputs.residual is None else inputs.residual[index]
    return dataclasses.replace(inputs, x=inputs.x[index], residual=residual)


def assert_bits_are_the_rows_own(
    inputs: Inputs, counts: tuple[int, ...], run: Callable[[Inputs], np.ndarray] = run
) -> None:
    """Multiply some of the rows, and all in another order. run: the op"""
    expected, rows = run(inputs), inputs.x.shape[0]
    for count in counts:
        np.testing.assert_array_equal(
            run(take(inputs, slice(count))), expected[:count], err_msg=f"{count} of {rows} rows"
        )
    order = np.random.default_rng(0).permutation(rows).tolist()
    np.testing.assert_array_equal(
        run(take(inputs, order)), expected[order], err_msg=f"{rows} rows in another order"
    )


@needs_mosaic
@pytest.mark.parametrize("name", ["several weights", "residual", "swiglu", "transposed"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(name: str) -> None:
    """From 1 to 64 rows: up to 8 rows a step is 128 deep, above that half of a stripe."""
    shape = dataclasses.replace(SMALL[name], rows=64, depth=768)
    assert_bits_are_the_rows_own(near_ties(shape, seed=3, step=128), (1, 3, 8, 16, 24))


@needs_mosaic
def test_the_near_ties_tell_orders_of_summation_apart() -> None:
    inputs = near_ties(Shape(4, 768, (128,)), seed=3, step=128)
    assert (kernel(inputs, warpgroups=2) != kernel(inputs, warpgroups=1)).any()
    assert (kernel(inputs) != kernel(inputs, tile_k=64, stripe_k=64)).any()
    np.testing.assert_array_equal(kernel(inputs), kernel(inputs, tile_k=64))


X: Any = jax.ShapeDtypeStruct((4, 128), jnp.bfloat16)
W: Any = jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)


def changed(struct: Any, shape: tuple[int, ...] | None = None, dtype: Any = None) -> Any:
    return jax.ShapeDtypeStruct(shape or struct.shape, dtype or struct.dtype)


DOES_NOT_FIT = {
    r"weights: expected matrices of depth 128, got \[\(64, 128\)\] for x \(4, 128\)": {
        "weights": (changed(W, (64, 128)),)
    },
    r"weights: expected matrices of depth 128, got \[\(128, 64\)\] for x": {"transposed": True},
    r"weights: expected matrices of depth 128, got \[\] for x": {"weights": ()},
    r"weights: expected matrices of depth 128, got .* for x \(2, 4, 128\)": {
        "x": changed(X, (2, 4, 128))
    },
    r"weights: expected gate and up of one width with swiglu, got widths \[64\]": {"swiglu": True},
    r"weights: expected gate and up of one width with swiglu, got widths \[64, 128\]": {
        "swiglu": True,
        "weights": (W, changed(W, (128, 128))),
    },
    r"residual: expected \(4, 64\), got \(4, 128\)": {"residual": changed(X)},
    r"bias: expected \(64,\) without swiglu, got \(4, 128\), swiglu False": {"bias": changed(X)},
    r"bias: expected \(64,\) without swiglu, got \(64,\), swiglu True": {
        "swiglu": True,
        "weights": (W, W),
        "bias": jnp.zeros(64),
    },
    r"implementation: expected one of reference, mosaic_gpu, got 'fast'": {
        "implementation": "fast"
    },
}


@pytest.mark.parametrize("message", DOES_NOT_FIT)
def test_what_does_not_fit_is_an_error(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        call(matmul, Inputs(x=X, weights=(W,)), DOES_NOT_FIT[message])


UNSUPPORTED = {
    "expected bfloat16 operands, got float32 and bfloat16": (
        (4, 128, (64,)),
        {"x_dtype": jnp.float32},
    ),
    "expected 1 to 8 rows, or a multiple of 8 up to 64, got 9": ((9, 128, (64,)), {}),
    "expected 1 to 8 rows, or a multiple of 8 up to 64, got 72": ((72, 128, (64,)), {}),
    "expected a depth and widths that are multiples of 64, got 96 and (64,)": ((4, 96, (64,)), {}),
    "expected a depth and widths that are multiples of 64, got 128 and (64, 96)": (
        (4, 128, (64, 96)),
        {},
    ),
}


@needs_mosaic
@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_kernel_cannot_multiply_it_says(reason: str) -> None:
    (rows, depth, widths), options = UNSUPPORTED[reason]
    x = jax.ShapeDtypeStruct((rows, depth), options.get("x_dtype", jnp.bfloat16))
    weights = tuple(jax.ShapeDtypeStruct((depth, width), jnp.bfloat16) for width in widths)
    assert unsupported(Product(x, weights)) == reason
    if jax.default_backend() == "cpu":
        with interpreted(), pytest.raises(ValueError) as error:
            inputs = Inputs(
                x=jnp.zeros(x.shape, x.dtype),
                weights=tuple(jnp.zeros(w.shape, w.dtype) for w in weights),
            )
            matmul(inputs, implementation="mosaic_gpu")
        assert str(error.value) == f"matmul, implementation 'mosaic_gpu': {reason}"


def test_the_kernel_needs_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one here")
    with pytest.raises(
        ValueError, match="^matmul, implementation 'mosaic_gpu': expected an NVIDIA GPU, got cpu$"
    ):
        matmul(Inputs(x=X, weights=(W,)), implementation="mosaic_gpu")


@pytest.mark.skipif(jax.__version_info__ >= (0, 11), reason="jax is new enough here")
def test_the_kernel_needs_jax_11() -> None:
    assert unsupported(Product(X, (W,))) == f"expected jax 0.11 or later, got {jax.__version__}"


def test_bytes_are_weights_input_residual_and_result() -> None:
    assert bytes_moved(Shape(2, 128, (64, 128))) == 2 * (128 * 192 + 2 * 128 + 2 * 192)
    assert bytes_moved(Shape(2, 128, (64, 64), swiglu=True, residual=True)) == 2 * (
        128 * 128 + 2 * 128 + 2 * 64 + 2 * 64
    )
    assert (
        bytes_moved(Shape(2, 128, (64,), out_dtype="float32"))
        == 2 * (128 * 64 + 2 * 128) + 4 * 2 * 64
    )


def test_arithmetic_is_a_multiplication_and_an_addition_for_each_weight_and_row() -> None:
    assert (
        flops(Shape(2, 128, (64, 128)))
        == flops(Shape(2, 128, (96, 96), swiglu=True))
        == 2 * 2 * 128 * 192
    )


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_float32_product_at_real_sizes(name: str) -> None:
    shape = SHAPES[name]
    inputs = make_inputs(shape, seed=4)
    got = run(inputs)
    wide = jax.tree.map(lambda a: a.astype(jnp.float32), inputs)
    wide = dataclasses.replace(wide, out_dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(matmul)(wide)
    assert_close(shape, got, np.asarray(expected).astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SHAPES if name.endswith("rows 64")])
def test_bits_on_the_gpu_do_not_depend_on_neighbours(name: str) -> None:
    inputs = near_ties(SHAPES[name], seed=5)
    np.testing.assert_array_equal(
        run(take(inputs, slice(4))), run(take(inputs, slice(4))), err_msg="twice"
    )
    assert_bits_are_the_rows_own(inputs, (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56))
    few, many = run(take(inputs, slice(8))), run(inputs)
    for row in (0, 7):
        np.testing.assert_array_equal(
            run(take(inputs, [row])), few[row : row + 1], err_msg=f"row {row} alone"
        )
    np.testing.assert_array_equal(
        run(take(inputs, list(range(48, 64)))), many[48:], err_msg="the last 16 rows"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64_on_the_gpu(name: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs), ground_truth(inputs))
