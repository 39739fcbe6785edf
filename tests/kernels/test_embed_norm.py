"""Embedding and norm in one launch: to the bit what gather, the rms_norm op and concatenation
give."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.embed_norm import IMPLEMENTATIONS, Inputs, embed_norm
from pallas_kernels.embed_norm.shapes import SHAPES, Shape, make_inputs
from pallas_kernels.rms_norm import rms_norm
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic

implementations = by_implementation(IMPLEMENTATIONS)
SMALL = {
    f"{kind}, {rows} rows of {width}": Shape(rows, width, 96, *switches)
    for kind, switches in (
        ("target", ()),
        ("draft", (True,)),
        ("draft, residual normed", (True, True)),
    )
    for rows, width in ((1, 4096), (4, 576), (3, 2048), (64, 576))
}


def separately(inputs: Inputs, implementation: str) -> tuple[jax.Array, jax.Array]:
    """The ops that embed_norm replaces."""

    def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, eps=inputs.eps, implementation=implementation)

    embedded = inputs.table[jnp.clip(inputs.tokens, 0, len(inputs.table) - 1)]
    if inputs.hidden is None or inputs.hidden_weight is None:
        return embedded, norm(embedded, inputs.weight)
    normed = norm(inputs.hidden, inputs.hidden_weight)
    joined = jnp.concatenate([norm(embedded, inputs.weight), normed], axis=-1)
    return normed if inputs.norm_residual else inputs.hidden, joined


def run(function: Any, inputs: Inputs, implementation: str) -> tuple[np.ndarray, ...]:
    if implementation == "reference":
        found = function(inputs, implementation)
    else:
        with interpreted():
            found = function(inputs, implementation)
    assert all(x.dtype == jnp.bfloat16 for x in found)
    return tuple(np.asarray(x).view(np.uint16) for x in found)


def together(inputs: Inputs, implementation: str) -> tuple[jax.Array, jax.Array]:
    return embed_norm(inputs, implementation=implementation)


def check(shape: Shape, implementation: str) -> None:
    inputs = make_inputs(shape, seed=0)
    for ours, theirs in zip(
        run(together, inputs, implementation), run(separately, inputs, implementation), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_is_gather_norm_and_concatenation_to_the_bit(name: str, implementation: str) -> None:
    check(SMALL[name], implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_is_gather_norm_and_concatenation_to_the_bit_at_real_sizes(name: str) -> None:
    check(SHAPES[name], "mosaic_gpu")


@implementations
def test_an_id_outside_the_vocabulary_reads_the_nearest_row(implementation: str) -> None:
    inputs = make_inputs(Shape(4, 576, 96), seed=1)
    outside, nearest = (
        jnp.array([96, -1, 2**31 - 1, -(2**31)], jnp.int32),
        jnp.array([95, 0, 95, 0], jnp.int32),
    )
    found, expected = (
        run(together, replace(inputs, tokens=tokens), implementation)
        for tokens in (outside, nearest)
    )
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"weight": jnp.ones(65, jnp.bfloat16)},
            r"expected \[rows\], \[vocab, width\] and \[width\], got \(2,\), \(9, 64\) and \(65,\)",
        ),
        (
            {"hidden_weight": None},
            "hidden and hidden_weight: expected both or neither, and both for norm_residual",
        ),
        (
            {"hidden": None, "hidden_weight": None, "norm_residual": True},
            "expected both or neither, and both for norm_residual",
        ),
        (
            {"hidden": jnp.ones((3, 64), jnp.bfloat16)},
            r"hidden_weight: expected \(2, 64\) and \(64,\), got \(3, 64\) and \(64,\)",
        ),
        (
            {"implementation": "nothing"},
            "implementation: expected one of reference, mosaic_gpu, got 'nothing'",
        ),
        ({"implementation": "mosaic_gpu"}, "embed_norm, implementation 'mosaic_gpu': expected"),
    ],
)
def test_what_does_not_fit_is_one_sentence(arguments: dict[str, Any], sentence: str) -> None:
    if jax.default_backend() == "gpu" and arguments == {"implementation": "mosaic_gpu"}:
        pytest.skip("a GPU runs it")
    with pytest.raises(ValueError, match=sentence):
        call(embed_norm, make_inputs(Shape(2, 64, 9, draft=True), seed=0), arguments)


@needs_mosaic
@pytest.mark.parametrize("name", ["table", "hidden"])
def test_the_kernel_takes_bfloat16_alone(name: str) -> None:
    inputs = make_inputs(Shape(2, 64, 9, draft=True), seed=0)
    with interpreted(), pytest.raises(ValueError, match="expected bfloat16, got float32"):
        wide = {name: getattr(inputs, name).astype(jnp.float32)}
        embed_norm(replace(inputs, **wide), implementation="mosaic_gpu")
