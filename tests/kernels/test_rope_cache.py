"""Rotation and cache write: the reference equals float64 NumPy, the kernel equals the reference to
a rounding of bfloat16."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.packing import packed_size, unpack
from pallas_kernels.rope_cache import IMPLEMENTATIONS, Inputs, rope_and_write
from pallas_kernels.rope_cache.shapes import PAD_SLOT, SHAPES, Shape, bytes_moved, make_inputs
from tests.kernels.interpreter import by_implementation, call, interpreted

implementations = by_implementation(IMPLEMENTATIONS)

SMALL = {
    "decode": Shape(3, 4, num_heads=8, num_kv_heads=2, head_dim=128, block_size=8, masked=1),
    "one row": Shape(2, 1, num_heads=4, num_kv_heads=4, head_dim=64, block_size=8),
    "group of 3, 12 columns in 16": Shape(
        2, 4, num_heads=9, num_kv_heads=3, head_dim=64, block_size=8, masked=1
    ),
    "qk norm": Shape(2, 3, num_heads=4, num_kv_heads=2, head_dim=128, block_size=8, qk_norm=True),
    "unpacked prefill over three blocks": Shape(
        1, 20, num_heads=4, num_kv_heads=2, head_dim=64, block_size=8, packed=False
    ),
    "no queries": Shape(
        2, 3, num_heads=0, num_kv_heads=2, head_dim=128, block_size=8, qk_norm=True, packed=False
    ),
    "more than 64 heads": Shape(1, 2, num_heads=64, num_kv_heads=8, head_dim=64, block_size=8),
}

# Half an ulp of bfloat16, relative to the larger of the two values that a rotation mixes; with qk
# norm there are three roundings.
ROUNDING = {False: 2.0**-8, True: 3 * 2.0**-8}
FLIPPED = (
    2.0**-7
)  # a whole ulp: where two float32 sums in another order fall on either side of a rounding boundary


def run(inputs: Inputs, implementation: str) -> tuple[np.ndarray, ...]:
    """float32 (queries, keys' cache, values' cache)."""
    if implementation == "mosaic_gpu" and jax.default_backend() == "cpu":
        from pallas_kernels.rope_cache import mosaic_gpu

        with interpreted():
            out = mosaic_gpu.rope_and_write(inputs, pdl=False)
    else:
        out = rope_and_write(inputs, implementation=implementation)
    return tuple(np.asarray(x).astype(np.float32) for x in out)


def unpacked(shape: Shape, q: np.ndarray) -> np.ndarray:
    """[rows, num_heads, head_dim], without what pads packed queries."""
    if not shape.packed:
        return q
    group = shape.num_heads // shape.num_kv_heads
    assert q.shape == (
        shape.batch,
        shape.num_kv_heads,
        packed_size(shape.rows * group),
        shape.head_dim,
    )
    return np.asarray(unpack(jnp.asarray(q), shape.rows, shape.num_heads)).reshape(
        -1, shape.num_heads, shape.head_dim
    )


def ground_truth(shape: Shape, inputs: Inputs) -> tuple[np.ndarray, ...]:
    """float64 queries [rows, num_heads, head_dim], keys' and values' cache, one row at a time from
    the op's docstring."""
    qkv, cos, sin, k_cache, v_cache = (
        np.asarray(getattr(inputs, n)).astype(np.float64)
        for n in ("qkv", "cos", "sin", "k_cache", "v_cache")
    )
    slots, half = np.asarray(inputs.slot_mapping), shape.head_dim // 2
    queries = []
    for row in range(shape.total_rows):
        heads = qkv[row].reshape(-1, shape.head_dim)
        q, k, v = np.split(heads, (shape.num_heads, shape.num_heads + shape.num_kv_heads))
        rotated = []
        for x, gain in ((q, inputs.q_norm), (k, inputs.k_norm)):
            if gain is not None:
                x = (
                    x
                    / np.sqrt((x**2).mean(axis=1, keepdims=True) + inputs.eps)
                    * np.asarray(gain).astype(np.float64)
                )
            a, b = x[:, :half], x[:, half:]
            rotated.append(
                np.concatenate((a * cos[row] - b * sin[row], b * cos[row] + a * sin[row]), axis=1)
            )
        queries.append(rotated[0])
        if slots[row] < k_cache.shape[0] * shape.block_size:
            block, offset = divmod(slots[row], shape.block_size)
            k_cache[block, offset], v_cache[block, offset] = rotated[1], v
    return np.stack(queries), k_cache, v_cache


def assert_close(got: np.ndarray, expected: np.ndarray, rounding: float) -> None:
    half = expected.shape[-1] // 2
    mixed = np.maximum(np.abs(expected), np.roll(np.abs(expected), half, axis=-1))
    scale = np.where(mixed > 0, mixed, 1.0)
    error = np.abs(got - expected) / scale
    assert error.max(initial=0) <= rounding, (
        f"expected at most {rounding}, got {error.max()} at "
        f"{np.unravel_index(error.argmax(), error.shape)}"
    )


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    q, k, v = run(inputs, implementation)
    expected_q, expected_k, expected_v = ground_truth(shape, inputs)
    assert_close(unpacked(shape, q), expected_q, ROUNDING[shape.qk_norm])
    assert_close(k, expected_k, ROUNDING[shape.qk_norm])
    np.testing.assert_array_equal(v, expected_v)


