"""A Markov head's steps: the token and the logits that lookup, matmul op, sum and draw give."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gumbel_sample
from pallas_kernels.gumbel_sample.reference import argmax
from pallas_kernels.markov_head import (
    IMPLEMENTATIONS,
    Draw,
    Inputs,
    Step,
    markov_argmax,
    markov_draw,
    unsupported,
)
from pallas_kernels.markov_head.shapes import (
    SHAPES,
    Shape,
    bytes_moved,
    draw_arguments,
    make_inputs,
)
from pallas_kernels.matmul import Inputs as Factors
from pallas_kernels.matmul import matmul
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic
from tests.support.slow import slow_unless

implementations = by_implementation(IMPLEMENTATIONS)

# Small enough for the interpreter: one, two and three warpgroups, each number of padded rows.
SMALL = {
    "one row": Shape(1, 64, 192),
    "three rows, another W1": Shape(3, 256, 320, tokens=96),
    "eight rows": Shape(8, 192, 128),
    "16 rows": Shape(16, 128, 192, steps=2),
    "24 rows": Shape(24, 64, 128, steps=1),
    "64 rows": Shape(64, 256, 128, steps=3),
}


def on(implementation: str) -> contextlib.AbstractContextManager[None]:
    """Where an implementation runs."""
    return contextlib.nullcontext() if implementation == "reference" else interpreted()


def run(inputs: Inputs, implementation: str = "mosaic_gpu") -> np.ndarray:
    with on(implementation):
        return np.asarray(markov_argmax(inputs, implementation=implementation))


def drawn(inputs: Inputs, implementation: str = "mosaic_gpu") -> Step:
    with on(implementation):
        return jax.tree.map(np.asarray, markov_draw(inputs, implementation=implementation))


def assert_drawn(inputs: Inputs, seed: int, found: Step, implementation: str) -> None:
    """Logits and tokens are those of separate ops, to the bit. seed: of make_inputs"""
    np.testing.assert_array_equal(found.base, with_sum(inputs, implementation))
    of_column = gumbel_sample.Inputs(
        logits=jnp.asarray(found.base[:, inputs.step]),
        offset=inputs.step,
        **draw_arguments(inputs.rows, seed),
    )
    with on(implementation):
        tokens = gumbel_sample.gumbel_sample(of_column, implementation=implementation)
        np.testing.assert_array_equal(found.token, tokens)


def with_sum(inputs: Inputs, implementation: str) -> np.ndarray:
    """The logits that markov_draw gives, by separate ops."""
    base = np.asarray(inputs.base).copy()
    with on(implementation):
        base[:, inputs.step] += np.asarray(products(inputs, implementation))
    return base


def products(inputs: Inputs, implementation: str) -> jax.Array:
    """W2's part of the logits by the matmul op."""
    rows = inputs.table[jnp.clip(inputs.token, 0, len(inputs.table) - 1)]
    factors = Factors(x=rows, weights=(inputs.weight,), out_dtype=jnp.float32)
    made: Any = matmul(factors, implementation=implementation)
    return made


def separately(inputs: Inputs, implementation: str) -> np.ndarray:
    """The ops that markov_argmax replaces."""
    logits = inputs.base[:, inputs.step] + products(inputs, implementation)
    return np.asarray(argmax(jnp.where(jnp.isnan(logits), -jnp.inf, logits)))


def expected(inputs: Inputs, implementation: str) -> np.ndarray:
    with on(implementation):
        return separately(inputs, implementation)


def exact(inputs: Inputs) -> np.ndarray:
    """W2's part of the logits in float64."""
    rows = np.asarray(inputs.table, np.float64)[np.asarray(inputs.token)]
    return rows @ np.asarray(inputs.weight, np.float64)


def assert_largest(inputs: Inputs, tokens: np.ndarray) -> None:
    """No logit in float64 is larger than the token's, but for the rounding of float32 sums."""
    logits = np.asarray(inputs.base[:, inputs.step], np.float64) + exact(inputs)
    found = np.take_along_axis(logits, tokens[:, None], 1)
    assert (found >= logits.max(1, keepdims=True) - 1e-4).all()


