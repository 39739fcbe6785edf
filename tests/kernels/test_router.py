"""The router's op: the reference and the kernel take the experts that float64 takes, with its
weights, whatever rows are beside."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import IMPLEMENTATIONS, MAX_ROWS, Inputs, route, unsupported
from pallas_kernels.router.shapes import SHAPES, Shape, bytes_moved, make_inputs
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic

implementations = by_implementation(IMPLEMENTATIONS)
# Logits are sums of bfloat16 products in float32, and Hopper's tensor cores cut off their last
# bits: relative to the largest weight.
TOLERANCE = 2e-4
# Two experts whose scores are nearer than this may change places.
TIE = 1e-4

SMALL = {
    "softmax": Shape(3, 32, 4, 128, "softmax", "bfloat16"),
    "softmax without a bias": Shape(1, 64, 1, 64, "softmax"),
    "sigmoid": Shape(5, 64, 4, 320, "sigmoid", "float32", 1.8),
    "two tiles of rows": Shape(70, 32, 8, 128, "sigmoid", "float32"),
    "128 experts": Shape(2, 128, 4, 64, "softmax", "bfloat16"),
    "8 of 128 experts": Shape(3, 128, 8, 128, "softmax"),
}


def run(inputs: Inputs, implementation: str = "mosaic_gpu") -> tuple[np.ndarray, np.ndarray]:
    with interpreted() if implementation == "mosaic_gpu" else contextlib.nullcontext():
        ids, weights = route(inputs, implementation=implementation)
    return np.asarray(ids)[:, : inputs.top_k], np.asarray(weights)


def assert_routed(inputs: Inputs, ids: np.ndarray, weights: np.ndarray) -> None:
    """Against float64: the ids' scores are the best ones in order, and the weights are theirs."""
    x, router = (np.asarray(a).astype(np.float64) for a in (inputs.x, inputs.router))
    bias = 0.0 if inputs.bias is None else np.asarray(inputs.bias).astype(np.float64)
    logits, top_k = x @ router, inputs.top_k
    softmax = inputs.kind == "softmax"
    scores = logits + bias if softmax else 1 / (1 + np.exp(-logits))
    choice = scores if softmax else scores + bias
    assert ids.shape == weights.shape == (len(x), top_k) and weights.dtype == np.float32
    assert all(len(set(row)) == top_k for row in ids.tolist())
    np.testing.assert_allclose(
        np.take_along_axis(choice, ids, 1), -np.sort(-choice, axis=1)[:, :top_k], atol=TIE
    )
    chosen = np.take_along_axis(scores, ids, 1)
    chosen = np.exp(chosen - chosen[:, :1]) if softmax else chosen
    expected = chosen / chosen.sum(1, keepdims=True) * (1.0 if softmax else inputs.scaling)
    np.testing.assert_allclose(weights, expected, atol=TOLERANCE * expected.max())


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_takes_the_best_and_weighs_them(name: str, implementation: str) -> None:
    inputs = make_inputs(SMALL[name], seed=len(name))
    assert_routed(inputs, *run(inputs, implementation))


@implementations
def test_of_equal_experts_the_first_is_taken(implementation: str) -> None:
    inputs = replace(
        make_inputs(SMALL["softmax"], seed=0),
        router=jnp.zeros((128, 32), jnp.bfloat16),
        bias=None,
    )
    ids, weights = run(inputs, implementation)
    assert ids.tolist() == [[0, 1, 2, 3]] * 3
    np.testing.assert_allclose(weights, 0.25)


@implementations
def test_scores_that_are_not_normed_keep_their_size(implementation: str) -> None:
    inputs = replace(make_inputs(SMALL["sigmoid"], seed=1), normalise=False)
    ids, weights = run(inputs, implementation)
    logits = np.asarray(inputs.x, np.float64) @ np.asarray(inputs.router, np.float64)
    np.testing.assert_allclose(
        weights, 1.8 / (1 + np.exp(-np.take_along_axis(logits, ids, 1))), rtol=1e-4
    )