@implementations
def test_slots_at_the_edges_of_blocks_and_outside_the_cache(implementation: str) -> None:
    check_slots(implementation)


@pytest.mark.gpu
def test_slots_at_the_edges_of_blocks_and_outside_the_cache_on_the_gpu() -> None:
    check_slots("mosaic_gpu")


def check_slots(implementation: str) -> None:
    """First and last slot of a block, last of the cache, the one after it, and a masked row's."""
    shape = Shape(6, 1, num_heads=2, num_kv_heads=2, head_dim=64, block_size=8)
    inputs = make_inputs(shape, seed=0)
    num_slots = inputs.k_cache.shape[0] * 8
    slots = jnp.asarray([0, 7, 8, num_slots - 1, num_slots, PAD_SLOT], jnp.int32)
    inputs = dataclasses.replace(inputs, slot_mapping=slots)
    _, k, v = run(inputs, implementation)
    _, expected_k, expected_v = ground_truth(shape, inputs)
    assert_close(k, expected_k, ROUNDING[False])
    np.testing.assert_array_equal(v, expected_v)
    untouched = [i for i in range(num_slots) if i not in (0, 7, 8, num_slots - 1)]
    before = np.asarray(inputs.k_cache).astype(np.float32).reshape(num_slots, 2, 64)
    np.testing.assert_array_equal(k.reshape(num_slots, 2, 64)[untouched], before[untouched])


@implementations
def test_packed_queries_are_the_unpacked_ones(implementation: str) -> None:
    shape = SMALL["group of 3, 12 columns in 16"]
    inputs = make_inputs(shape, seed=1)
    packed = run(inputs, implementation)[0]
    plain = run(dataclasses.replace(inputs, pack=None), implementation)[0]
    np.testing.assert_array_equal(unpacked(shape, packed), plain)


@implementations
def test_packed_queries_go_to_their_places(implementation: str) -> None:
    """Of three requests' rows, in any order; what no row goes to may hold anything."""
    shape = SMALL["group of 3, 12 columns in 16"]
    inputs = make_inputs(shape, seed=1)
    rows = shape.batch * shape.rows
    places = np.random.default_rng(0).permutation(3 * shape.rows)[:rows].astype(np.int32)
    moved = dataclasses.replace(inputs, places=jnp.asarray(places), num_requests=3)
    packed, *caches = run(moved, implementation)
    expected, *expected_caches = run(dataclasses.replace(inputs, pack=None), implementation)
    found = unpacked(dataclasses.replace(shape, batch=3), packed)
    np.testing.assert_array_equal(found[places], expected)
    for ours, theirs in zip(caches, expected_caches, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"places": jnp.zeros(12), "num_requests": 3},
            "places: expected int32 (12,), got float32 (12,)",
        ),
        (
            {"places": jnp.zeros(12, jnp.int32), "num_requests": 2},
            "pack and num_requests: expected a product of at least 12 rows with places, "
            "got 4 and 2",
        ),
        (
            {"pack": 4, "num_heads": 0, "qkv": jnp.zeros((12, 512))},
            "pack: expected None without query heads, got 4",
        ),
        ({"pack": 5}, "pack: expected a divisor of 12 rows, got 5"),
        ({"q_norm": jnp.ones(128)}, "q_norm and k_norm: expected both or neither"),
        ({"num_heads": 9}, "qkv: expected [rows, 13 x 128] for these caches, got (12, 1536)"),
        ({"cos": jnp.zeros((12, 128))}, "cos: expected float32 (12, 64), got float32 (12, 128)"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as error:
        call(rope_and_write, make_inputs(SMALL["decode"], seed=0), change)
    assert str(error.value) == reason


def test_bytes_moved_leaves_masked_rows_out_of_the_cache() -> None:
    shape = Shape(3, 2, num_heads=4, num_kv_heads=2, head_dim=64)
    plain = 6 * ((4 + 2 * 2) + 4 + 2 * 2) * 64 * 2 + 6 * 64 * 4
    assert bytes_moved(shape) == plain
    assert bytes_moved(dataclasses.replace(shape, masked=1)) == plain - 2 * 2 * 2 * 64 * 2
    assert bytes_moved(dataclasses.replace(shape, fp8=True)) == plain - 6 * 2 * 2 * 64


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_reference_at_real_sizes(name: str) -> None:
    shape = SHAPES[name]
    inputs = make_inputs(shape, seed=2)
    q, k, v = run(inputs, "mosaic_gpu")
    expected_q, expected_k, expected_v = run(inputs, "reference")
    assert_close(unpacked(shape, q), unpacked(shape, expected_q), ROUNDING[shape.qk_norm] + FLIPPED)
    # In fp8 a flipped rounding is another code.
    assert_close(k, expected_k, 2.0**-3 if shape.fp8 else ROUNDING[shape.qk_norm] + FLIPPED)
    np.testing.assert_array_equal(v, expected_v)
