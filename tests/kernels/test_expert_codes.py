"""Experts in fp8 and int4: the reference and the kernel equal float64 sums of what the codes of
weights and of rows stand for.

Each of a kernel's two products is compared by itself. Hopper's tensor cores keep about 14 bits of a
sum of fp8 products, which moves a hidden value to the next bfloat16 now and then. If it is the
largest one of its row, the row's scale moves, and a twelfth of its codes with it: by 13 % each. So
the second product is compared with a float64 product of the kernel's own codes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.fp8_matmul import Fp8Weight, Rows
from pallas_kernels.int4_matmul import Int4Weight
from pallas_kernels.moe import IMPLEMENTATIONS, Inputs, experts, unsupported
from pallas_kernels.moe.shapes import SHAPES, Shape, make_inputs, random_codes
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.kernels.test_moe import part_of, rows_of
from tests.support.slow import slow

# Largest error, in units of the value's size plus the root mean square of the result, and the
# median: the roundings to bfloat16 before codes of the activation are the oracle's too, so those of
# down's product and of the sum remain. A gate that is rounded the other way moves a code rarely.
TOLERANCE, MEDIAN = 4 * 2.0**-8, 2.0**-8
# Largest share of the hidden values whose code is not the oracle's: 0.016 with sums of 14 bits.
OTHER_CODES = 0.04

# Small enough for the interpreter.
SMALL = {
    "fp8, few rows": Shape(3, 8, 2, 128, 256, codes="fp8"),
    "fp8, many rows": Shape(9, 4, 2, 128, 128, codes="fp8", bias=True),
    "blocks, few rows": Shape(2, 4, 2, 384, 256, codes="fp8-block", routing="same"),
    "blocks, many rows": Shape(20, 2, 1, 256, 128, codes="fp8-block", routing="same"),
    "int4, few rows": Shape(3, 8, 2, 128, 128, codes="int4"),
    "int4 with zeros, many rows": Shape(9, 3, 2, 256, 64, codes="int4 zeros", bias=True),
}
REAL = [name for name, shape in SHAPES.items() if shape.codes is not None]
compiled = jax.jit(experts, static_argnames="implementation")


def run(inputs: Inputs, implementation: str) -> np.ndarray:
    if implementation == "reference":
        return np.asarray(compiled(inputs)).astype(np.float64)
    with interpreted():
        return np.asarray(experts(inputs, implementation=implementation)).astype(np.float64)


def rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def quantised(row: np.ndarray, weight: Any) -> np.ndarray:
    """What the codes of a row stand for, as a matrix of this form multiplies it."""
    if isinstance(weight, Int4Weight):
        return row
    depth = row.size if weight.activation == "token" else 128
    codes, scales = codes_of(row.astype(np.float32).reshape(-1, depth))
    return (codes.astype(np.float64) * scales).reshape(-1)


def codes_of(parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes of float32 [parts, depth], and a scale for each part."""
    largest = np.abs(parts).max(axis=1, keepdims=True)
    scales = np.where(largest == 0, np.float32(1), largest / np.float32(448))
    return np.clip(parts / scales, -448, 448).astype(ml_dtypes.float8_e4m3fn), scales


def matrix_of(weight: Any, expert: int) -> np.ndarray:
    """float64 [in, out]: every product of a code and its scale fits float32 twice over."""
    own = jax.tree.map(lambda a: a[expert], weight)
    if isinstance(own, Fp8Weight):
        scales = np.asarray(jnp.broadcast_to(own.spread(), own.codes.shape)).astype(np.float64)
        return (np.asarray(own.codes).astype(np.float64) * scales).T
    zeros = 8 if own.zeros is None else np.repeat(np.asarray(own.zeros), own.group, axis=0)
    scales = np.repeat(np.asarray(own.scales).astype(np.float64), own.group, axis=0)
    return (np.asarray(own.codes()).astype(np.float64) - zeros) * scales


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Operand of down for each row and each of its experts, [rows, top_k, size].

    values: float64
    codes:  of fp8, as float64; of int4 the values
    steps:  between neighbouring codes, of int4 0
    """

    values: np.ndarray
    codes: np.ndarray
    steps: np.ndarray

    @classmethod
    def of(cls, codes: np.ndarray, scales: np.ndarray) -> Hidden:
        """scales: broadcast over the codes"""
        exponents = np.frexp(np.maximum(np.abs(codes), 2.0**-6))[1] - 1  # 2**-6: subnormal below
        return cls(codes * scales, codes, 2.0 ** (exponents - 3) * scales)


def chosen(inputs: Inputs) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Each expert that is here, the rows that chose it, and its index among their choices."""
    ids = np.asarray(inputs.ids)[:, : inputs.top_k]
    own = ids - (0 if inputs.first_expert is None else int(inputs.first_expert))
    for expert in range(inputs.down.shape[0]):
        rows, index = np.nonzero(own == expert)
        if rows.size:
            yield expert, rows, index


