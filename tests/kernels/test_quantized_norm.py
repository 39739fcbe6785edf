"""The RMS norm between two products of quantised weights, shared by both: the result is the norm's,
and a row's bits do not depend on its neighbours."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import fp8_matmul as fp8
from pallas_kernels import int4_matmul as int4
from pallas_kernels.matmul import Inputs
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_fp8_matmul import TOLERANCE, bits, dequantised, fp8_weight, quantised
from tests.kernels.test_int4_matmul import int4_weight
from tests.kernels.test_matmul_norm import EPS, Pair, errors
from tests.kernels.test_matmul_norm import REAL as PLAIN
from tests.support.slow import slow_unless

FORMS = ("fp8", "int4")
SMALL = {
    "one row": Pair(1, 256, 1024, (64,)),
    "two CTAs a tile before": Pair(3, 4096, 1024, (64,)),
    "two CTAs a tile after": Pair(3, 256, 4096, (64,)),
    "eight rows, gate and up": Pair(8, 256, 1024, (64, 64), swiglu=True),
    "sixteen rows": Pair(16, 256, 1024, (64, 64), swiglu=True),
    "40 rows, padded to 64": Pair(40, 256, 1024, (64,)),
}
# Pieces that are never written: int4 alone takes them.
INT4 = {
    "fewer pieces than a wgmma has columns": Pair(3, 128, 576, (64,)),
    "pieces past two wgmmas": Pair(3, 64, 2880, (64,)),
}
REAL = {name: pair for name, pair in PLAIN.items() if name.startswith("llama-3-8b")}


@dataclass(frozen=True)
class Case:
    """The first product, the weights of the second, and both sides' weights in float64."""

    first: Inputs[Any]
    weights: tuple[Any, ...]
    arrays: tuple[np.ndarray, ...]

    def take(self, rows: int) -> Case:
        return replace(self, first=self.first.take_rows(0, rows))


def make_case(pair: Pair, form: str, seed: int = 0) -> Case:
    """Rows of the stream differ in size by up to 100, as a model's do."""
    keys = iter(jax.random.split(jax.random.key(seed), 3))
    sizes = jnp.logspace(-1, 1, pair.rows)[:, None]

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.float32)

    def weight(seed: int, width: int, depth: int) -> tuple[Any, np.ndarray]:
        if form == "fp8":
            made = fp8_weight(seed, width, depth, "channel")
            return made, dequantised(made).T
        group = 64 if depth % 128 else 128
        return int4_weight(seed, width, depth, group=group, zeros=seed % 2 == 1)

    first, _ = weight(seed, pair.width, pair.depth)
    made = [weight(seed + 1 + 2 * i, width, pair.width) for i, width in enumerate(pair.widths)]
    inputs = Inputs(
        x=(normal(pair.rows, pair.depth) * sizes).astype(jnp.bfloat16),
        weights=(first,),
        residual=(normal(pair.rows, pair.width) * sizes).astype(jnp.bfloat16),
        gain=(1 + normal(pair.width) / 2).astype(jnp.bfloat16),
    )
    return Case(inputs, tuple(w for w, _ in made), tuple(array for _, array in made))


def multiply(form: str, inputs: Inputs[Any], largest: jax.Array | None = None) -> Any:
    if form == "int4":
        return int4.int4_matmul(inputs, implementation="mosaic_gpu")
    return fp8.fp8_matmul(inputs, largest=largest, implementation="mosaic_gpu")


