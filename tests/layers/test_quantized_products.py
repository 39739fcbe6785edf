"""Layers multiply by quantised weights with the ops of their type, which share norms with their
own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import REFERENCE_OPS, Ops
from jaxspec.layers import products as layers
from jaxspec.layers.mlp import add_mlp
from jaxspec.layers.norms import Norm, rms_norm
from jaxspec.layers.params import AnyWeight, Weight
from pallas_kernels import fp8_matmul, int4_matmul, matmul
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_fp8_matmul import fp8_weight
from tests.kernels.test_int4_matmul import int4_weight

D = 128
OPS = {"fp8": fp8_matmul.fp8_matmul, "int4": int4_matmul.int4_matmul}


def weight(kind: str, seed: int = 0) -> AnyWeight:
    if kind == "fp8":
        return fp8_weight(seed, D, D, "channel")
    return int4_weight(seed, D, D, group=64, zeros=True)[0]


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


@pytest.mark.parametrize("kind", OPS)
def test_products_are_those_of_the_weights_op(kind: str) -> None:
    x, gain = normal(0, 2, 3, D), 1 + normal(1, D)
    two: Any = (weight(kind, 0), weight(kind, 1))
    flat = rms_norm(x, gain, 1e-5, REFERENCE_OPS).reshape(6, D)

    def op(**changes: Any) -> np.ndarray:
        inputs = matmul.Inputs(x=flat, weights=two, out_dtype=jnp.float32)
        return np.asarray(OPS[kind](dataclasses.replace(inputs, **changes))).reshape(2, 3, -1)

    norm = Norm(gain, 1e-5)
    assert (layers.project(x, two, REFERENCE_OPS, norm=norm) == op()).all()
    assert (
        layers.project_swiglu(x, two[0], two[1], REFERENCE_OPS, norm=norm) == op(swiglu=True)
    ).all()
    assert (
        layers.vocab_logits(x, two[0], REFERENCE_OPS) == op(x=x.reshape(6, D), weights=two[:1])
    ).all()
    stream = normal(2, 2, 3, D)
    added = layers.add_projection(stream, x, two[0], REFERENCE_OPS, next_norm=norm)
    expected = op(x=x.reshape(6, D), weights=two[:1], residual=stream.reshape(6, D))
    assert (added.x == expected).all() and added.deferred_norm is None


def of_form(form: str) -> Any:
    return Weight(jnp.zeros((D, D), jnp.bfloat16)) if form == "plain" else weight(form)


@needs_mosaic
@pytest.mark.parametrize("after", ["plain", *OPS])
@pytest.mark.parametrize("before", ["plain", *OPS])
def test_products_of_one_form_share_a_norm(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A product prepares no norm for weights of another form, and takes none from them."""
    seen: list[tuple[bool, bool, bool]] = []
    found = jnp.full((8, 8), 3.0)

    def note(inputs: matmul.Inputs, *, implementation: str, largest: Any = None, **_: Any) -> Any:
        seen.append((inputs.squares is not None, inputs.gain is not None, largest is found))
        made = jnp.zeros((inputs.x.shape[0], D), inputs.x.dtype)
        return made if inputs.gain is None else (made, made, jnp.ones((64, 8)))

    def note_of_norm(inputs: matmul.Inputs, *, implementation: str, largest: Any) -> Any:
        out, scaled, squares = note(inputs, implementation=implementation)
        return fp8_matmul.BeforeNorm(out, scaled, squares, found)

    for module in (matmul, fp8_matmul, int4_matmul):
        monkeypatch.setattr(module, module.__name__.rpartition(".")[2], note)
        monkeypatch.setattr(module, "unsupported", lambda product: None)
    monkeypatch.setattr(fp8_matmul, "shares_norm", lambda *_: True)
    monkeypatch.setattr(fp8_matmul, "takes_norm", lambda *_: False)
    monkeypatch.setattr(fp8_matmul, "product_for_norm", note_of_norm)
    first, second = of_form(before), of_form(after)
    x, gain = jnp.ones((1, 4, D), jnp.bfloat16), jnp.ones((D,), jnp.bfloat16)
    ops = Ops(matmul="mosaic_gpu", rms_norm="mosaic_gpu")
    norm = Norm(gain, 1e-5, (second,))
    stream = layers.add_projection(x, x, first, ops, next_norm=norm)
    shared = before == after
    assert (stream.deferred_norm is not None) == shared
    # However the stream was made:
    deferred = layers.DeferredNorm(type(first), x[0], jnp.ones((64, 8)), found)
    prepared = layers.ResidualStream(x, deferred, normed=x)
    layers.project(prepared, (second,), ops, norm=norm)
    measured = shared and after == "fp8"
    assert seen == [(False, shared, False), (shared, False, measured)]


