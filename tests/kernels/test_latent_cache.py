"""Norms, rotation and write of latents: the reference equals float64 NumPy, the kernel equals the
reference to a rounding of bfloat16."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_cache import IMPLEMENTATIONS, Inputs, norm_and_write, unsupported
from pallas_kernels.latent_cache.shapes import SHAPES, Shape, bytes_moved, make_inputs
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic

implementations = by_implementation(IMPLEMENTATIONS)

SMALL = {
    "glm, one row has no slot": Shape(3, masked=1, block_size=8),
    "no query latent": Shape(2, q_lora_rank=0, kv_lora_rank=128, block_size=8),
    "one row, two tiles of chunks": Shape(1, q_lora_rank=1536, kv_lora_rank=64, block_size=8),
}
# Three roundings to bfloat16 of half an ulp each: the value, the normed one, its product with the
# gain. A whole ulp more where two float32 sums in another order fall on either side of a boundary.
# Of the larger of the two values that a rotation mixes.
ROUNDING = 5 * 2.0**-8


def run(inputs: Inputs, implementation: str) -> tuple[np.ndarray | None, np.ndarray]:
    with (
        interpreted()
        if implementation == "mosaic_gpu" and jax.default_backend() == "cpu"
        else contextlib.nullcontext()
    ):
        q, cache = norm_and_write(inputs, implementation=implementation)
    return None if q is None else np.asarray(q).astype(np.float32), np.asarray(cache).astype(
        np.float32
    )


def ground_truth(shape: Shape, inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """float64 query latents and cache, one row at a time from the op's docstring."""
    latents, cos, sin, cache, gain = (
        np.asarray(getattr(inputs, n)).astype(np.float64)
        for n in ("latents", "cos", "sin", "cache", "kv_norm")
    )

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.square(x).mean() + inputs.eps) * gain

    queries = np.zeros((shape.rows, shape.q_lora_rank))
    for row in range(shape.rows):
        q, latent, key = np.split(
            latents[row], (shape.q_lora_rank, shape.q_lora_rank + shape.kv_lora_rank)
        )
        if shape.q_lora_rank:
            queries[row] = norm(q, np.asarray(inputs.q_norm).astype(np.float64))
        a, b = np.split(key, 2)
        slot = int(inputs.slot_mapping[row])
        if slot < cache.shape[0] * shape.block_size:
            rotated = a * cos[row] - b * sin[row], b * cos[row] + a * sin[row]
            cache[slot // shape.block_size, slot % shape.block_size, 0] = np.concatenate(
                (norm(latent, gain), *rotated)
            )
    return queries, cache


def assert_close(
    shape: Shape, got: tuple[np.ndarray | None, np.ndarray], expected: tuple[np.ndarray, np.ndarray]
) -> None:
    rank = shape.kv_lora_rank
    if shape.q_lora_rank:
        assert got[0] is not None
        assert (np.abs(got[0] - expected[0]) <= ROUNDING * np.abs(expected[0])).all()
    else:
        assert got[0] is None
    latent, key = expected[1][..., :rank], expected[1][..., rank:]
    mixed = np.maximum(np.abs(key), np.roll(np.abs(key), shape.rope_head_dim // 2, axis=-1))
    assert (np.abs(got[1] - expected[1])[..., :rank] <= ROUNDING * np.abs(latent)).all()
    assert (np.abs(got[1] - expected[1])[..., rank:] <= ROUNDING * mixed).all()


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(shape, run(inputs, implementation), ground_truth(shape, inputs))


@implementations
def test_slots_of_others_stay_as_they_are(implementation: str) -> None:
    shape = SMALL["glm, one row has no slot"]
    inputs = make_inputs(shape, seed=3)
    before = np.asarray(inputs.cache).astype(np.float32).reshape(-1, 576)
    after = run(inputs, implementation)[1].reshape(-1, 576)
    written = np.asarray(inputs.slot_mapping)[:2]
    assert (before[written] != after[written]).any(axis=1).all()
    np.testing.assert_array_equal(
        np.delete(after, written, axis=0), np.delete(before, written, axis=0)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES | SMALL)
def test_equals_float64_on_the_gpu(name: str) -> None:
    shape = (SHAPES | SMALL)[name]
    inputs = make_inputs(shape, seed=1)
    assert_close(shape, run(inputs, "mosaic_gpu"), ground_truth(shape, inputs))


@pytest.mark.gpu
def test_bits_on_the_gpu_do_not_depend_on_the_number_of_rows() -> None:
    inputs = make_inputs(SHAPES["glm, batch 16, Q 4"], seed=2)
    q, cache = run(inputs, "mosaic_gpu")
    assert q is not None
    for rows in (1, 5):
        fewer, written = run(
            replace(
                inputs,
                latents=inputs.latents[:rows],
                cos=inputs.cos[:rows],
                sin=inputs.sin[:rows],
                slot_mapping=inputs.slot_mapping[:rows],
            ),
            "mosaic_gpu",
        )
        assert fewer is not None
        np.testing.assert_array_equal(fewer, q[:rows])
        slots = np.asarray(inputs.slot_mapping)[:rows]
        np.testing.assert_array_equal(
            written.reshape(-1, 576)[slots], cache.reshape(-1, 576)[slots]
        )


@needs_mosaic
def test_what_the_kernel_does_not_support_has_a_reason() -> None:
    both = jnp.bfloat16, jnp.bfloat16
    assert unsupported(768, 512, 64, *both) is None
    assert unsupported(0, 512, 64, *both) is None
    float32 = "got float32"
    assert unsupported(768, 512, 64, jnp.float32, jnp.bfloat16) == f"expected bfloat16, {float32}"
    assert (
        unsupported(768, 512, 64, jnp.bfloat16, jnp.float32)
        == f"expected a cache of bfloat16, {float32}"
    )
    assert unsupported(768, 512, 32, *both) == "expected a rope_head_dim of 64, got 32"
    assert str(unsupported(24, 512, 64, *both)).startswith(
        "expected latents of a multiple of 64 numbers"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"q_norm": None},
            "latents: expected [rows, 0 + 576] for a cache (3, 8, 1, 576), got (3, 1344)",
        ),
        ({"cos": jnp.zeros((3, 16))}, "cos: expected float32 (3, 32), got float32 (3, 16)"),
        (
            {"implementation": "cuda"},
            "implementation: expected one of reference, mosaic_gpu, got 'cuda'",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], reason: str) -> None:
    inputs = make_inputs(SMALL["glm, one row has no slot"], seed=0)
    with pytest.raises(ValueError) as error:
        call(norm_and_write, inputs, change)
    assert str(error.value) == reason


def test_bytes_moved_counts_entries_of_rows_with_a_slot() -> None:
    assert bytes_moved(Shape(3, masked=1)) == (3 * (2 * 768 + 576) + 2 * 576) * 2 + 3 * 64 * 4
