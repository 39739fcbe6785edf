"""The experts' op: the reference and the kernel equal float64 however rows are routed; a row's bits
do not depend on its neighbours."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8_matmul.weight import Fp8Weight
from pallas_kernels.int4_matmul.weight import Int4Weight
from pallas_kernels.moe import (
    IMPLEMENTATIONS,
    MAX_ROWS,
    Inputs,
    Mxfp4Weight,
    experts,
    unsupported,
)
from pallas_kernels.moe.shapes import SHAPES, Shape, bytes_moved, make_inputs, route
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic
from tests.support.slow import slow_unless

implementations = by_implementation(IMPLEMENTATIONS)

# Largest error, in units of the value's size plus the root mean square of the result. bfloat16
# rounds to within 2^-8: gate, up and the activation of every term of down's sum (they average out),
# down's product, the sum. The clamped gate multiplies by up to 8.
TOLERANCE = {"silu": 4 * 2.0**-8, "clamped": 8 * 2.0**-8, "clamped_silu": 4 * 2.0**-8}
# The same for the median, which a wrong expert, weight or tile moves.
MEDIAN = {"silu": 2.0**-8, "clamped": 2.0**-8, "clamped_silu": 2.0**-8}

# Small enough for the interpreter.
SMALL = {
    "three rows": Shape(3, 8, 2, 128, 64),
    "eight rows of one choice": Shape(8, 8, 2, 64, 64, routing="same"),
    "every expert hit, few rows": Shape(
        4, 8, 2, 64, 128, gate="clamped", bias=True, routing="spread"
    ),
    "more than 32 experts": Shape(6, 34, 6, 64, 64, routing="spread"),
    "one row, one expert": Shape(1, 4, 1, 64, 64, gate="clamped_silu"),
    "nine rows": Shape(9, 40, 2, 128, 64, bias=True),
    "every expert hit, many rows": Shape(
        16, 4, 2, 64, 128, gate="clamped", bias=True, routing="spread"
    ),
    "one expert of 24 rows": Shape(24, 4, 1, 64, 64, gate="clamped", routing="same"),
    "one expert of 70 rows": Shape(
        70, 4, 2, 64, 64, gate="clamped_silu", bias=True, routing="same"
    ),
}


# Those of experts in codes are in test_expert_codes.py.
UNSCALED = [name for name, shape in SHAPES.items() if shape.codes is None]

# One program a shape, where each of the reference's operations would be one.
compiled = jax.jit(experts, static_argnames="implementation")


def run(inputs: Inputs, implementation: str = "mosaic_gpu") -> np.ndarray:
    """The public op's result, widened without loss."""
    if implementation == "reference":
        return np.asarray(compiled(inputs, implementation=implementation)).astype(np.float32)
    with interpreted():
        return np.asarray(experts(inputs, implementation=implementation)).astype(np.float32)


def plain(inputs: Inputs) -> Inputs:
    """The same inputs, with packed experts dequantised."""
    weights = {name: getattr(inputs, name) for name in ("gate_up", "down")}
    arrays = {
        name: weight.to_array(inputs.x.dtype) if isinstance(weight, Mxfp4Weight) else weight
        for name, weight in weights.items()
    }
    return dataclasses.replace(inputs, **arrays)


def ground_truth(inputs: Inputs) -> np.ndarray:
    """float64 [rows, D]; nothing is rounded on the way."""
    inputs = plain(inputs)
    x, weights, gate_up, down = (
        np.asarray(a).astype(np.float64)
        for a in (inputs.x, inputs.weights, inputs.gate_up, inputs.down)
    )
    biases = [inputs.gate_up_bias, inputs.down_bias]
    gate_up_bias, down_bias = (
        np.zeros(len(down)) if b is None else np.asarray(b).astype(np.float64) for b in biases
    )
    out = np.zeros_like(x)
    for row, chosen in enumerate(np.asarray(inputs.ids)):
        for k, weight in enumerate(weights[row]):
            expert = chosen[k]
            gate, up = np.split(x[row] @ gate_up[expert] + gate_up_bias[expert], 2)
            if inputs.gate != "silu":
                gate, up = np.minimum(gate, 7.0), np.clip(up, -7.0, 7.0)
            inner = (
                (up + 1) * gate / (1 + np.exp(-1.702 * gate))
                if inputs.gate == "clamped"
                else up * gate / (1 + np.exp(-gate))
            )
            out[row] += weight * (inner @ down[expert] + down_bias[expert])
    return out


