"""Which products of a layer are a kernel's: gate and up of few rows and of whole row tiles; XLA's
are logged with why."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import REFERENCE_OPS, Ops
from jaxspec.layers import products as layers
from jaxspec.layers.mlp import add_mlp
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Weight
from pallas_kernels import matmul as matmul_op
from pallas_kernels.sum_norm import sum_norm
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_fp8_matmul import fp8_weight
from tests.kernels.test_int4_matmul import int4_weight

pytestmark = needs_mosaic
KERNEL = Ops(matmul="mosaic_gpu")
OTHERS = (
    "XLA multiplies by [(128, 64), (128, 64)]: the kernel expected at most 64 rows, or a "
    "multiple of 128 up to 256, of gate and up, got"
)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Rows and implementation of every product, which is not made."""
    found: list[tuple[int, str]] = []

    def note(inputs: matmul_op.Inputs, *, implementation: str) -> jax.Array:
        rows, width = inputs.x.shape[0], inputs.weights[0].shape[1]
        found.append((rows, implementation))
        return jnp.zeros((rows, width), inputs.x.dtype)

    monkeypatch.setattr(matmul_op, "matmul", note)
    layers.log_once.cache_clear()
    return found


def test_gate_and_up_are_the_kernels_wherever_it_takes_their_rows(
    taken: list[tuple[int, str]], caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of 8 by 8 are made whole first: 50 requests with five rows each are 256 with the
    padding."""
    weight = Weight(jnp.zeros((128, 64), jnp.bfloat16))
    batches = {(16, 4): 64, (32, 4): 128, (50, 5): 256, (64, 4): 256, (48, 4): None, (96, 4): None}
    with caplog.at_level(logging.INFO, "jaxspec.layers"):
        for batch, rows in batches:
            x = jnp.zeros((batch, rows, 128), jnp.bfloat16)
            inner = layers.project_swiglu(x, weight, weight, KERNEL)
            assert inner.shape[:2] == (batch, rows)
    expected = [
        (rows, "mosaic_gpu") if rows else (batch * k, "reference")
        for (batch, k), rows in batches.items()
    ]
    assert taken == expected
    assert [r.getMessage() for r in caplog.records] == [f"{OTHERS} {rows}" for rows in (192, 384)]


def test_other_products_of_many_rows_are_xlas(taken: list[tuple[int, str]]) -> None:
    x, weight = jnp.zeros((64, 4, 128), jnp.bfloat16), Weight(jnp.zeros((128, 128), jnp.bfloat16))
    layers.project(x, (weight,), KERNEL)
    layers.project(x, (weight, weight), KERNEL)
    layers.add_projection(x, x, weight, KERNEL, next_norm=Norm(weight.values[0], 1e-5))
    assert taken == [(256, "reference")] * 3


@pytest.mark.parametrize("tiles", [1, 3, 43])
def test_products_of_prefill_are_summed_in_order(
    tiles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """48 rows are few: their kernel has one order anyway."""
    found: list[tuple[int, str, bool]] = []

    def note(inputs: matmul_op.Inputs, *, implementation: str) -> jax.Array:
        found.append((inputs.x.shape[0], implementation, inputs.in_order))
        return jnp.zeros((inputs.x.shape[0], 128), inputs.x.dtype)

    monkeypatch.setattr(matmul_op, "matmul", note)
    ops = replace(KERNEL, is_prefill=True, prefill_in_order=True)
    x = jnp.zeros((tiles, 48, 128), jnp.bfloat16)
    weight = Weight(jnp.zeros((128, 128), jnp.bfloat16))
    layers.project(x, (weight,), ops, norm=Norm(weight.values[0], 1e-5))
    layers.project_swiglu(x, weight, weight, ops)
    layers.add_projection(x, x, weight, ops)
    assert found == [(48 * tiles, "mosaic_gpu", tiles > 1)] * 3


def test_other_passes_and_prefill_in_any_order_are_xlas(taken: list[tuple[int, str]]) -> None:
    x = jnp.zeros((3, 48, 128), jnp.bfloat16)
    weight = Weight(jnp.zeros((128, 128), jnp.bfloat16))
    for ops in (replace(KERNEL, is_prefill=True), replace(KERNEL, prefill_in_order=True)):
        layers.project(x, (weight,), ops)
    assert taken == [(144, "reference")] * 2


@pytest.mark.parametrize("kind", ["int4", "fp8-block"])
def test_codes_of_prefill_are_summed_in_order_and_share_no_norm(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few rows of int4 share it, and kernels of few rows have another order."""
    found: list[tuple[str, bool, bool]] = []

    def note(inputs: matmul_op.Inputs, *, implementation: str, **_: object) -> jax.Array:
        found.append((implementation, inputs.in_order, inputs.gain is None))
        return jnp.zeros((inputs.x.shape[0], 256), inputs.x.dtype)

    monkeypatch.setattr(layers.fp8_op, "fp8_matmul", note)
    monkeypatch.setattr(layers.int4_op, "int4_matmul", note)
    if kind == "int4":
        weight, _ = int4_weight(0, 256, 256, group=128, zeros=False)
    else:
        weight = fp8_weight(0, 256, 256, "block")
    ops = replace(KERNEL, is_prefill=True, prefill_in_order=True, rms_norm="mosaic_gpu")
    x, norm = jnp.zeros((3, 48, 256), jnp.bfloat16), Norm(jnp.ones(256), 1e-5, (weight,))
    layers.add_projection(x, x, weight, ops, next_norm=norm)
    layers.vocab_logits(x, weight, ops)  # fp8 has a kernel of few rows for up to 256 of them
    assert found == [("mosaic_gpu", True, True), ("mosaic_gpu", kind == "int4", True)]


@pytest.mark.parametrize("rows", [1, 4, 16, 100])
def test_projections_that_blocks_keep_apart_are_the_kernels(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA adds in an order that the number of rows decides."""
    found: list[str] = []

    def note(inputs: matmul_op.Inputs, *, implementation: str, **_: object) -> jax.Array:
        found.append(implementation)
        return jnp.zeros((inputs.x.shape[0], 320), inputs.x.dtype)

    monkeypatch.setattr(layers.fp8_op, "fp8_matmul", note)
    weights = tuple(fp8_weight(i, width, 576, "block") for i, width in enumerate((192, 64, 64)))
    layers.project(jnp.zeros((rows, 1, 576), jnp.bfloat16), weights, KERNEL)
    assert found == ["mosaic_gpu"]


@pytest.mark.parametrize(
    ("change", "takes"),
    [
        ({}, True),
        ({"rows": 67}, True),
        ({"rows": 256}, True),
        ({"rows": 64}, False),  # the kernel of few rows
        ({"depth": 3072}, False),  # no deeper than wide
        ({"width": 3136}, False),  # not a width of the kernel's
        ({"norm": None}, False),
        ({"ops": {"is_prefill": True}}, False),  # calls have any number of rows
        ({"ops": {"rms_norm": "reference"}}, False),
        ({"bias": True}, False),
        ({"int4": True}, False),
    ],
    ids=str,
)
def test_deep_products_of_many_rows_are_summed_together_with_their_norm(
    change: dict[str, Any], takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In two parts, each a product of half the depth."""
    given = {"rows": 128, "depth": 3584, "width": 3072, "norm": True, "ops": {}, "bias": False}
    given |= change
    rows, depth, width = given["rows"], given["depth"], given["width"]
    found: list[tuple[int, ...]] = []

    def note(
        parts: jax.Array, residual: jax.Array, gain: jax.Array, *, eps: float, implementation: str
    ) -> tuple[jax.Array, jax.Array]:
        found.append(parts.shape)
        assert (eps, implementation) == (1e-5, "mosaic_gpu")
        return sum_norm(parts, residual, gain, eps=eps)

    def xlas(inputs: matmul_op.Inputs, *, implementation: str) -> Any:
        return matmul(inputs)  # whatever was chosen

    matmul = matmul_op.matmul
    monkeypatch.setattr(matmul_op, "matmul", xlas)
    monkeypatch.setattr(layers.int4_op, "int4_matmul", lambda inputs, **_: inputs.residual)
    monkeypatch.setattr(layers.sum_norm_op, "sum_norm", note)
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (1, rows, depth), jnp.bfloat16)
    stream = jax.random.normal(keys[1], (1, rows, width), jnp.bfloat16)
    weight: Any = Weight(jax.random.normal(keys[2], (depth, width), jnp.bfloat16) * 0.02)
    if given.get("int4"):
        weight, _ = int4_weight(0, depth, width, group=128, zeros=False)
    gain = jax.random.normal(keys[3], (width,), jnp.bfloat16)
    ops = replace(KERNEL, **{"rms_norm": "mosaic_gpu"} | given["ops"])
    bias = gain if given["bias"] else None
    next_norm = Norm(gain, 1e-5, (weight,)) if given["norm"] else None
    got = layers.add_projection(stream, x, weight, ops, bias=bias, next_norm=next_norm)
    assert found == ([(2, rows, width)] if takes else [])
    assert (got.normed is not None) == takes
    if got.normed is not None:
        check_sum_and_norm(got, stream, x, weight, gain)


def check_sum_and_norm(
    got: layers.ResidualStream, stream: jax.Array, x: jax.Array, weight: Weight, gain: jax.Array
) -> None:
    """Compare the sum with float64's, rounded once, and the norm with that of the sum."""
    operands = (np.asarray(a, np.float64) for a in (x, weight.values, stream))
    rows, matrix, residual = operands
    np.testing.assert_allclose(
        np.asarray(got.x, np.float64), residual + rows @ matrix, rtol=2.0**-8, atol=2.0**-12
    )
    alone = layers.normed_values(got.x, Norm(gain, 1e-5), REFERENCE_OPS)
    np.testing.assert_allclose(
        np.asarray(got.normed, np.float32), np.asarray(alone, np.float32), rtol=2.0**-7, atol=1e-6
    )


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 128, 256])
def test_a_product_in_parts_is_float64s_on_the_gpu(rows: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (1, rows, 14336), jnp.bfloat16)
    stream = jax.random.normal(keys[1], (1, rows, 4096), jnp.bfloat16)
    weight = Weight(jax.random.normal(keys[2], (14336, 4096), jnp.bfloat16) * 0.02)
    gain = jax.random.normal(keys[3], (4096,), jnp.bfloat16)
    ops = replace(KERNEL, rms_norm="mosaic_gpu")
    norm = Norm(gain, 1e-5)

    @jax.jit
    def project(stream: jax.Array, x: jax.Array, weight: Weight) -> layers.ResidualStream:
        return layers.add_projection(stream, x, weight, ops, next_norm=norm)

    got = project(stream, x, weight)
    assert got.normed is not None
    check_sum_and_norm(got, stream, x, weight, gain)