def of_rounding(inputs: Inputs) -> Inputs:
    """Base logits that leave nothing of the products but their rounding, with many ties.

    So another order of summation, and another tie, give other tokens.
    """
    rest = -exact(inputs).astype(np.float32)
    return replace(inputs, base=inputs.base.at[:, inputs.step].set(rest))


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_is_lookup_product_sum_and_argmax_to_the_bit(name: str, implementation: str) -> None:
    inputs = make_inputs(SMALL[name], seed=len(name))
    tokens = run(inputs, implementation)
    assert_largest(inputs, tokens)
    np.testing.assert_array_equal(tokens, expected(inputs, implementation))
    inputs = of_rounding(inputs)
    np.testing.assert_array_equal(run(inputs, implementation), expected(inputs, implementation))


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_a_token_is_drawn_from_the_base_with_the_product_in_one_column(
    name: str, implementation: str
) -> None:
    inputs = make_inputs(SMALL[name], seed=len(name))
    given = np.asarray(inputs.base).copy()
    found = drawn(inputs, implementation)
    assert_drawn(inputs, len(name), found, implementation)
    np.testing.assert_array_equal(inputs.base, given)  # read again, so it is not changed in place
    column = given[:, inputs.step] + exact(inputs)
    np.testing.assert_allclose(found.base[:, inputs.step], column, atol=1e-4)


@implementations
def test_a_token_depends_on_each_part_of_its_draw_and_a_greedy_one_on_none(
    implementation: str,
) -> None:
    inputs, given = make_inputs(SMALL["eight rows"], seed=9), draw_arguments(8, seed=9)
    tokens, greedy = drawn(inputs, implementation).token, np.asarray(given["temperature"]) == 0
    for change in (
        {"temperature": given["temperature"] * 50},
        {"keys": given["keys"] + 1},
        {"position": given["position"] + 1},
        {"stream": given["stream"] + 1},
    ):
        changed = replace(inputs, draw=Draw.of(**{**given, **change}))
        other = drawn(changed, implementation).token
        assert (other != tokens).any(), change
        np.testing.assert_array_equal(other[greedy], tokens[greedy])


def test_what_is_left_of_rounding_has_ties_and_depends_on_the_order() -> None:
    inputs = of_rounding(make_inputs(SMALL["three rows, another W1"], seed=22))
    logits = np.asarray(inputs.base[:, inputs.step] + products(inputs, "reference"))
    backwards = replace(inputs, table=inputs.table[:, ::-1], weight=inputs.weight[::-1])
    other = np.asarray(inputs.base[:, inputs.step] + products(backwards, "reference"))
    assert ((logits == logits.max(1, keepdims=True)).sum(1) > 1).any() and (logits != other).any()


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "blocks"),
    slow_unless([(1, 3), (16, 1), (16, 2)], itertools.product((1, 16, 24), (1, 2, 3))),
)
def test_a_block_of_many_tiles_keeps_the_first_of_the_best_and_writes_all(
    rows: int, blocks: int
) -> None:
    """More tiles than base logits are copied ahead, and fewer slots than tiles of W2."""
    from pallas_kernels.markov_head import mosaic_gpu

    inputs = of_rounding(make_inputs(Shape(rows, 128, 13 * 64), seed=blocks))
    tuning = mosaic_gpu.tuning_of(mosaic_gpu.product_of(inputs))
    assert tuning is not None
    tuning = replace(tuning, blocks=blocks, stages=2)
    with interpreted(races=True):
        found = np.asarray(mosaic_gpu.markov_argmax(inputs, tuning=tuning))
    with interpreted(races=True):
        step = Step(*mosaic_gpu.markov_draw(inputs, tuning=tuning))
    np.testing.assert_array_equal(found, expected(inputs, "mosaic_gpu"))
    assert_drawn(inputs, blocks, jax.tree.map(np.asarray, step), "mosaic_gpu")