def assert_close(shape: Shape, got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape and np.isfinite(got).all()
    error = np.abs(got - expected) / (np.abs(expected) + np.sqrt(np.square(expected).mean()))
    worst, median = float(error.max()), float(np.median(error))
    assert worst <= TOLERANCE[shape.gate] and median <= MEDIAN[shape.gate], (worst, median)


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs, implementation), ground_truth(inputs))


@needs_mosaic
@pytest.mark.parametrize("name", ["every expert hit, few rows", "every expert hit, many rows"])
def test_rings_run_on_from_item_to_item(name: str) -> None:
    """Fewer CTAs than items, fewer stages than steps; the bits are those of the tuning that is
    chosen."""
    from pallas_kernels.moe import mosaic_gpu

    shape = dataclasses.replace(
        SMALL[name], rows=SMALL[name].rows // 2 + 1, hidden=192, num_experts=4
    )
    inputs = one_term_a_step(make_inputs(shape, seed=1))
    tuning = mosaic_gpu.Tuning(64, 2, 3)
    with interpreted():
        got = np.asarray(mosaic_gpu.experts(inputs, tunings=(tuning, tuning))).astype(np.float32)
    assert_close(shape, got, ground_truth(inputs))
    np.testing.assert_array_equal(got, run(inputs))


@needs_mosaic
def test_ids_may_have_more_columns_than_weights() -> None:
    inputs = make_inputs(SMALL["three rows"], seed=2)
    ids = jnp.pad(inputs.ids, ((0, 0), (0, 6)), constant_values=-1)
    wider = dataclasses.replace(inputs, ids=ids)
    for implementation in IMPLEMENTATIONS:
        np.testing.assert_array_equal(run(wider, implementation), run(inputs, implementation))


HALVES = {
    "few rows": Shape(5, 8, 3, 64, 64, bias=True),
    "few rows of one choice": Shape(3, 8, 2, 64, 64, routing="same"),
    "more than 32 experts": Shape(6, 68, 6, 64, 64, routing="spread"),
    "many rows": Shape(20, 8, 3, 64, 64, gate="clamped", bias=True),
    "many rows of one choice": Shape(40, 4, 2, 64, 64, routing="same"),
}


def part_of(inputs: Inputs, first: int, count: int) -> Inputs:
    """The inputs of a device that holds `count` experts; the others are not there to read."""
    held = {
        name: jax.tree.map(lambda a: a[first : first + count], array)
        for name in ("gate_up", "down", "gate_up_bias", "down_bias")
        for array in [getattr(inputs, name)]
    }
    return dataclasses.replace(inputs, first_expert=jnp.int32(first), **held)


@pytest.mark.parametrize("name", HALVES)
def test_the_sum_of_two_halves_is_the_whole(name: str) -> None:
    """In float32, up to the order of the sum."""
    shape = HALVES[name]
    inputs = make_inputs(shape, seed=len(name))
    arrays = ("x", "gate_up", "down", "gate_up_bias", "down_bias")
    wide = {
        n: getattr(inputs, n).astype(jnp.float32) for n in arrays if getattr(inputs, n) is not None
    }
    inputs = dataclasses.replace(inputs, **wide)
    half = shape.num_experts // 2
    halves = [run(part_of(inputs, first, half), "reference") for first in (0, half)]
    whole = run(inputs, "reference")
    np.testing.assert_allclose(sum(halves), whole, rtol=1e-5, atol=1e-5)
    assert any(np.abs(part - whole).max() > 0.1 for part in halves)


