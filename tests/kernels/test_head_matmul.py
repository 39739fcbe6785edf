"""Per-head products: every implementation equals float64 NumPy, and a row's bits do not depend on
how many rows there are."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.head_matmul import IMPLEMENTATIONS, Inputs, head_matmul, unsupported
from pallas_kernels.head_matmul.shapes import ROPE, SHAPES, Shape, bytes_moved, make_inputs
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic

implementations = by_implementation(IMPLEMENTATIONS)

SMALL = {
    "keys with rotation, padded heads": Shape(4, 3, 192, 128, rotates=True, out_heads=8),
    "values of padded heads": Shape(1, 3, 128, 64, in_heads=8),
    "rows that are no multiple of 8": Shape(12, 2, 64, 128, rotates=True),
    "two row tiles": Shape(72, 2, 64, 64, rotates=True),
}
# Of a value or of the rms of its head, whichever is larger: half an ulp of bfloat16, and float32
# sums. A rotation rounds once too.
ROUNDING = 1.1 * 2.0**-8


def run(shape: Shape, inputs: Inputs, implementation: str) -> np.ndarray:
    """[rows, num_heads, width (+ ROPE)]"""
    with (
        interpreted()
        if implementation == "mosaic_gpu" and jax.default_backend() == "cpu"
        else contextlib.nullcontext()
    ):
        out = np.asarray(head_matmul(inputs, implementation=implementation)).astype(np.float32)
    assert out.shape == (
        shape.rows,
        shape.out_heads or shape.num_heads,
        shape.width + (ROPE if shape.rotates else 0),
    )
    return out[:, : shape.num_heads]


def ground_truth(shape: Shape, inputs: Inputs) -> np.ndarray:
    x, weights = (np.asarray(a).astype(np.float64) for a in (inputs.x, inputs.weights))
    x = x[:, : shape.num_heads]
    out = np.stack([x[:, h, : shape.depth] @ weights[h] for h in range(shape.num_heads)], axis=1)
    if not shape.rotates:
        return out
    cos, sin = (np.asarray(a, np.float64)[:, None] for a in (inputs.cos, inputs.sin))
    a, b = np.split(x[..., shape.depth :], 2, axis=-1)
    return np.concatenate((out, a * cos - b * sin, b * cos + a * sin), axis=-1)


def assert_close(shape: Shape, got: np.ndarray, expected: np.ndarray) -> None:
    for part in (slice(0, shape.width), slice(shape.width, None)):
        if expected[..., part].size:
            rms = np.sqrt(np.square(expected[..., part]).mean(axis=-1, keepdims=True))
            error = np.abs(got - expected)[..., part] / np.maximum(np.abs(expected[..., part]), rms)
            assert error.max() <= ROUNDING


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(shape, inputs, implementation), ground_truth(shape, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES | SMALL)
def test_equals_float64_on_the_gpu(name: str) -> None:
    shape = (SHAPES | SMALL)[name]
    inputs = make_inputs(shape, seed=1)
    assert_close(shape, run(shape, inputs, "mosaic_gpu"), ground_truth(shape, inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["glm keys, batch 16, Q 6", "glm values, batch 16, Q 6"])
def test_bits_on_the_gpu_do_not_depend_on_the_number_of_rows(name: str) -> None:
    shape = SHAPES[name]
    inputs = make_inputs(shape, seed=2)
    expected = run(shape, inputs, "mosaic_gpu")
    for rows in (1, 4, 16, 64):
        fewer = replace(
            inputs,
            x=inputs.x[:rows],
            cos=None if inputs.cos is None else inputs.cos[:rows],
            sin=None if inputs.sin is None else inputs.sin[:rows],
        )
        np.testing.assert_array_equal(
            run(replace(shape, rows=rows), fewer, "mosaic_gpu"),
            expected[:rows],
            err_msg=f"{rows} rows",
        )


@needs_mosaic
@pytest.mark.parametrize(
    ("x", "weights", "reason"),
    [
        ((4, 3, 192), (3, 192, 64), None),
        ((4, 3, 256), (3, 192, 64), None),
        ((129, 3, 192), (3, 192, 64), "expected 1 to 128 rows, got 129"),
        (
            (4, 3, 96),
            (3, 96, 64),
            "expected a depth of a multiple of 64 up to 512 and a width of a multiple of 64, got "
            "96 and 64",
        ),
        ((4, 3, 224), (3, 192, 64), "expected 64 numbers a head to rotate, or none, got 32"),
    ],
)
def test_what_the_kernel_does_not_support_has_a_reason(
    x: tuple[int, ...], weights: tuple[int, ...], reason: str | None
) -> None:
    struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    assert unsupported(struct(x), struct(weights)) == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"sin": None},
            "cos and sin: expected both for 64 numbers a head beyond the depth 192, or neither "
            "for none",
        ),
        ({"cos": jnp.zeros((4, 16))}, "cos: expected float32 (4, 32), got float32 (4, 16)"),
        ({"out_heads": 2}, "out_heads: expected at least 3, got 2"),
        (
            {"implementation": "cuda"},
            "implementation: expected one of reference, mosaic_gpu, got 'cuda'",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], reason: str) -> None:
    inputs = make_inputs(SMALL["keys with rotation, padded heads"], seed=0)
    with pytest.raises(ValueError) as error:
        call(head_matmul, inputs, change)
    assert str(error.value) == reason


def test_bytes_moved_counts_each_weight_once() -> None:
    shape = Shape(2, 3, 64, 128)
    assert bytes_moved(shape) == (3 * 64 * 128 + 2 * 3 * (64 + 128)) * 2
    assert (
        bytes_moved(replace(shape, rotates=True))
        == bytes_moved(shape) + 2 * 3 * 128 * 2 + 2 * 64 * 4
    )
