"""Matrices in int4 become bfloat16 arrays with the bits of Int4Weight.to_array."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.int4_matmul import Inputs, Int4Weight, int4_matmul, unsupported
from pallas_kernels.int4_matmul.shapes import SHAPES, make_inputs
from pallas_kernels.matmul.plan import Product
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_int4_matmul import assert_close, int4_weight
from tests.kernels.test_matmul_any_rows import CALLS, assert_same_in_calls

pytestmark = needs_mosaic


def decoded(weight: Int4Weight) -> np.ndarray:
    from pallas_kernels.int4_matmul.mosaic_gpu.decode import decode

    with interpreted(races=True):
        return np.asarray(decode(weight))


@pytest.mark.parametrize(
    ("width", "depth", "group"),
    [
        (64, 64, 64),  # one unit for each warp
        (128, 128, 64),  # a CTA of two units in two groups
        (192, 320, 64),  # CTAs of one unit
        (64, 768, 384),  # a group of several CTAs
        (64, 256, 256),  # a scale for each column
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_has_the_bits_of_the_definition(width: int, depth: int, group: int, zeros: bool) -> None:
    weight, _ = int4_weight(width, width, depth, group=group, zeros=zeros)
    expected = np.asarray(weight.to_array(jnp.bfloat16))
    np.testing.assert_array_equal(decoded(weight), expected)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_takes_scales_of_other_dtypes(dtype: str) -> None:
    weight, _ = int4_weight(1, 64, 256, group=128, zeros=False, scale_dtype=jnp.dtype(dtype))
    np.testing.assert_array_equal(decoded(weight), np.asarray(weight.to_array(jnp.bfloat16)))


def in_order(rows: int, weight: Int4Weight, *, seed: int = 0) -> Inputs[Int4Weight]:
    x = jax.random.normal(jax.random.key(seed), (300, weight.depth), jnp.bfloat16)
    return Inputs(x=x[:rows], weights=(weight,), in_order=True)


@pytest.mark.parametrize("zeros", [False, True])
def test_products_in_order_equal_float64(zeros: bool) -> None:
    """Of weights that are rounded to bfloat16."""
    weight, _ = int4_weight(2, 128, 256, group=128, zeros=zeros)
    rounded = np.asarray(weight.to_array(jnp.bfloat16)).astype(np.float64)
    inputs = in_order(144, weight)
    with interpreted():
        assert_close(inputs, [rounded], int4_matmul(inputs, implementation="mosaic_gpu"))


def test_products_in_order_have_the_bits_of_any_number_of_rows() -> None:
    """72 and 200 rows would be multiplied 64 at a time, 300 by XLA."""
    weight, _ = int4_weight(3, 64, 512, group=128, zeros=True)
    with interpreted():
        made = [
            np.asarray(int4_matmul(in_order(rows, weight), implementation="mosaic_gpu"))
            for rows in (72, 200, 300)
        ]
    for few in made[:2]:
        np.testing.assert_array_equal(few, made[2][: len(few)])


@pytest.mark.parametrize(
    ("width", "depth", "group", "reason"),
    [
        (
            *(80, 128, 64),
            "expected a width that is a multiple of 64 and groups of a multiple of 64, "
            "got 80 and 64",
        ),
        (
            *(64, 128, 32),
            "expected a width that is a multiple of 64 and groups of a multiple of 64, "
            "got 64 and 32",
        ),
        (*(64, 64, 64), "expected a depth that is a multiple of 64 from 128 on, got 64"),
    ],
)
def test_what_no_kernel_multiplies_in_order_is_said(
    width: int, depth: int, group: int, reason: str
) -> None:
    weight, _ = int4_weight(0, width, depth, group=group, zeros=False)
    assert unsupported(Product.of(in_order(144, weight))) == reason


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [name for name in SHAPES if name.endswith("rows 1") and "head" not in name]
)
def test_has_the_bits_of_the_definition_on_the_gpu(name: str) -> None:
    """No prefill multiplies many rows by the head."""
    weight = make_inputs(SHAPES[name], seed=1).weights[0]
    expected = np.asarray(weight.to_array(jnp.bfloat16).view(jnp.uint16))
    np.testing.assert_array_equal(decoded(weight).view(np.uint16), expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("depth", "width", "group"), [(4096, 1024, 128), (576, 960, 64)])
def test_bits_on_the_gpu_are_the_same_in_calls_of_all_sizes(
    depth: int, width: int, group: int
) -> None:
    """In one program with the kernel that decodes the weight."""
    weight, _ = int4_weight(0, width, depth, group=group, zeros=True)
    x = jax.random.normal(jax.random.key(0), (CALLS[-1], depth), jnp.bfloat16)
    inputs = Inputs(x=x, weights=(weight,), in_order=True)
    assert_same_in_calls(partial(int4_matmul, implementation="mosaic_gpu"), inputs)