@implementations
@pytest.mark.parametrize("name", slow_unless(HALVES.keys() - {"few rows of one choice"}, HALVES))
def test_a_part_is_the_sum_over_its_experts_alone(name: str, implementation: str) -> None:
    """The experts in the middle: the same as weights of 0 for the others, and exact zeros for a row
    that chose others alone."""
    shape = HALVES[name]
    inputs = make_inputs(shape, seed=len(name))
    first, count = shape.num_experts // 4, shape.num_experts // 2
    ids = np.asarray(inputs.ids)
    here = (ids >= first) & (ids < first + count)
    masked = dataclasses.replace(inputs, weights=jnp.where(here, inputs.weights, 0))
    expected = run(masked, implementation)
    got = run(part_of(inputs, first, count), implementation)
    # The kernel adds a row's experts in the order of its ids, the reference in XLA's.
    limits = (0.0, 0.0) if implementation == "mosaic_gpu" else (2.0**-7, 1e-3)
    np.testing.assert_allclose(got, expected, *limits)
    np.testing.assert_array_equal(got[~here.any(axis=1)], 0.0)


def one_term_a_step(inputs: Inputs, step: int = 64) -> Inputs:
    """One place in `step` of the depth is not zero: no wgmma adds more than one term, whose order
    the CPU's products choose by the rows."""

    x, down = inputs.x, inputs.down
    thin = (
        jnp.where(np.arange(x.shape[1]) % step == 0, x, 0),
        jnp.where((np.arange(down.shape[1]) % step == 0)[:, None], down, 0),
    )
    return dataclasses.replace(inputs, x=thin[0], down=thin[1])


def rows_of(inputs: Inputs, rows: np.ndarray | slice) -> Inputs:
    """Some of the rows."""
    some = {name: getattr(inputs, name)[rows] for name in ("x", "ids", "weights")}
    return dataclasses.replace(inputs, **some)


@needs_mosaic
def test_a_rows_bits_do_not_depend_on_its_neighbours() -> None:
    """One row, a few and many, in another order, and beside rows that all choose what it chose."""
    inputs = one_term_a_step(
        make_inputs(Shape(20, 4, 2, 128, 128, gate="clamped", bias=True), seed=3)
    )

    def take(rows: list[int]) -> np.ndarray:
        return run(rows_of(inputs, np.asarray(rows)))

    everything = take(list(range(20)))
    for rows in (
        [0],
        [7, 3, 19],
        list(range(11)),
        np.random.default_rng(0).permutation(20).tolist(),
    ):
        np.testing.assert_array_equal(take(rows), everything[rows], err_msg=f"rows {rows}")
    ids = jnp.broadcast_to(inputs.ids[:1], inputs.ids.shape)
    crowd = dataclasses.replace(inputs, ids=ids)
    np.testing.assert_array_equal(run(crowd)[0], everything[0])


def plan(ids: np.ndarray, count: int) -> list[np.ndarray]:
    from pallas_kernels.moe import mosaic_gpu

    return [np.asarray(a) for a in jax.jit(mosaic_gpu.plan_blocks, static_argnums=1)(ids, count)]


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "routing"),
    [(9, "random"), (9, "same"), (40, "spread"), (256, "random"), (256, "same")],
)
def test_the_plan_has_every_choice_once_in_a_block_of_its_expert(rows: int, routing: str) -> None:
    from pallas_kernels.moe import mosaic_gpu

    ids = route(Shape(rows, 24, 4, 64, 64, routing=routing), seed=rows)
    table, place, row_at = plan(ids, 24)
    found, blocks = table[0], table[1:]
    assert (
        not blocks[found:].any()
        and len(row_at) == mosaic_gpu.num_places(rows * 4, 24)
        and found <= mosaic_gpu.num_blocks(rows * 4, 24)
    )
    expert_at, taken = np.full(len(row_at), -1), np.zeros(len(row_at), int)
    for block in blocks[:found]:
        expert, size = block & 1023, mosaic_gpu.SIZES[block >> 10 & 3]
        places = slice((block >> 12) * 8, (block >> 12) * 8 + size)
        assert places.stop <= len(row_at) and (expert_at[places] == -1).all(), (
            "blocks must not overlap"
        )
        expert_at[places] = expert
        used = np.isin(np.arange(len(row_at))[places], place).sum()
        assert used > {8: 0, 16: 8, 32: 16}[size], "no smaller size would do"
    for row, chosen in enumerate(np.asarray(ids)):
        for k, expert in enumerate(chosen):
            assert expert_at[place[row, k]] == expert and row_at[place[row, k]] == row
            taken[place[row, k]] += 1
    assert taken.max() == 1 and taken.sum() == rows * 4


