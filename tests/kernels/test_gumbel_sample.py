"""Gumbel-max: reference and kernel take the tokens of its definition, drawn from the softmax,
whatever rows are beside."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gumbel_sample import IMPLEMENTATIONS, Inputs, gumbel_sample, unsupported
from pallas_kernels.gumbel_sample.shapes import SHAPES, Shape, bytes_moved, make_inputs
from tests.kernels import noise_oracle
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic
from tests.support.statistics import chi_square, within_limit

implementations = by_implementation(IMPLEMENTATIONS)
SMALL = [name for name in SHAPES if name.startswith("tiny")]
REAL = [name for name in SHAPES if not name.startswith("tiny")]


# One program a shape, where each of the reference's operations would be one.
compiled = jax.jit(gumbel_sample, static_argnames="implementation")


def run(inputs: Inputs, implementation: str = "mosaic_gpu") -> np.ndarray:
    if implementation == "reference":
        return np.asarray(compiled(inputs, implementation=implementation))
    with interpreted():
        return np.asarray(gumbel_sample(inputs, implementation=implementation))


def by_definition(inputs: Inputs) -> np.ndarray:
    """Row by row, with the oracle's keys and noise, float64 and numpy's argmax."""
    tokens = []
    arrays = (inputs.logits, inputs.temperature, inputs.keys, inputs.position)
    for logits, temperature, words, position in zip(*map(np.asarray, arrays), strict=True):
        logits = np.where(np.isnan(logits), -np.inf, np.asarray(logits, np.float64))
        key = noise_oracle.stream_key(words, inputs.stream, position, inputs.offset)
        ids = np.arange(logits.size) if inputs.token_ids is None else np.asarray(inputs.token_ids)
        tokens.append(
            np.argmax(
                logits / float(temperature) + noise_oracle.gumbel(key, ids)
                if temperature
                else logits
            )
        )
    return np.asarray(tokens)


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_tokens_are_those_of_the_definition(name: str, implementation: str) -> None:
    """Among them greedy rows, ties, rows that are -inf in part and in whole, and NaN."""
    inputs = make_inputs(SHAPES[name], seed=len(name))
    tokens = run(inputs, implementation)
    assert tokens.dtype == np.int32
    np.testing.assert_array_equal(tokens, by_definition(inputs))


@implementations
def test_the_second_word_decides_where_the_first_is_zero(implementation: str) -> None:
    """Between four ids whose first words are 0 in 23 bits, under a key of zeros and stream 1:
    tokens show little else of the second."""
    inputs = make_inputs(Shape(1, 128), seed=0)
    columns, ids = (
        np.asarray([5, 40, 77, 127]),
        np.asarray([27_522_675, 27_726_396, 26_976_924, 15_941_239]),
    )
    inputs = replace(
        inputs,
        logits=jnp.full((1, 128), -jnp.inf).at[0, columns].set(0.0),
        keys=jnp.zeros_like(inputs.keys),
        position=jnp.zeros_like(inputs.position),
        offset=jnp.zeros_like(inputs.offset),
        token_ids=jnp.zeros(128, jnp.int32).at[columns].set(ids),
    )
    assert run(inputs, implementation).tolist() == by_definition(inputs).tolist() == [127]


def test_tokens_are_distributed_as_the_softmax() -> None:
    rows, vocab = 5_000, 130
    logits = jnp.asarray(2 * np.random.default_rng(0).normal(size=vocab), jnp.float32)
    keys = jnp.stack([jnp.zeros(rows, jnp.uint32), jnp.arange(rows, dtype=jnp.uint32)], axis=1)
    inputs = Inputs(
        logits=jnp.broadcast_to(logits, (rows, vocab)),
        temperature=jnp.full(rows, 0.7),
        keys=keys,
        position=jnp.zeros(rows, jnp.int32),
        offset=jnp.int32(0),
        stream=1,
    )
    tokens = gumbel_sample(inputs)
    weights = np.exp(np.asarray(logits, np.float64) / 0.7)
    assert within_limit(*chi_square(np.bincount(tokens, minlength=vocab), weights / weights.sum()))


@needs_mosaic
def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    inputs = make_inputs(SHAPES["tiny, odd"], seed=2)
    tokens = run(inputs)
    rows = [3, 6, 1]
    some = {
        name: getattr(inputs, name)[np.asarray(rows)]
        for name in ("logits", "temperature", "keys", "position")
    }
    np.testing.assert_array_equal(run(replace(inputs, **some)), tokens[rows])


@needs_mosaic
@pytest.mark.parametrize(("blocks", "cut"), [(1, (1, 14)), (48, (5, 3)), (1056, (14, 1))])
def test_a_rows_token_does_not_depend_on_its_cut(blocks: int, cut: tuple[int, int]) -> None:
    """The kernel cuts a row among fewer blocks the more rows there are."""
    from pallas_kernels.gumbel_sample import mosaic_gpu

    shape = SHAPES["tiny, 14 pieces"]
    assert (
        mosaic_gpu.shares(mosaic_gpu.cut(shape.vocab, mosaic_gpu.Tuning.piece), shape.rows, blocks)
        == cut
    )
    inputs = make_inputs(shape, seed=3)
    with interpreted():
        tokens = mosaic_gpu.gumbel_sample(inputs, tuning=mosaic_gpu.Tuning(blocks=blocks))
    np.testing.assert_array_equal(tokens, run(inputs, "reference"))


@needs_mosaic
@pytest.mark.parametrize("at", [0, 255, 256, 39_935, 39_936, 39_999])
def test_the_highest_is_found_wherever_it_stands_and_of_equals_the_first(at: int) -> None:
    """One, then a second one at the row's end: 79 blocks of two pieces, the last piece moved back,
    and read twice."""
    inputs = make_inputs(Shape(2, 40_000), seed=3)
    logits = inputs.logits.at[:, at].set(1e6).at[0, -1].set(1e6)
    inputs = replace(inputs, logits=logits, temperature=jnp.asarray([0.0, 1.0], jnp.float32))
    assert run(inputs).tolist() == [at, at]


ROW = jax.ShapeDtypeStruct((4,), jnp.float32)
ARGUMENTS: dict[str, Any] = {
    "logits": jax.ShapeDtypeStruct((4, 256), jnp.float32),
    "temperature": ROW,
    "keys": jax.ShapeDtypeStruct((4, 2), jnp.uint32),
    "position": jax.ShapeDtypeStruct((4,), jnp.int32),
    "offset": jax.ShapeDtypeStruct((), jnp.int32),
    "stream": 1,
}
FITS = Inputs(**ARGUMENTS)
DOES_NOT_FIT = {
    r"logits: expected \[rows, vocab\], got \[4\]": {"logits": ROW},
    r"logits: expected float32 \[4, 256\], got bfloat16 \[4, 256\]": {
        "logits": jax.ShapeDtypeStruct((4, 256), jnp.bfloat16)
    },
    r"temperature: expected float32 \[4\], got float32 \[\]": {
        "temperature": jax.ShapeDtypeStruct((), jnp.float32)
    },
    r"keys: expected uint32 \[4, 2\], got int32 \[4\]": {"keys": FITS.position},
    r"offset: expected int32 \[\], got int32 \[4\]": {"offset": FITS.position},
    r"token_ids: expected int32 \[256\], got int32 \[4\]": {"token_ids": FITS.position},
    "implementation: expected one of reference, mosaic_gpu, got 'fast'": {"implementation": "fast"},
}


@pytest.mark.parametrize("message", DOES_NOT_FIT)
def test_what_does_not_fit_is_an_error(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(gumbel_sample, FITS, DOES_NOT_FIT[message])


@needs_mosaic
def test_what_the_kernel_cannot_take_it_says() -> None:
    assert [unsupported(vocab) for vocab in (128, 777, 32_000, 262_144)] == [None] * 4
    assert unsupported(127) == "expected at least 128 logits a row, got 127"


def test_the_kernel_needs_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one here")
    with pytest.raises(
        ValueError,
        match="^gumbel_sample, implementation 'mosaic_gpu': expected an NVIDIA GPU, got cpu$",
    ):
        gumbel_sample(FITS, implementation="mosaic_gpu")


def test_bytes_are_the_logits_the_ids_and_five_words_a_row() -> None:
    assert bytes_moved(Shape(3, 1000)) == 4 * 3 * 1005
    assert bytes_moved(Shape(3, 1000, 5000)) == 4 * (3 * 1005 + 1000)


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL)
def test_tokens_of_real_sizes_are_the_references(name: str) -> None:
    """Exactly: the same bits, logarithms and quotient (tests/aot/test_gumbel_aot.py); 20 draws a
    row."""
    inputs = make_inputs(SHAPES[name], seed=4)
    draw = lambda implementation: jax.jit(  # noqa: E731
        lambda offset: gumbel_sample(replace(inputs, offset=offset), implementation=implementation)
    )
    kernel, reference = draw("mosaic_gpu"), draw("reference")
    for offset in range(20):
        np.testing.assert_array_equal(
            kernel(jnp.int32(offset)), reference(jnp.int32(offset)), err_msg=f"offset {offset}"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_tokens_of_odd_rows_are_the_references(name: str) -> None:
    inputs = make_inputs(SHAPES[name], seed=5)
    np.testing.assert_array_equal(run(inputs), run(inputs, "reference"))