ODD = {
    "flat": lambda logits: 1.5,
    "none": lambda logits: -jnp.inf,
    "NaN": lambda logits: jnp.nan,
    "NaN and one": lambda logits: jnp.full_like(logits, jnp.nan).at[150].set(-3.0),
    "NaN and none": lambda logits: jnp.where(jnp.arange(192) % 2 == 0, jnp.nan, -jnp.inf),
    "infinite": lambda logits: logits.at[jnp.array([70, 190])].set(jnp.inf),
    "equal in two tiles": lambda logits: logits.at[jnp.array([63, 64, 191])].set(99.0),
}


@implementations
def test_of_equal_logits_the_first_counts_and_nan_never(implementation: str) -> None:
    """One of each kind a row, without a Markov term: all are in the base logits."""
    inputs = make_inputs(Shape(len(ODD), 64, 192), seed=3)
    base = inputs.base
    for row, change in enumerate(ODD.values()):
        base = base.at[row, inputs.step].set(change(base[row, inputs.step]))
    inputs = replace(inputs, base=base, table=jnp.zeros_like(inputs.table))
    found = drawn(inputs, implementation)
    np.testing.assert_array_equal(found.base, base)
    assert_drawn(inputs, 3, found, implementation)
    assert inputs.draw is not None
    greedy = replace(inputs.draw, temperature=jnp.zeros_like(inputs.draw.temperature))
    cold = drawn(replace(inputs, draw=greedy), implementation)
    assert cold.token.tolist() == [0, 0, 0, 150, 0, 70, 63]
    assert run(inputs, implementation).tolist() == [0, 0, 0, 150, 0, 70, 63]


@implementations
def test_an_id_outside_w1_reads_the_nearest_row(implementation: str) -> None:
    inputs = make_inputs(Shape(4, 64, 128, tokens=96), seed=1)
    outside = replace(inputs, token=jnp.array([96, -1, 2**31 - 1, -(2**31)], jnp.int32))
    nearest = replace(inputs, token=jnp.array([95, 0, 95, 0], jnp.int32))
    np.testing.assert_array_equal(run(outside, implementation), run(nearest, implementation))
    for found, same in zip(
        drawn(outside, implementation), drawn(nearest, implementation), strict=True
    ):
        np.testing.assert_array_equal(found, same)


FITS = make_inputs(Shape(2, 64, 128, tokens=96), seed=0)
assert FITS.draw is not None
FITS_DRAW: Any = FITS.draw
STRUCT: Any = jax.ShapeDtypeStruct
DOES_NOT_FIT = {
    "base, token, table and weight: expected [rows, steps, vocab], [rows], [tokens, rank] and "
    "[rank, vocab], got (2, 128), (2,), (96, 64), (64, 128)": {
        "base": STRUCT((2, 128), jnp.float32)
    },
    "base: expected float32 [2, 7, 128], got float32 [3, 7, 128]": {
        "base": STRUCT((3, 7, 128), jnp.float32)
    },
    "base: expected float32 [2, 7, 128], got bfloat16 [2, 7, 128]": {
        "base": STRUCT((2, 7, 128), jnp.bfloat16)
    },
    "step: expected int32 [], got int32 [2]": {"step": FITS.token},
    "token: expected int32 [2], got uint32 [2]": {"token": STRUCT((2,), jnp.uint32)},
    "table: expected bfloat16 [96, 64], got float32 [96, 64]": {
        "table": STRUCT((96, 64), jnp.float32)
    },
    "table: expected bfloat16 [96, 64], got bfloat16 [96, 32]": {
        "table": STRUCT((96, 32), jnp.bfloat16)
    },
    "temperature: expected float32 [64], got float32 [2]": {
        "draw": replace(FITS_DRAW, temperature=STRUCT((2,), jnp.float32))
    },
    "keys: expected uint32 [2, 64], got int32 [2]": {"draw": replace(FITS_DRAW, keys=FITS.token)},
    "implementation: expected one of reference, mosaic_gpu, got 'fast'": {"implementation": "fast"},
}


