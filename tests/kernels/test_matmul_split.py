"""Products whose depth a cluster of CTAs shares: the same sums, of which a row's bits do not depend
on its neighbours."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pallas_kernels.matmul import Inputs, plan
from pallas_kernels.matmul.shapes import SHAPES, Shape, make_inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_matmul import (
    assert_bits_are_the_rows_own,
    assert_close,
    ground_truth,
    kernel,
    near_ties,
    run,
    take,
)
from tests.kernels.test_matmul_norm import EPS, Pair, first_product
from tests.kernels.test_matmul_norm import ground_truth as normed_truth
from tests.kernels.test_matmul_norm import make_inputs as make_pair
from tests.support.slow import slow

pytestmark = needs_mosaic
DEEP = 2048  # of which a ring does not hold a tile: the kernel's own choice is to split it

CASES = {
    "one row": Shape(1, 768, (64,)),
    "eight rows, several weights": Shape(8, 768, (64, 128)),
    "residual": Shape(3, 768, (128,), residual=True),
    "swiglu and residual": Shape(3, 768, (64, 64), swiglu=True, residual=True),
    "transposed, float32": Shape(5, 768, (128,), transposed=True, out_dtype="float32"),
}


@pytest.mark.parametrize(
    ("name", "split", "warpgroups"),
    [
        case if (i + j) % 2 else slow(*case)  # each name and each split
        for i, name in enumerate(CASES)
        for j, case in enumerate(((name, 2, 2), (name, 4, 1)))
    ],
)
def test_equals_float64(name: str, split: int, warpgroups: int) -> None:
    shape = CASES[name]
    inputs = make_inputs(shape, seed=split)
    got = kernel(inputs, tile_k=64, stripe_k=64, warpgroups=warpgroups, stages=2, split=split)
    assert_close(shape, got, ground_truth(inputs))


@pytest.mark.parametrize("split", [1, 2])
def test_an_input_that_streams_gives_the_same_bits(
    split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pallas_kernels.matmul import mosaic_gpu

    inputs = near_ties(Shape(3, 1024, (128,)), seed=2, step=128)
    stays = kernel(inputs, stages=2, split=split)
    monkeypatch.setattr(plan, "RESIDENT_BYTES", 0)
    # The limit is read while tracing.
    mosaic_gpu.matmul.clear_cache()  # type: ignore[attr-defined]
    try:
        np.testing.assert_array_equal(kernel(inputs, stages=2, split=split), stays)
    finally:
        mosaic_gpu.matmul.clear_cache()  # type: ignore[attr-defined]


def test_a_norm_before_and_one_after() -> None:
    """The first of the cluster's CTAs alone has all of a sum, whose squares and scale it makes."""
    from pallas_kernels.matmul import mosaic_gpu

    pair = Pair(3, 512, 512, (64,))
    inputs = make_pair(pair, seed=1)
    tuning = plan.Tuning(128, 128, 2, 2, split=2)
    with interpreted():
        stream, scaled, squares = mosaic_gpu.matmul(first_product(inputs), tuning=tuning)
        second = Inputs(x=scaled, weights=inputs["weights"], squares=squares, eps=EPS)
        result = mosaic_gpu.matmul(second, tuning=tuning)
    rows = np.asarray(stream).astype(np.float32)
    x, weight, residual = (
        np.asarray(inputs[name]).astype(np.float64) for name in ("x", "weight", "residual")
    )
    np.testing.assert_allclose(
        rows, x @ weight + residual, rtol=2 * 2.0**-7, atol=2.0**-7 * np.abs(rows).max()
    )
    expected = normed_truth(pair, inputs, rows)
    # test_matmul_norm's tolerances
    error = np.abs(np.asarray(result).astype(np.float32) - expected) / (
        np.abs(expected) + np.sqrt(np.square(expected).mean())
    )
    assert error.max() <= 3 * 2.0**-8, error.max()


def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    """In the kernel's own choice, from 1 to 64 rows."""
    inputs = near_ties(Shape(64, DEEP, (128,)), seed=3, step=128)
    assert_bits_are_the_rows_own(inputs, (1, 3, 8, 16, 24))


@pytest.mark.parametrize("rows", [4, 16])
def test_the_near_ties_tell_a_split_depth_apart(rows: int) -> None:
    """So the test before can fail; and one that is not split has other bits than the kernel's own
    choice."""
    inputs = near_ties(Shape(rows, DEEP, (64,)), seed=3, step=128)
    assert (run(inputs) != kernel(inputs, split=1)).any()
    np.testing.assert_array_equal(run(inputs), kernel(inputs, split=2))


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("name", ["llama-3-8b o rows 64", "llama-3-8b down rows 64"])
def test_bits_on_the_gpu_are_the_rows_own_whatever_loads_and_calls_first(
    name: str, split: int
) -> None:
    inputs = replace(near_ties(SHAPES[name], seed=5), residual=None)  # it would hide last bits
    whole = kernel(inputs, stages=2, split=split)
    for rows in (64, 24, 16, 8, 4, 1):
        for early in (False, True):
            got = kernel(
                take(inputs, slice(rows)),
                stages=2,
                split=split,
                weights_first=early,
                launches_next=early,
            )
            np.testing.assert_array_equal(got, whole[:rows], err_msg=f"{rows} rows, early {early}")