@implementations
@pytest.mark.parametrize("name", ["softmax", "8 of 128 experts"])
def test_a_softmax_that_is_not_normed_is_over_all_experts(name: str, implementation: str) -> None:
    inputs = replace(make_inputs(SMALL[name], seed=6), normalise=False)
    ids, weights = run(inputs, implementation)
    logits = np.asarray(inputs.x, np.float64) @ np.asarray(inputs.router, np.float64)
    if inputs.bias is not None:
        logits = logits + np.asarray(inputs.bias, np.float64)
    every = np.exp(logits - logits.max(1, keepdims=True))
    every /= every.sum(1, keepdims=True)
    np.testing.assert_allclose(weights, np.take_along_axis(every, ids, 1), rtol=TOLERANCE)
    assert (weights.sum(1) < 0.9).all()  # of the chosen ones alone it would be 1
    same_ids, _ = run(replace(inputs, normalise=True), implementation)
    np.testing.assert_array_equal(ids, same_ids)


@needs_mosaic
def test_a_rows_choice_does_not_depend_on_its_neighbours() -> None:
    inputs = make_inputs(SMALL["two tiles of rows"], seed=2)
    kept = (
        np.arange(128) % 64 == 0
    )  # one term a step: the CPU's products choose their order by the rows
    inputs = replace(inputs, x=jnp.where(kept, inputs.x, 0))
    ids, weights = run(inputs)
    for rows in ([69], [3, 66, 1]):
        some_ids, some_weights = run(replace(inputs, x=inputs.x[np.asarray(rows)]))
        np.testing.assert_array_equal(some_ids, ids[rows])
        np.testing.assert_array_equal(some_weights, weights[rows])


ARRAYS: dict[str, Any] = {
    "x": jax.ShapeDtypeStruct((4, 128), jnp.bfloat16),
    "router": jax.ShapeDtypeStruct((128, 32), jnp.bfloat16),
}
FITS = Inputs(**ARRAYS, top_k=4, kind="softmax")
DOES_NOT_FIT = {
    r"router: expected \[128, experts\] for x \(4, 128\), got \(64, 32\)": {
        "router": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    },
    r"bias: expected \(32,\), got \(64,\)": {"bias": jax.ShapeDtypeStruct((64,), jnp.float32)},
    "kind: expected one of softmax, sigmoid, got 'relu'": {"kind": "relu"},
    "top_k: expected 1 to 32, got 33": {"top_k": 33},
    "implementation: expected one of reference, mosaic_gpu, got 'fast'": {"implementation": "fast"},
}


@pytest.mark.parametrize("message", DOES_NOT_FIT)
def test_what_does_not_fit_is_an_error(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(route, FITS, DOES_NOT_FIT[message])


@needs_mosaic
def test_what_the_kernel_cannot_route_it_says() -> None:
    assert unsupported(4, (128, 32), 4, jnp.bfloat16) is None
    assert unsupported(4, (128, 32), 4, jnp.float32) == "expected bfloat16, got float32"
    assert (
        unsupported(MAX_ROWS + 1, (128, 32), 4, jnp.bfloat16) == "expected 1 to 256 rows, got 257"
    )
    expected = "expected 32, 64, 128 experts and a hidden size that is a multiple of 64, got"
    assert unsupported(4, (128, 256), 4, jnp.bfloat16) == f"{expected} 256 and 128"
    assert unsupported(4, (96, 32), 4, jnp.bfloat16) == f"{expected} 32 and 96"
    assert unsupported(4, (128, 32), 9, jnp.bfloat16) == "expected a top_k of at most 8, got 9"


def test_the_kernel_needs_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one here")
    with pytest.raises(
        ValueError, match="^router, implementation 'mosaic_gpu': expected an NVIDIA GPU, got cpu$"
    ):
        route(FITS, implementation="mosaic_gpu")


def test_bytes_are_the_router_the_rows_and_the_choice() -> None:
    assert bytes_moved(Shape(3, 32, 4, 128, "softmax")) == 2 * 128 * 35 + 8 * 12


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_routes_at_real_sizes(name: str) -> None:
    inputs = make_inputs(SHAPES[name], seed=4)
    ids, weights = run(inputs)
    assert_routed(inputs, ids, weights)
    for rows in {1, min(4, len(ids)), min(64, len(ids))}:
        some_ids, some_weights = run(replace(inputs, x=inputs.x[:rows]))
        np.testing.assert_array_equal(some_ids, ids[:rows])
        np.testing.assert_array_equal(some_weights, weights[:rows])