def run(
    pair: Pair, case: Case, form: str, out_dtype: str = "bfloat16"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The stream, the rows times the gain, and the second product."""
    largest = None
    with interpreted():
        if form == "fp8":
            stream, scaled, squares, largest = fp8.product_for_norm(
                case.first, largest=None, implementation="mosaic_gpu"
            )
        else:
            stream, scaled, squares = multiply(form, case.first)
        second = Inputs(
            x=scaled,
            weights=case.weights,
            squares=squares,
            eps=EPS,
            swiglu=pair.swiglu,
            out_dtype=jnp.dtype(out_dtype),
        )
        return stream, scaled, multiply(form, second, largest)


def ground_truth(pair: Pair, case: Case, form: str, stream: Any, scaled: Any) -> np.ndarray:
    """float64, from the stream and the rows times the gain as they were rounded."""
    wide, rows = np.asarray(stream, np.float64), np.asarray(scaled, np.float64)
    gain = np.asarray(case.first.gain, np.float64)
    np.testing.assert_allclose(rows, wide * gain, rtol=2.0**-8)
    if form == "fp8":
        rows = quantised(scaled, case.weights[0])
    normed = rows / np.sqrt(np.square(wide).mean(axis=1, keepdims=True) + EPS)
    results = [normed @ array for array in case.arrays]
    if pair.swiglu:
        gate, up = results
        return gate / (1 + np.exp(np.minimum(-gate, 700.0))) * up
    return np.concatenate(results, axis=1)


def assert_right(
    pair: Pair, form: str, *, out_dtype: str = "bfloat16", largest_error: float | None = None
) -> None:
    if form == "fp8":
        assert fp8.shares_norm(pair.rows, pair.width, ())
    else:
        assert int4.shares_norm(pair.rows, pair.width)
    case = make_case(pair, form)
    stream, scaled, got = run(pair, case, form, out_dtype)
    with interpreted():
        alone = multiply(form, replace(case.first, gain=None))
    np.testing.assert_array_equal(bits(stream), bits(alone))
    expected = ground_truth(pair, case, form, stream, scaled)
    error = errors(got, expected)
    largest_error = largest_error or TOLERANCE["swiglu" if pair.swiglu else out_dtype]
    assert error.max() <= largest_error, error.max()
    assert np.sqrt(np.square(error).mean()) <= TOLERANCE["bfloat16"]


def assert_same_bits(pair: Pair, form: str, counts: tuple[int, ...]) -> None:
    case = make_case(pair, form, seed=1)
    whole = run(pair, case, form)
    for count in counts:
        for got, expected in zip(run(pair, case.take(count), form), whole, strict=True):
            message = f"{count} of {pair.rows} rows"
            np.testing.assert_array_equal(bits(got), bits(expected[:count]), err_msg=message)


@needs_mosaic
@pytest.mark.parametrize(
    ("name", "form"),
    slow_unless(
        [
            ("one row", "int4"),
            ("two CTAs a tile before", "int4"),
            ("two CTAs a tile after", "fp8"),
            ("eight rows, gate and up", "fp8"),
            ("sixteen rows", "int4"),
            ("40 rows, padded to 64", "fp8"),
        ],
        itertools.product(SMALL, FORMS),
    ),
)
def test_equals_the_norm_and_the_products(name: str, form: str) -> None:
    assert_right(SMALL[name], form)


@needs_mosaic
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_norm_and_a_float32_product(form: str) -> None:
    assert_right(Pair(3, 256, 1024, (64,)), form, out_dtype="float32")


@needs_mosaic
@pytest.mark.parametrize("name", INT4)
def test_int4_equals_the_norm_and_the_products(name: str) -> None:
    assert_right(INT4[name], "int4")


@needs_mosaic
@pytest.mark.parametrize("rows", [5, 16])
def test_a_layers_products_have_the_bits_of_products_that_look_for_magnitudes(rows: int) -> None:
    """gate and up, down and qkv: what each product finds for the next one changes no bits."""
    o = make_case(Pair(rows, 256, 1024, (1024, 1024), swiglu=True), "fp8")
    down, qkv = (fp8_weight(seed, width, 1024, "channel") for seed, width in ((7, 1024), (8, 64)))
    kernel: Any = "mosaic_gpu"
    with interpreted():
        before = fp8.product_for_norm(o.first, largest=None, implementation=kernel)
        assert (before.largest is not None) == (rows <= 8)
        inner = Inputs(
            x=before.scaled, weights=o.weights, squares=before.squares, eps=EPS, swiglu=True
        )
        x, largest = fp8.measured_swiglu(inner, largest=before.largest, implementation=kernel)
        alone = fp8.fp8_matmul(inner, implementation=kernel)
        np.testing.assert_array_equal(bits(x), bits(alone))
        end = Inputs(x=x, weights=(down,), residual=before.out, gain=o.first.gain)
        known = largest if fp8.takes_largest(rows, down, kernel) else None
        assert (known is not None) == (rows <= 8)
        made, expected = (
            fp8.product_for_norm(end, largest=found, implementation=kernel)
            for found in (known, None)
        )
        for got, wanted in zip(made[:3], expected[:3], strict=True):
            np.testing.assert_array_equal(bits(got), bits(wanted))
        last = Inputs(x=made.scaled, weights=(qkv,), squares=made.squares, eps=EPS)
        got = fp8.fp8_matmul(last, largest=made.largest, implementation=kernel)
        np.testing.assert_array_equal(bits(got), bits(fp8.fp8_matmul(last, implementation=kernel)))


@needs_mosaic
@pytest.mark.parametrize("form", FORMS)
def test_a_rows_bits_do_not_depend_on_its_neighbours(form: str) -> None:
    assert_same_bits(Pair(24, 256, 1024, (64,)), form, (1, 3, 8, 16))


@needs_mosaic
def test_which_products_share_a_norm() -> None:
    token, block = fp8_weight(0, 64, 64, "channel"), fp8_weight(0, 64, 64, "block")
    for rows in (1, 8, 64):
        assert fp8.shares_norm(rows, 4096, (token, token)) and int4.shares_norm(rows, 576)
        assert not fp8.shares_norm(rows, 4096, (token, block))
        assert not fp8.shares_norm(rows, 576, (token,)) and not int4.shares_norm(rows, 16384)
    assert not fp8.shares_norm(65, 4096, (token,)) and not int4.shares_norm(65, 4096)


@needs_mosaic
def test_a_product_that_no_kernel_makes_is_refused() -> None:
    case = make_case(Pair(2, 256, 1024, (64,)), "fp8")
    with pytest.raises(ValueError, match="expected a kernel, a gain and at most 64 rows"):
        fp8.product_for_norm(case.first, largest=None, implementation="reference")
    with interpreted(), pytest.raises(ValueError, match="gain False"):
        alone = replace(case.first, gain=None)
        fp8.product_for_norm(alone, largest=None, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="expected no gain or transposed weights"):
        fp8.fp8_matmul(case.first)


@needs_mosaic
@pytest.mark.parametrize(("rows", "depth"), [(72, 1024), (4, 1280)])
def test_squares_that_no_kernel_takes_are_refused(rows: int, depth: int) -> None:
    inputs = Inputs(
        x=jnp.ones((rows, depth), jnp.bfloat16),
        weights=(fp8_weight(0, 64, depth, "channel"),),
        squares=jnp.ones((depth // 16, rows)),
    )
    message = f"squares of at most 64 rows of a multiple of 1024 values, got {rows} of {depth}"
    with interpreted(), pytest.raises(ValueError, match=message):
        fp8.fp8_matmul(inputs, implementation="mosaic_gpu")
    norm = fp8.RowNorm(jnp.ones((depth,), jnp.bfloat16), 1e-5)
    with pytest.raises(ValueError, match="squares: expected none with a norm"):
        fp8.fp8_matmul(inputs, norm=norm)


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu": True}, "expected a bfloat16 result without swiglu where it gets a gain"),
        ({"out_dtype": jnp.float32}, "expected a bfloat16 result without swiglu where it gets"),
        ({"rows": 72}, "expected no norm with many rows, got one"),
        ({"rows": 64}, None),
        ({}, None),
    ],
)
def test_which_int4_products_prepare_a_norm(change: dict[str, Any], message: str | None) -> None:
    weight, _ = int4_weight(0, 64, 128, group=128, zeros=False)
    rows, swiglu = change.get("rows", 8), change.get("swiglu", False)
    x = jax.ShapeDtypeStruct((rows, 128), jnp.bfloat16)
    product = int4.Product(
        x,
        (weight,) * (1 + swiglu),
        norms=True,
        swiglu=swiglu,
        out_dtype=change.get("out_dtype", jnp.bfloat16),
    )
    reason = int4.unsupported(product)
    assert (reason is None) if message is None else message in str(reason)


@pytest.mark.parametrize("form", ["block", "static"])
def test_squares_go_with_scales_of_tokens(form: str) -> None:
    inputs = Inputs(
        x=jnp.ones((2, 256), jnp.bfloat16),
        weights=(fp8_weight(0, 64, 256, form),),
        squares=jnp.ones((4, 2)),
    )
    with pytest.raises(ValueError, match="squares: expected none with"):
        fp8.fp8_matmul(inputs)


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_completes_a_norm(form: str) -> None:
    pair = Pair(3, 256, 1024, (64, 64), swiglu=True)
    case = make_case(pair, form)
    stream, gain = case.first.residual, case.first.gain
    assert stream is not None and gain is not None
    wide = stream.astype(jnp.float32)
    scaled = (wide * gain.astype(jnp.float32)).astype(jnp.bfloat16)
    squares = jnp.square(wide).reshape(3, 16, 64).sum(2).T
    second = Inputs(x=scaled, weights=case.weights, squares=squares, eps=EPS, swiglu=True)
    got: Any = fp8.fp8_matmul(second) if form == "fp8" else int4.int4_matmul(second)
    expected = ground_truth(pair, case, form, stream, scaled)
    assert errors(got, expected).max() <= TOLERANCE["swiglu"]


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*SMALL, *REAL])
def test_equals_the_norm_and_the_products_on_the_gpu(name: str, form: str) -> None:
    """A GPU divides within two units in the last place, so a code may be the next one."""
    assert_right((SMALL | REAL)[name], form, largest_error=0.2 if form == "fp8" else None)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_equals_the_norm_and_a_float32_product_on_the_gpu(form: str) -> None:
    pair, largest_error = Pair(3, 256, 1024, (64,)), 0.2 if form == "fp8" else None
    assert_right(pair, form, out_dtype="float32", largest_error=largest_error)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [name for name in REAL if name.endswith("rows 64")])
def test_bits_on_the_gpu_do_not_depend_on_neighbours(name: str, form: str) -> None:
    assert_same_bits(REAL[name], form, (1, 2, 4, 6, 8, 16, 32, 56))