def test_an_mlp_of_many_rows_is_the_reference_within_rounding() -> None:
    """With the padding on the way in and out: 250 rows."""
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (50, 5, 128), jnp.bfloat16)

    def weight(key, *shape):
        values = jax.random.normal(key, shape, jnp.bfloat16)
        return Weight(values * jnp.asarray(shape[0] ** -0.5, jnp.bfloat16))

    layer = {
        "gate_proj": weight(keys[1], 128, 64),
        "up_proj": weight(keys[2], 128, 64),
        "down_proj": weight(keys[3], 64, 128),
    }
    layer |= {"post_attention_layernorm": jnp.ones(128, jnp.bfloat16)}
    expected = add_mlp(layer, 1e-5, x, REFERENCE_OPS).x
    with interpreted():
        got = add_mlp(layer, 1e-5, x, KERNEL).x
    # Values up to 5, two of whose ulps are 2^-4: the activation is rounded otherwise, and so may
    # the sum be.
    np.testing.assert_allclose(
        np.asarray(got).astype(np.float32), np.asarray(expected).astype(np.float32), atol=2.0**-4
    )
    assert got.shape == x.shape


@pytest.mark.parametrize(
    ("batch", "rows", "idle"),
    [
        (1, 7, 0),
        (1, 8, 0),
        (1, 9, 7),
        (2, 6, 2),
        (3, 7, 1),
        (4, 7, 1),
        (4, 5, 1),
        (4, 8, 0),
        (8, 7, 0),
        (16, 4, 0),
        (16, 7, 1),
        (16, 8, 0),
        (32, 7, 1),
    ],
)
def test_idle_rows_give_gate_and_up_a_kernel_that_pads_nothing(
    batch: int, rows: int, idle: int
) -> None:
    assert layers.idle_rows(batch, rows, KERNEL) == idle
    assert layers.idle_rows(batch, rows, REFERENCE_OPS) == 0
    gate = jax.ShapeDtypeStruct((4096, 12288), jnp.bfloat16)
    operands = layers._Operands(Weight, (gate, gate))
    assert chosen(batch * (rows + idle), 4096, operands, swiglu=True) == ("mosaic_gpu", 0)


