"""RMS norm: every implementation against float64, and a row's bits against its neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import IMPLEMENTATIONS, rms_norm
from pallas_kernels.rms_norm.shapes import SHAPES, Shape, make_inputs
from tests.kernels.interpreter import by_implementation, interpreted, needs_mosaic

# Two roundings to bfloat16: of the normed value and of its product with the weight, half a unit in
# the last place (2^-8) each.
TOLERANCE = 2 * 2.0**-8 * 1.01
implementations = by_implementation(IMPLEMENTATIONS)


def run(inputs: dict[str, Any], implementation: str) -> np.ndarray:
    if implementation == "mosaic_gpu" and jax.default_backend() == "cpu":
        with interpreted():
            return np.asarray(rms_norm(**inputs, implementation=implementation).astype(jnp.float32))
    return np.asarray(rms_norm(**inputs, implementation=implementation).astype(jnp.float32))


def check(shape: Shape, implementation: str) -> None:
    inputs = make_inputs(shape, seed=0)
    x, weight = (
        np.asarray(inputs[name].astype(jnp.float32)).astype(np.float64) for name in ("x", "weight")
    )
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + inputs["eps"]) * weight
    assert (
        np.abs(run(inputs, implementation) - expected).max() <= (TOLERANCE * np.abs(expected)).max()
    )
    assert (
        np.abs(run(inputs, implementation) - expected) <= TOLERANCE * np.abs(expected) + 1e-6
    ).all()


@implementations
@pytest.mark.parametrize("shape", [Shape(1, 1024), Shape(3, 2048), Shape(3, 576)], ids=str)
def test_equals_float64(shape: Shape, implementation: str) -> None:
    check(shape, implementation)


def check_casts(width: int, implementation: str) -> None:
    """Rounded to bfloat16 before the gain, and after it. A sum in another order moves few values
    across a rounding."""
    inputs = make_inputs(Shape(8, width), seed=2)
    x, weight = (
        np.asarray(inputs[name].astype(jnp.float32)).astype(np.float64) for name in ("x", "weight")
    )
    bfloat16 = lambda a: np.asarray(a, np.float32).astype(jnp.bfloat16).astype(np.float64)  # noqa: E731
    normed = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + inputs["eps"])
    found = run(inputs, implementation)
    assert np.mean(found == bfloat16(bfloat16(normed) * weight)) > 0.999
    assert np.mean(found == bfloat16(normed * weight)) < 0.9


@implementations
@pytest.mark.parametrize("width", [1024, 576])
def test_the_order_of_casts_is_pinned(width: int, implementation: str) -> None:
    check_casts(width, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 576])
def test_the_order_of_casts_is_pinned_on_the_gpu(width: int) -> None:
    check_casts(width, "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_equals_float64_at_real_sizes(name: str) -> None:
    check(SHAPES[name], "mosaic_gpu")


def check_alone(width: int) -> None:
    inputs = make_inputs(Shape(5, width), seed=1)
    together = run(inputs, "mosaic_gpu")
    for row in range(5):
        alone = run(inputs | {"x": inputs["x"][row : row + 1]}, "mosaic_gpu")
        assert np.array_equal(alone[0], together[row])


@needs_mosaic
@pytest.mark.parametrize("width", [1024, 576])
def test_a_rows_bits_do_not_depend_on_its_neighbours(width: int) -> None:
    check_alone(width)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1024, 4096, 576])
def test_a_rows_bits_do_not_depend_on_its_neighbours_on_the_gpu(width: int) -> None:
    check_alone(width)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"weight": jnp.ones(65, jnp.bfloat16)},
            r"x and weight: expected \[rows, width\] and \[width\], got \(2, 64\) and \(65,\)",
        ),
        (
            {"implementation": "nothing"},
            "implementation: expected one of reference, mosaic_gpu, got 'nothing'",
        ),
        ({"implementation": "mosaic_gpu"}, "rms_norm, implementation 'mosaic_gpu': expected"),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    if jax.default_backend() == "gpu" and arguments == {"implementation": "mosaic_gpu"}:
        pytest.skip("a GPU runs it")
    inputs = make_inputs(Shape(2, 64), seed=0) | arguments
    with pytest.raises(ValueError, match=sentence):
        rms_norm(**inputs)


@needs_mosaic
@pytest.mark.parametrize(
    ("width", "dtype", "sentence"),
    [(600, jnp.bfloat16, "a multiple of 64"), (4096, jnp.float32, "bfloat16")],
)
def test_the_kernel_says_what_it_does_not_take(width: int, dtype: Any, sentence: str) -> None:
    from pallas_kernels.rms_norm import mosaic_gpu

    assert sentence in (mosaic_gpu.unsupported(width, dtype) or "")
