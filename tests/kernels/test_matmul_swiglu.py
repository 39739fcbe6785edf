"""Gate and up of many rows, a kernel of its own: it equals float64, and a row's bits do not depend
on tile, ring or neighbours.

The interpreter has no multicast: two blocks that share weights run in the tests marked `gpu` alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import Inputs, Product, matmul, unsupported
from pallas_kernels.matmul.shapes import SHAPES, Shape, make_inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_matmul import (
    assert_close,
    ground_truth,
    implementations,
    near_ties,
    run,
    take,
)

# Small enough for the interpreter.
SMALL = {
    "one step, one row tile": Shape(128, 64, (64, 64), swiglu=True),
    "a depth of odd steps": Shape(128, 192, (192, 192), swiglu=True),
    "more steps than stages, several column tiles": Shape(128, 640, (320, 320), swiglu=True),
    "two row tiles of 224 columns": Shape(256, 128, (224, 224), swiglu=True),
    "two row tiles of 96 columns": Shape(256, 192, (96, 96), swiglu=True),
}
MANY_ROWS = [name for name, shape in SHAPES.items() if shape.rows > 64]


def kernel(inputs: Inputs, **tuning: int) -> np.ndarray:
    """The kernel itself, which takes more rows than are measured to be faster than cuBLAS's."""
    from pallas_kernels.matmul.mosaic_gpu import many_rows_swiglu

    with interpreted():
        out = many_rows_swiglu.swiglu(
            inputs,
            tuning=many_rows_swiglu.Tuning(**tuning) if tuning else None,
        )
    return np.asarray(out).astype(np.float32)


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs, implementation), ground_truth(inputs))


@needs_mosaic
@pytest.mark.parametrize(
    ("depth", "width", "tile", "stages"),
    [(64, 64, 64, 4), (256, 192, 96, 3), (640, 256, 128, 2), (384, 128, 64, 5)],
)
def test_one_pass_has_the_bits_of_two(depth: int, width: int, tile: int, stages: int) -> None:
    """One step alone, more steps than stages, tiles of either swizzle."""
    shape = Shape(128, depth, (width, width), swiglu=True)
    inputs = near_ties(shape, seed=tile, step=64) if depth > 64 else make_inputs(shape, seed=tile)
    inputs = replace(inputs, out_dtype=jnp.dtype("bfloat16"))
    expected = kernel(inputs, tile=tile, stages=2)
    assert np.abs(expected).max() > 0
    np.testing.assert_array_equal(kernel(inputs, tile=tile, stages=stages, passes=1), expected)


@needs_mosaic
@pytest.mark.parametrize("rows", [384, 512])
def test_more_row_tiles_than_are_in_use(rows: int) -> None:
    shape = Shape(rows, 128, (64, 64), swiglu=True)
    inputs = make_inputs(shape, seed=rows)
    assert_close(shape, kernel(inputs), ground_truth(inputs))


@needs_mosaic
def test_gates_far_from_zero() -> None:
    """silu of -120 is 0 though exp(120) is infinite in float32, of 120 it is 120."""
    gates = np.repeat([-120.0, -30.0, 0.0, 30.0, 120.0], [24, 24, 32, 24, 24])
    x = np.zeros((128, 64), np.float32)
    x[:, 0] = gates
    weight = np.zeros((64, 64), np.float32)
    weight[0] = 1.0
    weights = (jnp.asarray(weight, jnp.bfloat16),) * 2
    inputs = Inputs(x=jnp.asarray(x, jnp.bfloat16), weights=weights, swiglu=True)
    expected = np.repeat((gates / (1 + np.exp(-gates)) * gates)[:, None], 64, axis=1)
    np.testing.assert_allclose(kernel(inputs), expected, rtol=2 * 2.0**-8, atol=1e-40)


@needs_mosaic
def test_bits_do_not_depend_on_tile_ring_or_neighbours() -> None:
    """Cancelling sums tell orders of summation apart (test_matmul.py shows that they can)."""
    inputs = near_ties(Shape(256, 384, (192, 192), swiglu=True), seed=3, step=64)
    inputs = replace(inputs, out_dtype=jnp.dtype("bfloat16"))
    order = np.random.default_rng(0).permutation(256).tolist()
    expected = run(inputs)
    np.testing.assert_array_equal(run(take(inputs, order)), expected[order])
    for tile, stages in ((192, 2), (96, 3)):
        np.testing.assert_array_equal(
            kernel(take(inputs, slice(128)), tile=tile, stages=stages), expected[:128]
        )


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "tuning"),
    [(128, (128, 4, 2, 1)), (256, (224, 5, 2)), (384, (128, 7, 1)), (512, (224, 5, 2))],
)
def test_llamas_gate_and_up_fill_the_gpu(rows: int, tuning: tuple[int, ...]) -> None:
    """One block for 112 of 132 SMs, for 128 of them, then in three waves and in two."""
    from pallas_kernels.matmul.mosaic_gpu import many_rows_swiglu as many

    assert many.choose_tuning(rows, 14336) == many.Tuning(*tuning)
    chosen, deeper = (many.Tuning(tuning[0], tuning[1] + i, *tuning[2:]) for i in (0, 1))
    assert chosen.smem_bytes <= many.MAX_SMEM < deeper.smem_bytes


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "width", "tuning"),
    [
        (128, 12288, (128, 4, 2, 1)),  # 96 blocks
        (128, 9728, (128, 4, 2, 1)),  # 76: no other tile has one wave
        (128, 8192, (64, 7, 2, 1)),  # 128 blocks; tiles of 128 columns leave 64
        (128, 320, (64, 7, 1, 1)),  # five: the last one has none beside it
        (128, 28672, (224, 5, 2, 2)),  # wider than two accumulators can be
        (256, 12288, (192, 5, 2, 2)),
    ],
)
def test_one_row_tile_shares_x_in_one_pass_where_it_can(
    rows: int, width: int, tuning: tuple[int, ...]
) -> None:
    from pallas_kernels.matmul.mosaic_gpu import many_rows_swiglu as many

    chosen = many.choose_tuning(rows, width)
    assert chosen is not None and chosen == many.Tuning(*tuning)
    assert chosen.smem_bytes <= many.MAX_SMEM