def chosen(
    rows: int, depth: int, operands: layers._Operands, *, swiglu: bool = False
) -> tuple[str, int]:
    """Implementation and padding of a product with nothing else fused."""
    return layers._choose_backend(
        jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16),
        operands,
        KERNEL,
        layers._Form(jnp.bfloat16, swiglu=swiglu),
        has_bias=False,
        has_residual=False,
        is_normed=False,
        prepares_norm=False,
        in_order=False,
    )


@pytest.mark.parametrize(("batch", "rows"), [(9, 7), (12, 7), (16, 5), (64, 7)])
def test_no_idle_rows_where_they_win_no_kernel(batch: int, rows: int) -> None:
    assert layers.idle_rows(batch, rows, KERNEL) == 0


@pytest.mark.parametrize(("rows", "residual"), [(4, True), (4, False), (80, True)])
def test_a_bias_is_added_before_the_product_is_rounded(rows: int, residual: bool) -> None:
    """By the kernel of few rows, and by XLA for many: what rounding takes off is left."""
    keys = jax.random.split(jax.random.key(0), 2)
    one = jax.random.normal(keys[0], (128,), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (128, 128), jnp.bfloat16)
    product = one.astype(jnp.float32) @ weight.astype(jnp.float32)
    bias = -product.astype(jnp.bfloat16)
    x = jnp.broadcast_to(one, (1, rows, 128))
    stream = jnp.full((1, rows, 128), 2.0**-8 if residual else 0.0, jnp.bfloat16)
    with interpreted():
        if residual:
            got = layers.add_projection(stream, x, Weight(weight), KERNEL, bias=bias).x
        else:
            got = layers.project(x, (Weight(weight),), KERNEL, bias=bias)
    left = product + bias.astype(jnp.float32)
    expected = np.broadcast_to(np.asarray(left + stream[0, 0].astype(jnp.float32)), got.shape)
    assert np.abs(np.asarray(left)).mean() > 0.005
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=2.0**-7, atol=2.0**-12)


def test_rows_are_padded_to_what_multiplies_them() -> None:
    """Of fp8: cuBLAS, but a kernel where blocks have scales."""
    padded = {
        (form, rows): chosen(rows, 1024, layers._Operands.of((fp8_weight(0, 128, 1024, form),)))
        for form in ("channel", "block")
        for rows in (60, 72)
    }
    assert padded == {
        ("channel", 60): ("mosaic_gpu", 4),
        ("channel", 72): ("mosaic_gpu", 8),
        ("block", 60): ("mosaic_gpu", 4),
        ("block", 72): ("mosaic_gpu", 0),
    }
