"""Many rows with fp8 weights: products in order have one order for all numbers of rows in blocks,
and no parts of the depth by channels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8_matmul import Inputs, fp8_matmul, quantise, reference
from pallas_kernels.fp8_matmul.reference import products_of_parts
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_fp8_matmul import fp8_weight
from tests.kernels.test_matmul_any_rows import CALLS, assert_same_in_calls

pytestmark = needs_mosaic


def product(rows: int, **fused: Any) -> Inputs:
    x = jax.random.normal(jax.random.key(0), (300, 256), jnp.bfloat16)[:rows]
    weights = tuple(fp8_weight(i, 128, 256, "block") for i in range(2))
    return Inputs(x=x, weights=weights, in_order=True, **fused)


def run(inputs: Inputs) -> np.ndarray:
    with interpreted():
        made = fp8_matmul(inputs, implementation="mosaic_gpu")
    return np.asarray(made).astype(np.float32)


@pytest.mark.parametrize("swiglu", [False, True])
def test_equals_float64_of_codes_and_scales(swiglu: bool) -> None:
    """Rows and weights are rounded to bfloat16 once more: their blocks differ in scale."""
    inputs = product(144, swiglu=swiglu)
    x = quantise(inputs.x, "block").to_array(jnp.bfloat16)
    exact = [
        np.asarray(x).astype(np.float64)
        @ np.asarray(weight.to_array(jnp.bfloat16)).astype(np.float64)
        for weight in inputs.weights
    ]
    if swiglu:
        gate, up = exact
        exact = [gate / (1 + np.exp(-gate)) * up]
    expected = np.concatenate(exact, axis=1)
    error = np.abs(run(inputs) - expected) / (np.abs(expected) + np.sqrt((expected**2).mean()))
    assert error.max() <= (5 if swiglu else 2) * 2.0**-8


def test_depths_of_channels_in_order_have_one_part_in_calls_of_all_sizes() -> None:
    """Llama-3-8B's down, whose depth has four parts in rounds of 129 to 256 rows."""
    codes = jax.ShapeDtypeStruct((4096, 14336), jnp.float8_e4m3fn)

    def parts(rows: int, **options: bool) -> int:
        x = jax.ShapeDtypeStruct((rows, 14336), jnp.float8_e4m3fn)
        return jax.eval_shape(partial(products_of_parts, **options), x, codes).shape[0]

    assert {parts(rows, splits=False) for rows in CALLS} == {1}
    assert parts(144) == 4


def test_a_product_of_channels_in_order_asks_for_one_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[bool] = []

    def note(x: jax.Array, codes: jax.Array, *, splits: bool) -> jax.Array:
        asked.append(splits)
        return products_of_parts(x, codes, splits=splits)

    monkeypatch.setattr(reference, "products_of_parts", note)
    weight = fp8_weight(0, 128, 1024, "channel")
    x = jax.random.normal(jax.random.key(0), (144, 1024), jnp.bfloat16)
    for in_order in (False, True):
        with interpreted():
            inputs = Inputs(x=x, weights=(weight,), in_order=in_order)
            fp8_matmul(inputs, implementation="mosaic_gpu")
    assert asked == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "width"), [(4096, 1024), (576, 960)])
def test_bits_on_the_gpu_are_the_same_in_calls_of_all_sizes(depth: int, width: int) -> None:
    """In one program with the kernels that make the product's operands."""
    weight = fp8_weight(0, width, depth, "block")
    x = jax.random.normal(jax.random.key(0), (CALLS[-1], depth), jnp.bfloat16)
    inputs = Inputs(x=x, weights=(weight,), in_order=True)
    assert_same_in_calls(partial(fp8_matmul, implementation="mosaic_gpu"), inputs)


def test_has_the_bits_of_any_number_of_rows() -> None:
    """Otherwise 72 and 200 rows are multiplied 64 at a time, 300 by XLA."""
    expected = run(product(300))
    for rows in (72, 200):
        np.testing.assert_array_equal(run(product(rows)), expected[:rows])
    otherwise = run(replace(product(72), in_order=False))
    assert (otherwise != expected[:72]).any()
