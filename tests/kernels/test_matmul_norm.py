"""The RMS norm between two products, shared by both: the result is the norm's, and a row's bits do
not depend on its neighbours."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.matmul import Inputs, Product, matmul, shares_norm, unsupported
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_matmul import implementations

EPS = 1e-5


@dataclass(frozen=True)
class Pair:
    """residual + x [rows, depth] @ [depth, width], normed, then into products of `widths`."""

    rows: int
    depth: int
    width: int
    widths: tuple[int, ...]
    swiglu: bool = False


SMALL = {
    "one row": Pair(1, 128, 128, (64,)),
    "three rows": Pair(3, 256, 192, (64, 128)),
    "eight rows": Pair(8, 128, 128, (64, 64), swiglu=True),
    "three warpgroups, which share the memory of their sums": Pair(3, 192, 192, (64,)),
    "more pieces than one wgmma has columns": Pair(2, 64, 1088, (64,)),
    "sixteen rows": Pair(16, 128, 128, (64, 64), swiglu=True),
}
REAL = {
    f"{name} rows {rows}": Pair(rows, *pair)
    for rows in (1, 4, 8, 16, 64)
    for name, pair in {
        "llama-3-8b o, gate_up": (4096, 4096, (14336, 14336), True),
        "llama-3-8b down, qkv": (14336, 4096, (6144,)),
        "smollm2 o, gate_up": (576, 576, (1536, 1536), True),
        "smollm2 down, qkv": (1536, 576, (960,)),
    }.items()
}


def make_inputs(pair: Pair, seed: int) -> dict[str, Any]:
    """Rows of the stream differ in size by up to 100, as a model's do."""
    keys = iter(jax.random.split(jax.random.key(seed), 4 + len(pair.widths)))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)  # noqa: E731
    sizes = jnp.logspace(-1, 1, pair.rows)[:, None]
    inputs = {
        "x": normal(pair.rows, pair.depth) * sizes,
        "weight": normal(pair.depth, pair.width) / pair.depth**0.5,
        "residual": normal(pair.rows, pair.width) * sizes,
        "gain": 1 + normal(pair.width) / 2,
        "weights": tuple(normal(pair.width, w) / pair.width**0.5 for w in pair.widths),
    }
    return jax.tree.map(lambda a: a.astype(jnp.bfloat16), inputs)


def run(
    pair: Pair, inputs: dict[str, Any], implementation: str = "mosaic_gpu"
) -> tuple[np.ndarray, np.ndarray]:
    """The stream [rows, width] and the second product, widened without loss."""
    with interpreted() if implementation == "mosaic_gpu" else contextlib.nullcontext():
        stream, scaled, squares = matmul(first_product(inputs), implementation=implementation)
        second = Inputs(
            x=scaled,
            weights=inputs["weights"],
            squares=squares,
            bias=inputs.get("bias"),
            eps=EPS,
            swiglu=pair.swiglu,
        )
        result = matmul(second, implementation=implementation)
    return np.asarray(stream).astype(np.float32), np.asarray(result).astype(np.float32)


def first_product(inputs: dict[str, Any]) -> Inputs:
    return Inputs(
        x=inputs["x"],
        weights=(inputs["weight"],),
        residual=inputs["residual"],
        gain=inputs["gain"],
    )


def ground_truth(pair: Pair, inputs: dict[str, Any], stream: np.ndarray) -> np.ndarray:
    """float64, from the stream as it was rounded."""
    wide = stream.astype(np.float64)
    normed = (
        wide
        / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + EPS)
        * np.asarray(inputs["gain"]).astype(np.float64)
    )
    results = [normed @ np.asarray(w).astype(np.float64) for w in inputs["weights"]]
    return (
        results[0] / (1 + np.exp(-results[0])) * results[1]
        if pair.swiglu
        else np.concatenate(results, axis=1)
    )


def errors(result: Any, expected: np.ndarray) -> np.ndarray:
    """In units of a value's size plus the root mean square of its row."""
    size = np.abs(expected) + np.sqrt(np.square(expected).mean(axis=1, keepdims=True))
    return np.abs(np.asarray(result, np.float64) - expected) / size