def bias_of(bias: jax.Array | None, expert: int) -> np.ndarray | float:
    return 0.0 if bias is None else np.asarray(bias[expert]).astype(np.float64)


def hidden_truth(inputs: Inputs) -> np.ndarray:
    """float64 [rows, top_k, size], the activation's results: they, gate and up are rounded to
    bfloat16. Zeros for the experts of other devices."""
    x = np.asarray(inputs.x).astype(np.float64)
    x = np.stack([quantised(row, inputs.gate_up) for row in x])
    found = np.zeros((len(x), inputs.top_k, inputs.down.shape[1]))
    for expert, rows, index in chosen(inputs):
        sums = x[rows] @ matrix_of(inputs.gate_up, expert)
        gate, up = np.split(rounded(sums + bias_of(inputs.gate_up_bias, expert)), 2, axis=1)
        found[rows, index] = rounded(gate / (1 + np.exp(-gate)) * up)
    return found


def output_truth(inputs: Inputs, inner: np.ndarray) -> np.ndarray:
    """float64 [rows, D] of the rows [rows, top_k, size] that down multiplies."""
    out = np.zeros(inputs.x.shape)
    weights = np.asarray(inputs.weights).astype(np.float64)
    for expert, rows, index in chosen(inputs):
        products = inner[rows, index] @ matrix_of(inputs.down, expert)
        products += bias_of(inputs.down_bias, expert)
        out[rows] += weights[rows, index, None] * products
    return out


def ground_truth(inputs: Inputs) -> np.ndarray:
    """float64 [rows, D]."""
    values = hidden_truth(inputs)
    inner = np.apply_along_axis(quantised, -1, values, inputs.down)
    return output_truth(inputs, inner)


def hidden_of_kernel(inputs: Inputs) -> Hidden:
    from pallas_kernels.moe import mosaic_gpu

    @jax.jit
    def run(inputs: Inputs) -> tuple[jax.Array | Rows, jax.Array]:
        plan = mosaic_gpu.plan_of(inputs)
        return mosaic_gpu.hidden(inputs, plan), plan.place[:, : inputs.top_k]

    with interpreted():
        inner, place = run(inputs)
    at = np.asarray(place)
    if not isinstance(inner, Rows):
        values = np.asarray(inner).astype(np.float64)[at]
        return Hidden(values, values, np.zeros_like(values))
    codes = np.asarray(inner.codes).astype(np.float64)
    scales = np.broadcast_to(np.asarray(inner.spread()).astype(np.float64), codes.shape)
    return Hidden.of(codes[at], scales[at])


def assert_hidden_is_close(got: Hidden, values: np.ndarray, weight: Any) -> None:
    """Within half a step of a code of the oracle's values, and with its codes nearly everywhere."""
    beyond = np.maximum(np.abs(got.values - values) - got.steps / 2, 0)
    error = beyond / (np.abs(values) + np.sqrt(np.square(values).mean()))
    assert np.isfinite(got.values).all() and error.max() <= TOLERANCE, error.max()
    if isinstance(weight, Int4Weight):
        assert np.median(error) <= MEDIAN, np.median(error)
        return
    depth = values.shape[-1] if weight.activation == "token" else 128
    parts = values.astype(np.float32).reshape(-1, depth)
    codes = codes_of(parts)[0].astype(np.float64)
    other = float((codes.reshape(values.shape) != got.codes).mean())
    assert other <= OTHER_CODES, other


def assert_products_are_close(inputs: Inputs) -> None:
    """Both products of the kernel; the second one's rows are those that the first one makes."""
    inner = hidden_of_kernel(inputs)
    assert_hidden_is_close(inner, hidden_truth(inputs), inputs.down)
    assert_close(run(inputs, "mosaic_gpu"), output_truth(inputs, inner.values))


def assert_close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape and np.isfinite(got).all()
    error = np.abs(got - expected) / (np.abs(expected) + np.sqrt(np.square(expected).mean()))
    worst, median = float(error.max()), float(np.median(error))
    assert worst <= TOLERANCE and median <= MEDIAN, (worst, median)


# The interpreter's cases are few: one of each part of the kernel.
OFTEN = ("fp8, few rows", "blocks, few rows", "blocks, many rows", "int4 with zeros, many rows")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        *((name, "reference") for name in SMALL),
        *(
            pytest.param(
                name,
                "mosaic_gpu",
                marks=[needs_mosaic] if name in OFTEN else [needs_mosaic, pytest.mark.slow],
            )
            for name in SMALL
        ),
    ],
)
def test_equals_float64(name: str, implementation: str) -> None:
    inputs = make_inputs(SMALL[name], seed=len(name))
    assert_close(run(inputs, implementation), ground_truth(inputs))


@needs_mosaic
@pytest.mark.parametrize(
    "name",
    [
        "blocks, few rows",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fp8, many rows", "int4 with zeros, many rows")
        ),
    ],
)
def test_each_product_equals_float64(name: str) -> None:
    assert_products_are_close(make_inputs(SMALL[name], seed=len(name)))