@pytest.mark.parametrize("op", [markov_argmax, markov_draw])
@pytest.mark.parametrize("message", DOES_NOT_FIT)
def test_what_does_not_fit_is_an_error(message: str, op: Any) -> None:
    with pytest.raises(ValueError) as error:
        call(op, FITS, DOES_NOT_FIT[message])
    assert str(error.value) == message


UNSUPPORTED = {
    "expected 1 to 8 rows, or a multiple of 8 up to 64, got 65": Shape(65, 64, 64),
    "expected 1 to 8 rows, or a multiple of 8 up to 64, got 9": Shape(9, 64, 64),
    "expected bfloat16 operands, got float32 and float32": Shape(1, 64, 64, dtype="float32"),
    "expected a depth and widths that are multiples of 64, got 64 and (100,)": Shape(1, 64, 100),
    "expected a depth and widths that are multiples of 64, got 32 and (64,)": Shape(1, 32, 64),
    "expected W1's rows to fit into shared memory, got 64 of 512 numbers": Shape(64, 512, 64),
    "expected a rank that one block sums, got 2048": Shape(1, 2048, 64),
}


@needs_mosaic
@pytest.mark.parametrize("reason", UNSUPPORTED)
def test_what_the_kernel_cannot_take_it_says(reason: str) -> None:
    inputs = make_inputs(UNSUPPORTED[reason], seed=0)
    assert unsupported(inputs) == reason
    if jax.default_backend() == "cpu":
        with pytest.raises(ValueError) as error:
            run(inputs)
        assert str(error.value) == f"markov_argmax, implementation 'mosaic_gpu': {reason}"


@needs_mosaic
@pytest.mark.parametrize("name", SHAPES)
def test_the_kernel_takes_real_shapes(name: str) -> None:
    arrays = jax.eval_shape(lambda: make_inputs(SHAPES[name], seed=0))
    assert unsupported(arrays) is None


def test_a_draw_needs_what_to_draw_with() -> None:
    with pytest.raises(ValueError, match="^draw: expected what the token is drawn with, got None$"):
        markov_draw(replace(FITS, draw=None))


@pytest.mark.parametrize("op", [markov_argmax, markov_draw])
def test_the_kernels_need_a_gpu(op: Any) -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one here")
    expected = f"^{op.__name__}, implementation 'mosaic_gpu': expected an NVIDIA GPU, got cpu$"
    with pytest.raises(ValueError, match=expected):
        op(FITS, implementation="mosaic_gpu")


def test_bytes_are_w2_and_each_rows_part_of_w1_logits_and_tokens() -> None:
    assert bytes_moved(Shape(3, 64, 128)) == 2 * 64 * 128 + 3 * (2 * 64 + 4 * 128 + 8)
    drawn = bytes_moved(Shape(3, 64, 128), op="markov_draw")
    assert drawn == 2 * 64 * 128 + 3 * (2 * 64 + 2 * 4 * 128 + 8 + 12)


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES | SMALL)
def test_is_lookup_product_sum_and_argmax_to_the_bit_on_the_gpu(name: str) -> None:
    """At each step of the block, and where tokens depend on the last bits of the products.

    Tokens of a draw are those of gumbel_sample's kernel.
    """
    shape = (SHAPES | SMALL)[name]
    inputs = make_inputs(shape, seed=4)
    for step in range(shape.steps):
        inputs = replace(inputs, step=jnp.int32(step))
        np.testing.assert_array_equal(run(inputs), separately(inputs, "mosaic_gpu"))
        assert_drawn(inputs, 4, drawn(inputs), "mosaic_gpu")
    assert_largest(inputs, run(inputs))
    inputs = of_rounding(inputs)
    np.testing.assert_array_equal(run(inputs), separately(inputs, "mosaic_gpu"))
    assert_drawn(inputs, 4, drawn(inputs), "mosaic_gpu")