ROWS = "expected at most 64 rows, or a multiple of 128 up to 256, of gate and up, got"
ALONE = (
    "expected gate and up as they are and nothing beside them for 128 rows, got "
    "a residual, a norm or transposed weights"
)
DIVISIBLE = (
    "expected a depth that is a multiple of 64 and a width that one of "
    "(224, 192, 160, 128, 96, 64) divides, got"
)
UNSUPPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "between the two kernels": (f"{ROWS} 72", {"rows": 72}),
    "between two row tiles": (f"{ROWS} 192", {"rows": 192}),
    "more than are measured": (f"{ROWS} 384", {"rows": 384}),
    "a residual": (ALONE, {"residual": True}),
    "transposed weights": (ALONE, {"transposed": True}),
    "rows with their squares": (ALONE, {"normed": True}),
    "a gain": (ALONE, {"norms": True}),
    "a depth between two steps": (f"{DIVISIBLE} (96, 64)", {"depth": 96}),
    "a width between two tiles": (f"{DIVISIBLE} (128, 80)", {"width": 80}),
    "more blocks than SMs (MiMo-7B)": (
        "expected tiles that give each of 132 SMs one block at most, got 344 of 128 x 64",
        {"rows": 256, "width": 11008},
    ),
    "float32 rows": (
        "expected bfloat16 operands and result, got float32, bfloat16 and bfloat16",
        {"dtype": jnp.float32},
    ),
    "a float32 result": (
        "expected bfloat16 operands and result, got bfloat16, bfloat16 and float32",
        {"out_dtype": jnp.float32},
    ),
    "two products": (
        "expected 1 to 8 rows, or a multiple of 8 up to 64, got 128",
        {"swiglu": False},
    ),
}


@needs_mosaic
@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_the_kernel_cannot_multiply_it_says(name: str) -> None:
    reason, change = UNSUPPORTED[name]
    options = {
        "rows": 128,
        "depth": 128,
        "width": 64,
        "dtype": jnp.bfloat16,
        "swiglu": True,
    } | change
    rows, depth, width, dtype = (options.pop(key) for key in ("rows", "depth", "width", "dtype"))
    x, weight = (
        jax.ShapeDtypeStruct((rows, depth), dtype),
        jax.ShapeDtypeStruct((depth, width), jnp.bfloat16),
    )
    assert unsupported(Product(x, (weight, weight), **options)) == reason


@needs_mosaic
def test_the_public_op_refuses_what_has_a_norm_or_a_residual() -> None:
    x, weight = jnp.zeros((128, 128), jnp.bfloat16), jnp.zeros((128, 64), jnp.bfloat16)
    besides: tuple[dict[str, Any], ...] = (
        {"squares": jnp.zeros((64, 128))},
        {"gain": weight[0]},
        {"residual": x[:, :64]},
    )
    for beside in besides:
        with interpreted(), pytest.raises(ValueError) as error:
            inputs = Inputs(x=x, weights=(weight, weight), swiglu=True, **beside)
            matmul(inputs, implementation="mosaic_gpu")
        assert str(error.value) == f"matmul, implementation 'mosaic_gpu': {ALONE}"


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", MANY_ROWS)
def test_bits_on_the_gpu_do_not_depend_on_neighbours(name: str) -> None:
    inputs = replace(near_ties(SHAPES[name], seed=5), out_dtype=jnp.dtype("bfloat16"))
    expected = run(inputs)
    np.testing.assert_array_equal(run(inputs), expected, err_msg="twice")
    order = np.random.default_rng(0).permutation(SHAPES[name].rows).tolist()
    np.testing.assert_array_equal(
        run(take(inputs, order)), expected[order], err_msg="in another order"
    )
    np.testing.assert_array_equal(
        run(take(inputs, slice(-128, None))), expected[-128:], err_msg="the last 128 rows"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2])
def test_one_pass_and_a_shared_x_change_no_bits_on_the_gpu(cluster: int) -> None:
    inputs = near_ties(SHAPES["llama-3-8b gate_up rows 128"], seed=5)
    inputs = replace(inputs, out_dtype=jnp.dtype("bfloat16"))
    np.testing.assert_array_equal(
        kernel(inputs, tile=128, stages=4, cluster=cluster, passes=1),
        kernel(inputs, tile=128, stages=7),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64_on_the_gpu(name: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs), ground_truth(inputs))