@needs_mosaic
def test_choices_that_fill_the_plan_to_its_bounds_fit() -> None:
    """Experts with just more rows than a size takes pad most."""
    from pallas_kernels.moe import mosaic_gpu

    for counts in ([1] * 60, [17] * 6, [33] * 3, [33, 17, 9, 1], [9] * 12, [49, 17, 1, 1]):
        counts, rows = [*counts, 112 - sum(counts)], 112
        table, place, row_at = plan(
            np.repeat(np.arange(len(counts)), counts)[:, None].astype(np.int32), len(counts)
        )
        starts, sizes = (table[1:] >> 12) * 8, np.asarray(mosaic_gpu.SIZES)[table[1:] >> 10 & 3]
        assert (starts + sizes)[: table[0]].max() <= len(row_at) and place.max() < len(row_at)
        np.testing.assert_array_equal(row_at[place[:, 0]], np.arange(rows))


@needs_mosaic
@pytest.mark.parametrize("name", UNSCALED)
def test_tuning_fits(name: str) -> None:
    from pallas_kernels.moe import mosaic_gpu

    shape = SHAPES[name]
    few = shape.rows <= mosaic_gpu.FEW_ROWS
    if shape.mxfp4:
        for depth, width, products in (
            (shape.hidden, shape.size, 2),
            (shape.size, shape.hidden, 1),
            (64, 64, 1),
        ):
            tuning = mosaic_gpu.choose_packed_tuning(depth, width, products, few)
            assert tuning.stages >= 2 and depth % tuning.tile_k == 0
            assert tuning.tiles * 64 <= width
            used = mosaic_gpu.smem_bytes(tuning, products, few, packed=True)
            assert used <= mosaic_gpu.MAX_SMEM // (tuning.ctas // 132)
        return
    for ctas_an_sm in (1, 2):
        for depth, products in ((shape.hidden, 2), (shape.size, 1)):
            tuning = mosaic_gpu.choose_tuning(depth, products, few, ctas_an_sm)
            assert tuning is not None and tuning.stages >= 4 and depth % tuning.tile_k == 0
            assert mosaic_gpu.smem_bytes(tuning, products, few) <= mosaic_gpu.MAX_SMEM // ctas_an_sm


