"""Sum and norm: both are the ops that sum_norm joins, to the bit, and a row depends on no other."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.sum_norm import IMPLEMENTATIONS, num_parts, sum_norm
from pallas_kernels.sum_norm.shapes import SHAPES, Shape, make_inputs
from tests.kernels.interpreter import by_implementation, interpreted, needs_mosaic

implementations = by_implementation(IMPLEMENTATIONS)


def where(implementation: str) -> AbstractContextManager[None]:
    return nullcontext() if implementation == "reference" else interpreted()


def run(inputs: dict[str, Any], implementation: str) -> tuple[np.ndarray, np.ndarray]:
    with where(implementation):
        total, normed = sum_norm(**inputs, implementation=implementation)
    assert total.dtype == normed.dtype == inputs["residual"].dtype
    return np.asarray(total), np.asarray(normed)


def check(shape: Shape, implementation: str) -> None:
    inputs = make_inputs(shape, seed=0)
    parts = np.asarray(inputs["parts"])
    added = parts[0]
    for term in (*parts[1:], np.asarray(inputs["residual"], np.float32)):
        added = added + term
    expected = added.astype(jnp.bfloat16)
    total, normed = run(inputs, implementation)
    np.testing.assert_array_equal(total.view(np.uint16), expected.view(np.uint16))
    with where(implementation):
        alone = rms_norm(
            jnp.asarray(total), inputs["gain"], eps=inputs["eps"], implementation=implementation
        )
    np.testing.assert_array_equal(normed.view(np.uint16), np.asarray(alone).view(np.uint16))


@implementations
@pytest.mark.parametrize("shape", [Shape(3, 1024), Shape(2, 2048, 3), Shape(1, 1024, 1)], ids=str)
def test_is_a_sum_in_order_and_its_norm_to_the_bit(shape: Shape, implementation: str) -> None:
    check(shape, implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_is_a_sum_in_order_and_its_norm_to_the_bit_at_real_sizes(name: str) -> None:
    check(SHAPES[name], "mosaic_gpu")


@needs_mosaic
def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    inputs = make_inputs(Shape(3, 1024), seed=1)
    together = run(inputs, "mosaic_gpu")
    for row in range(3):
        mine = slice(row, row + 1)
        own = {"parts": inputs["parts"][:, mine], "residual": inputs["residual"][mine]}
        for alone, of_all in zip(run(inputs | own, "mosaic_gpu"), together, strict=True):
            np.testing.assert_array_equal(alone[0], of_all[row])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"gain": jnp.ones(65, jnp.bfloat16)},
            r"expected \[parts, rows, width\], \[rows, width\] and \[width\], "
            r"got \(2, 3, 1024\), \(3, 1024\) and \(65,\)",
        ),
        ({"parts": jnp.ones((0, 3, 1024))}, r"got \(0, 3, 1024\), \(3, 1024\) and \(1024,\)"),
        (
            {"parts": jnp.ones((2, 3, 1024), jnp.bfloat16)},
            "expected float32, and one dtype of residual and gain, got bfloat16, bfloat16",
        ),
        (
            {"gain": jnp.ones(1024)},
            "one dtype of residual and gain, got float32, bfloat16 and float32",
        ),
        (
            {"implementation": "nothing"},
            "implementation: expected one of reference, mosaic_gpu, got 'nothing'",
        ),
        ({"implementation": "mosaic_gpu"}, "sum_norm, implementation 'mosaic_gpu': expected"),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    if jax.default_backend() == "gpu" and arguments == {"implementation": "mosaic_gpu"}:
        pytest.skip("a GPU runs it")
    with pytest.raises(ValueError, match=sentence):
        sum_norm(**make_inputs(Shape(3, 1024), seed=0) | arguments)


@needs_mosaic
@pytest.mark.parametrize(
    ("width", "dtype", "sentence"),
    [
        (576, jnp.bfloat16, "a multiple of 1024 values up to 8192, got 576"),
        (9216, jnp.bfloat16, "up to 8192, got 9216"),
        (4096, jnp.float32, "bfloat16"),
    ],
)
def test_the_kernel_says_what_it_does_not_take(width: int, dtype: Any, sentence: str) -> None:
    from pallas_kernels.sum_norm import unsupported

    assert sentence in (unsupported(width, dtype) or "")


@pytest.mark.parametrize(
    ("rows", "depth", "width", "parts"),
    [
        (64, 14336, 4096, 1),  # the kernel of few rows
        (65, 14336, 4096, 2),
        (256, 12288, 4096, 2),
        (257, 14336, 4096, 1),
        (128, 8192, 3072, 2),
        (128, 4096, 4096, 1),  # cuBLAS does not cut it
        (128, 8192, 2048, 1),  # two parts leave half of the SMs idle
        (128, 25600, 5120, 1),  # two parts take two turns of the SMs
        (128, 4097, 4096, 1),
    ],
)
def test_deep_products_of_few_tiles_are_cut(rows: int, depth: int, width: int, parts: int) -> None:
    assert num_parts(rows, depth, width) == parts