def assert_right(pair: Pair, inputs: dict[str, Any], implementation: str) -> None:
    stream, result = run(pair, inputs, implementation)
    alone = matmul(replace(first_product(inputs), gain=None))
    # Its sums may be taken in another order: one bfloat16 ulp of the product and one of the sum
    # with the residual.
    np.testing.assert_allclose(
        stream,
        np.asarray(alone).astype(np.float32),
        rtol=2 * 2.0**-7,
        atol=2.0**-7 * np.abs(stream).max(),
    )
    expected = ground_truth(pair, inputs, stream)
    error = errors(result, expected)
    # x times the gain is rounded to 2^-9, the result likewise; SwiGLU rounds three values more
    # (test_matmul's tolerances).
    assert error.max() <= (6 if pair.swiglu else 3) * 2.0**-8 and np.median(error) <= 2.0**-8, (
        error.max(),
        np.median(error),
    )


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_the_norm_and_the_products(name: str, implementation: str) -> None:
    assert_right(SMALL[name], make_inputs(SMALL[name], seed=len(name)), implementation)


@implementations
def test_a_bias_follows_the_norm_that_two_products_share(implementation: str) -> None:
    pair = next(pair for pair in SMALL.values() if not pair.swiglu and pair.rows > 1)
    inputs = make_inputs(pair, seed=2)
    bias = 1 + jax.random.normal(jax.random.key(3), (sum(pair.widths),), jnp.bfloat16)
    stream, result = run(pair, inputs | {"bias": bias}, implementation)
    expected = ground_truth(pair, inputs, stream) + np.asarray(bias).astype(np.float64)
    assert errors(result, expected).max() <= 3 * 2.0**-8


def bits_of_fewer_rows_are_the_same(pair: Pair, counts: tuple[int, ...]) -> None:
    inputs = make_inputs(pair, seed=1)
    whole = run(pair, inputs)
    for count in counts:
        some = run(pair, inputs | {name: inputs[name][:count] for name in ("x", "residual")})
        for got, expected in zip(some, whole, strict=True):
            np.testing.assert_array_equal(
                got, expected[:count], err_msg=f"{count} of {pair.rows} rows"
            )


@needs_mosaic
def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    bits_of_fewer_rows_are_the_same(Pair(3, 128, 128, (64,)), (1, 2))


def test_the_width_of_the_rows_decides_whether_a_norm_is_shared() -> None:
    for rows in (1, 8, 16, 64):
        assert shares_norm(rows, 576) and shares_norm(rows, 1024) and not shares_norm(rows, 2048)
    assert not shares_norm(65, 576)


@needs_mosaic
def test_a_gain_goes_with_one_weight() -> None:
    x, w = (
        jax.ShapeDtypeStruct((4, 128), jnp.bfloat16),
        jax.ShapeDtypeStruct((128, 64), jnp.bfloat16),
    )
    assert "expected one weight and a bfloat16 result without swiglu" in str(
        unsupported(Product(x, (w, w), norms=True))
    )
    assert unsupported(Product(x, (w,), norms=True)) is None


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (
            r"squares: expected \[pieces, 4 rows or more\], got \(2, 3\)",
            {"squares": jnp.zeros((2, 3))},
        ),
        (r"gain: expected \(64,\), got \(128,\)", {"gain": jnp.zeros(128, jnp.bfloat16)}),
    ],
)
def test_what_does_not_fit_is_an_error(message: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=message):
        x, w = jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros((128, 64), jnp.bfloat16)
        matmul(Inputs(x=x, weights=(w,), **arguments))


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *REAL])
def test_equals_the_norm_and_the_products_on_the_gpu(name: str) -> None:
    pair = (SMALL | REAL)[name]
    assert_right(pair, make_inputs(pair, seed=len(name)), "mosaic_gpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in REAL if name.endswith("rows 64")])
def test_bits_on_the_gpu_do_not_depend_on_neighbours(name: str) -> None:
    bits_of_fewer_rows_are_the_same(REAL[name], (1, 2, 4, 6, 8, 16, 32, 56))