def struct(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def fp8(*scales: int, activation: Any = "token") -> Any:
    codes = struct(8, 128, 128, dtype=jnp.float8_e4m3fn)
    return Fp8Weight(codes, struct(*scales, dtype=jnp.float32), activation=activation)


def int4(scales: tuple[int, ...], zeros: tuple[int, ...] | None = None) -> Any:
    words = struct(8, 8, 2, 128, dtype=jnp.int32)
    of_groups = None if zeros is None else struct(*zeros, dtype=jnp.uint8)
    return Int4Weight(words, struct(*scales, dtype=jnp.float32), of_groups)


ARGUMENTS = {
    "x": struct(4, 128),
    "ids": struct(4, 2, dtype=jnp.int32),
    "weights": struct(4, 2, dtype=jnp.float32),
    "gate_up": struct(8, 128, 128),
    "down": struct(8, 64, 128),
}
FITS = Inputs(**ARGUMENTS)
DOES_NOT_FIT = {
    r"x: expected \(4, 128\), got \(3, 128\)": {"x": struct(3, 128)},
    r"gate_up: expected \(8, 128, 128\), got \(8, 128, 64\)": {"gate_up": struct(8, 128, 64)},
    r"down: expected \(8, 64, 128\), got \(7, 64, 128\)": {"down": struct(7, 64, 128)},
    r"ids: expected \(4, 2\) or more columns, got \(4, 1\)": {"ids": struct(4, 1, dtype=jnp.int32)},
    r"gate_up_bias: expected \(8, 128\), got \(8, 64\)": {"gate_up_bias": struct(8, 64)},
    r"down_bias: expected \(8, 128\), got \(128,\)": {"down_bias": struct(128)},
    r"first_expert: expected an int32 scalar, got int32 \(2,\)": {
        "first_expert": struct(2, dtype=jnp.int32)
    },
    r"gate_up scales: expected \(8, 128\) or \(8, 1, 1\), got \(8, 1\)": {"gate_up": fp8(8, 1)},
    "gate_up: expected token or block activations, got static": {
        "gate_up": fp8(8, 128, activation="static")
    },
    r"gate_up scales: expected \[8, groups that divide 128, 128\], got \(8, 3, 128\)": {
        "gate_up": int4((8, 3, 128))
    },
    r"gate_up zeros: expected \(8, 2, 128\), got \(8, 1, 128\)": {
        "gate_up": int4((8, 2, 128), (8, 1, 128))
    },
    "gate: expected one of silu, clamped, clamped_silu, got 'gelu'": {"gate": "gelu"},
    "implementation: expected one of reference, mosaic_gpu, got 'fast'": {"implementation": "fast"},
}


@pytest.mark.parametrize("message", DOES_NOT_FIT)
def test_what_does_not_fit_is_an_error(message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        call(experts, FITS, DOES_NOT_FIT[message])


@needs_mosaic
def test_what_the_kernel_cannot_multiply_it_says() -> None:
    gate_up, down = ARGUMENTS["gate_up"], ARGUMENTS["down"]
    assert unsupported(4, 2, gate_up, down, jnp.bfloat16) is None
    assert (
        unsupported(4, 2, gate_up, down, jnp.float32)
        == "expected bfloat16 operands, got float32, bfloat16 and bfloat16"
    )
    assert (
        unsupported(MAX_ROWS + 1, 2, gate_up, down, jnp.bfloat16)
        == "expected 1 to 256 rows, got 257"
    )
    assert "got 9 of 8" in str(unsupported(4, 9, gate_up, down, jnp.bfloat16))
    odd = struct(8, 96, 128), struct(8, 64, 96)
    assert (
        unsupported(4, 2, *odd, jnp.bfloat16)
        == "expected a hidden and an intermediate size that are multiples of 64, got 96 and 64"
    )


def test_the_kernel_needs_a_gpu() -> None:
    if jax.default_backend() == "gpu":
        pytest.skip("there is one here")
    with pytest.raises(
        ValueError, match="^moe, implementation 'mosaic_gpu': expected an NVIDIA GPU, got cpu$"
    ):
        experts(FITS, implementation="mosaic_gpu")


def test_bytes_are_the_experts_hit_and_the_rows() -> None:
    same = Shape(3, 8, 2, 128, 64, routing="same")
    assert bytes_moved(same) == 2 * (2 * 3 * 128 * 64 + 2 * 3 * 128) + 8 * 6
    every = dataclasses.replace(same, rows=4, routing="spread", bias=True)
    assert bytes_moved(every) == 2 * (8 * (3 * 128 * 64 + 2 * 64 + 128) + 2 * 4 * 128) + 8 * 8


# ---- on the device


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "routing"),
    [
        *((name, "random") for name in UNSCALED),
        *(
            (name, way)
            for name in UNSCALED
            if "6" in name.split()[-1]
            for way in ("same", "spread")
        ),
    ],
)
def test_equals_the_float32_experts_at_real_sizes(name: str, routing: str) -> None:
    shape = dataclasses.replace(SHAPES[name], routing=routing)
    inputs = make_inputs(shape, seed=4)
    got = run(inputs)
    inputs = plain(inputs)
    hit = np.unique(inputs.ids)  # in float32 no more than these fit beside the rest
    narrow = {
        key: None if getattr(inputs, key) is None else getattr(inputs, key)[hit].astype(jnp.float32)
        for key in ("gate_up", "down", "gate_up_bias", "down_bias")
    }
    with jax.default_matmul_precision("highest"):
        ids = jnp.asarray(np.searchsorted(hit, inputs.ids), jnp.int32)
        wide = dataclasses.replace(inputs, x=inputs.x.astype(jnp.float32), ids=ids, **narrow)
        expected = jax.jit(experts)(wide)
    assert_close(shape, got, np.asarray(expected).astype(np.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt-oss-20b rows 96", "glm-4.7-flash rows 96"])
def test_a_rows_bits_do_not_depend_on_its_neighbours_at_real_sizes(name: str) -> None:
    inputs = make_inputs(SHAPES[name], seed=5)
    everything = run(inputs)
    for rows in (1, 4, 8, 16, 64):
        some = rows_of(inputs, slice(rows))
        for _ in range(3):
            np.testing.assert_array_equal(
                run(some), everything[:rows], err_msg=f"{rows} of 96 rows"
            )