@needs_mosaic
@pytest.mark.parametrize("kind", ["plain", "int4", "fp8"])
def test_gate_and_up_hand_their_largest_magnitudes_to_down(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up find them for a `down` that divides by them, and only `down` gets them."""
    down: Any = Weight(jnp.zeros((D, D), jnp.bfloat16)) if kind == "plain" else weight(kind)
    gate, up = (fp8_weight(seed, D, D, "channel") for seed in (0, 1))
    found, seen = jnp.full((2, 8), 3.0), []

    def measured(inputs: matmul.Inputs, **_: Any) -> Any:
        return jnp.zeros((inputs.x.shape[0], D), inputs.x.dtype), found

    def note(inputs: matmul.Inputs, *, largest: Any = None, **_: Any) -> Any:
        seen.append(largest)
        return jnp.zeros((inputs.x.shape[0], D), inputs.x.dtype)

    monkeypatch.setattr(fp8_matmul, "measured_swiglu", measured)
    monkeypatch.setattr(fp8_matmul, "takes_largest", lambda *_: True)
    monkeypatch.setattr(fp8_matmul, "takes_norm", lambda *_: False)
    for module in (matmul, fp8_matmul, int4_matmul):
        monkeypatch.setattr(module, module.__name__.rpartition(".")[2], note)
        monkeypatch.setattr(module, "unsupported", lambda product: None)
    gain = jnp.ones((D,), jnp.bfloat16)
    layer = {
        "post_attention_layernorm": gain,
        "gate_proj": gate,
        "up_proj": up,
        "down_proj": down,
    }
    x, ops = jnp.ones((1, 4, D), jnp.bfloat16), Ops(matmul="mosaic_gpu")
    stream = add_mlp(layer, 1e-5, x, ops)
    assert stream.largest is None
    if kind == "fp8":
        assert len(seen) == 1 and seen[0] is found
    else:  # gate and up, which measure nothing, then down
        assert seen == [None, None]

    seen.clear()  # under a norm the next product's rows are others
    prepared = layers.ResidualStream(x, largest=found)
    layers.project(prepared, (down,), ops, norm=Norm(gain, 1e-5))
    assert seen == [None]


def many_rows_case(form: str = "channel") -> tuple[dict[str, Any], jax.Array, Norm]:
    """A layer's MLP, 66 rows, which are padded to 80, and the norm after it."""
    gate, up, down, qkv = (fp8_weight(seed, 1024, 1024, form) for seed in range(4))
    gain = 1 + normal(2, 1024).astype(jnp.bfloat16) / 4
    layer = {"post_attention_layernorm": gain, "gate_proj": gate, "up_proj": up, "down_proj": down}
    return layer, normal(0, 22, 3, 1024).astype(jnp.bfloat16), Norm(gain, 1e-5, (qkv,))


def values(x: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float32)


SWIGLU, SUM = "swiglu_rows_1024", "add_and_quantise_1024_normed"


@needs_mosaic
def test_many_rows_go_from_product_to_product_as_codes(kernels: list[str]) -> None:
    layer, x, norm = many_rows_case()
    ops = Ops(matmul="mosaic_gpu", rms_norm="mosaic_gpu")
    with interpreted():
        stream = add_mlp(layer, 1e-5, x, ops, next_norm=norm)
        assert kernels == ["quantise_1024_normed", SWIGLU, SUM]
        assert stream.quantised is not None and stream.quantised.codes.shape == (80, 1024)
        kernels.clear()
        qkv = layers.project(stream, norm.weights, ops, norm=norm)
        assert not kernels
        # The same by kernels and XLA in turn.
        separate = add_mlp(
            layer, 1e-5, x, dataclasses.replace(ops, is_prefill=True), next_norm=norm
        )
        expected = layers.project(stream.x, norm.weights, ops, norm=norm)
    np.testing.assert_array_equal(values(qkv), values(expected))
    error = np.linalg.norm(values(stream.x) - values(separate.x))
    assert error <= 0.01 * np.linalg.norm(values(separate.x) - values(x))


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("none", {SWIGLU, SUM}),
        ("256 rows", {SWIGLU, SUM}),
        ("64 rows", set()),  # other kernels
        ("257 rows", set()),
        ("prefill", set()),
        ("blocks", set()),
        ("no norm", {SWIGLU}),
        ("no kernel of norms", {SWIGLU}),
        ("other weights after the norm", {SWIGLU}),
    ],
)
def test_which_products_of_many_rows_hand_on_codes(
    change: str, expected: set[str], kernels: list[str]
) -> None:
    layer, x, norm = many_rows_case("block" if change == "blocks" else "channel")
    if change.endswith("rows"):
        x = jnp.zeros((1, int(change.split()[0]), 1024), jnp.bfloat16)
    if change == "other weights after the norm":
        norm = Norm(norm.gain, norm.eps, (of_form("int4"),))
    norms = "reference" if change == "no kernel of norms" else "mosaic_gpu"
    ops = Ops(matmul="mosaic_gpu", rms_norm=norms, is_prefill=change == "prefill")
    next_norm = None if change == "no norm" else norm
    with interpreted():
        stream = jax.eval_shape(lambda x: add_mlp(layer, 1e-5, x, ops, next_norm=next_norm), x)
    assert {SWIGLU, SUM} & set(kernels) == expected
    assert (stream.quantised is not None) == (SUM in expected)
    assert stream.x.shape == x.shape and stream.x.dtype == x.dtype