def test_a_device_with_some_experts_adds_those_alone() -> None:
    inputs = make_inputs(SMALL["int4, few rows"], seed=1)
    part = part_of(inputs, 2, 4)
    expected = ground_truth(part)
    assert np.abs(expected - ground_truth(inputs)).max() > 0.1
    for implementation in IMPLEMENTATIONS[: 1 if jax.__version_info__ < (0, 11) else 2]:
        assert_close(run(part, implementation), expected)


@needs_mosaic
@pytest.mark.parametrize("name", REAL)
def test_tuning_fits(name: str) -> None:
    from pallas_kernels.moe import mosaic_gpu
    from pallas_kernels.moe.mosaic_gpu import tuning as tunings

    shape = SHAPES[name]
    few = shape.rows <= mosaic_gpu.FEW_ROWS
    for depth, width, products in (
        (shape.hidden, shape.size, 2),
        (shape.size, shape.hidden, 1),
        (128, 128, 1),
    ):
        if shape.codes == "int4":
            weight: Any = jax.eval_shape(
                lambda d=depth, w=width, p=products: random_codes(
                    jax.random.key(0), "int4", (1, d, p * w)
                )
            )
            tuning = tunings.choose_int4_tuning(weight, width, products, few)
            assert tuning is not None
            used = tunings.int4_smem_bytes(tuning, weight, products, few)
        else:
            blocks = shape.codes == "fp8-block"
            tuning = tunings.choose_fp8_tuning(depth, width, products, few, blocks=blocks)
            assert tuning is not None
            used = tunings.fp8_smem_bytes(tuning, products, few)
            if blocks and products == 2:
                assert tuning.tiles == 2  # a scale of the result is that of 128 columns
        assert tuning.stages >= 2 and depth % tuning.tile_k == 0 and tuning.tiles * 64 <= width
        assert used <= mosaic_gpu.MAX_SMEM // (tuning.ctas // 132)


@needs_mosaic
def test_what_the_kernel_cannot_multiply_it_says() -> None:
    def weights(gate_up: str, down: str, hidden: int = 128, size: int = 128) -> tuple[Any, Any]:
        key = jax.random.key(0)
        return jax.eval_shape(
            lambda: (
                random_codes(key, gate_up, (4, hidden, 2 * size)),
                random_codes(key, down, (4, size, hidden)),
            )
        )

    def reason(*args: Any, dtype: Any = jnp.bfloat16, **sizes: int) -> str | None:
        return unsupported(4, 2, *weights(*args, **sizes), dtype)

    for form in ("fp8", "fp8-block", "int4", "int4 zeros"):
        assert reason(form, form) is None
    assert reason("fp8", "fp8", dtype=jnp.float32) == "expected bfloat16 rows, got float32"
    mixed = "expected gate_up and down of one form, got ['Fp8Weight', 'Int4Weight']"
    assert reason("fp8", "int4") == mixed
    scales = "expected scales of columns with tokens', or of blocks with blocks'"
    assert reason("fp8", "fp8-block") == scales
    widths = "expected a hidden and an intermediate size that are multiples of 128, got 128 and 192"
    assert reason("fp8", "fp8", size=192) == widths
    gate_up, down = weights("int4", "int4", hidden=64 * 3, size=64)
    odd = dataclasses.replace(gate_up, scales=jax.ShapeDtypeStruct((4, 6, 128), jnp.bfloat16))
    assert "groups that are multiples of 64 with float scales, got 32 with bfloat16 scales" in str(
        unsupported(4, 2, odd, down, jnp.bfloat16)
    )


@needs_mosaic
@pytest.mark.parametrize("rows", [slow(3), 20])
def test_steps_hold_whole_groups_or_parts_of_one(rows: int) -> None:
    """Groups of 192, which steps of 128 would cut."""
    inputs = make_inputs(Shape(rows, 3, 2, 384, 64, codes="int4 zeros"), seed=1)
    weight = inputs.gate_up
    assert isinstance(weight, Int4Weight) and weight.group == 64 and weight.zeros is not None
    weight = dataclasses.replace(weight, scales=weight.scales[:, ::3], zeros=weight.zeros[:, ::3])
    assert weight.group == 192
    assert_products_are_close(dataclasses.replace(inputs, gate_up=weight))


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in REAL if name.split()[-1] in ("4", "6", "64")])
def test_equals_float64_at_real_sizes(name: str) -> None:
    assert_products_are_close(make_inputs(SHAPES[name], seed=4))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["fp8", "fp8-block", "int4"])
def test_a_rows_bits_do_not_depend_on_its_neighbours(form: str) -> None:
    inputs = make_inputs(SHAPES[f"qwen3-30b-a3b {form} rows 96"], seed=5)
    everything = run(inputs, "mosaic_gpu")
    for rows in (1, 4, 8, 16, 64):
        some = run(rows_of(inputs, slice(rows)), "mosaic_gpu")
        np.testing.assert_array_equal(some, everything[:rows], err_msg=f"{rows} of 96 rows")
