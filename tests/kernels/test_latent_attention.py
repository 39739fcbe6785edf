"""Attention over latents: every implementation equals float64 NumPy, and the kernel's rows do not
depend on what surrounds them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention import (
    IMPLEMENTATIONS,
    Inputs,
    Latents,
    latent_attention,
    reference,
    unsupported,
)
from pallas_kernels.latent_attention.shapes import SHAPES, Shape, bytes_moved, make_inputs
from pallas_kernels.packing import padded_heads
from tests.kernels.attention import assert_close
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic

implementations = by_implementation(IMPLEMENTATIONS)

# Small enough for the interpreter. A tile holds 64 latents, there are 8 classes of tiles and up to
# 40 query rows a row tile.
SMALL = {
    "draft step of glm": Shape((64, 1, 65), rows=1, num_heads=20),
    "verify of glm, idle request": Shape((130, 0, 63), rows=4, num_heads=20, kv_lora_rank=128),
    "verify of K 5, 3 row tiles": Shape((70,), rows=6, num_heads=20, kv_lora_rank=64),
    "around eight tiles": Shape((512, 513), rows=2, num_heads=3, kv_lora_rank=64),
    "classes of two tiles": Shape((1000, 130), rows=3, num_heads=5, kv_lora_rank=128),
    "rows past the end": Shape((100, 3), rows=4, num_heads=4, kv_lora_rank=64, past_end=2),
    "prefill chunk": Shape((150, 20), rows=30, num_heads=3, kv_lora_rank=128),
    "row tiles of a part of a row": Shape((100,), rows=1, num_heads=64, kv_lora_rank=64),
    "blocks of 16": Shape((100, 17), rows=2, num_heads=4, kv_lora_rank=64, block_size=16),
    "blocks of 128": Shape((200, 100), rows=2, num_heads=4, kv_lora_rank=64, block_size=128),
}
REQUESTS = {"q", "block_table", "positions", "seq_lens"}  # arguments with an entry a request


# One program a shape, where each of the reference's operations would be one.
compiled = jax.jit(latent_attention, static_argnames="implementation")


def run(shape: Shape, inputs: Inputs, implementation: str) -> np.ndarray:
    """[batch, rows, num_heads, kv_lora_rank]"""
    if implementation == "mosaic_gpu" and jax.default_backend() == "cpu":
        with interpreted():
            out = latent_attention(inputs, implementation=implementation)
    else:
        out = compiled(inputs, implementation=implementation)
    return without_padding(shape, out)


def kernel(shape: Shape, inputs: Inputs, **tuning: Any) -> np.ndarray:
    from pallas_kernels.latent_attention import mosaic_gpu

    with interpreted() if jax.default_backend() == "cpu" else contextlib.nullcontext():
        return without_padding(
            shape, mosaic_gpu.latent_attention(inputs, tuning=mosaic_gpu.Tuning(**tuning))
        )


def without_padding(shape: Shape, out: jax.Array) -> np.ndarray:
    """The heads that exist; all of them are finite."""
    heads = np.asarray(out).astype(np.float32)[:, :, : shape.num_heads]
    assert np.isfinite(heads).all()
    return heads


def live(shape: Shape) -> np.ndarray:
    """bool [batch, rows]: the rows whose output means something."""
    return shape.positions() < np.array(shape.lengths)[:, None]


def ground_truth(shape: Shape, inputs: Inputs) -> np.ndarray:
    """float64 [batch, rows, num_heads, kv_lora_rank], one row at a time from the op's docstring;
    NaN for rows that are not live."""
    q, cache = (np.asarray(a).astype(np.float64) for a in (inputs.q, inputs.cache))
    q = q[:, :, : shape.num_heads]
    table, positions = np.asarray(inputs.block_table), shape.positions()
    out = np.full((*q.shape[:3], shape.kv_lora_rank), np.nan)
    for b, row in np.argwhere(live(shape)):
        seen = np.arange(int(positions[b, row]) + 1)
        keys = cache[table[b, seen // shape.block_size], seen % shape.block_size, 0]
        scores = q[b, row] @ keys.T * inputs.scale
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[b, row] = weights @ keys[:, : shape.kv_lora_rank] / weights.sum(axis=1, keepdims=True)
    return out


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(run(shape, inputs, implementation), ground_truth(shape, inputs), live(shape))


@implementations
@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # the interpreter's NumPy, about the padding
def test_what_pads_the_queries_changes_nothing(implementation: str) -> None:
    shape = SMALL["draft step of glm"]
    inputs = make_inputs(shape, seed=5)
    assert inputs.q.shape[2] > shape.num_heads, "expected a shape with padding"
    expected = run(shape, inputs, implementation)
    for padding in (jnp.nan, jnp.inf, 1e30):
        q = inputs.q.at[:, :, shape.num_heads :].set(padding)
        padded = dataclasses.replace(inputs, q=q)
        np.testing.assert_array_equal(
            run(shape, padded, implementation), expected, err_msg=str(padding)
        )


def near_ties(shape: Shape, seed: int) -> Inputs:
    """Inputs whose every output is a tie between two bfloat16 neighbours but for float32 rounding,
    so that another order of sums shows.

    Weights are powers of two by the last number of the keys, equal for two keys side by side, whose
    values are neighbours.
    """
    inputs = make_inputs(shape, seed)
    rng = np.random.default_rng(seed)
    q, cache = np.zeros_like(np.asarray(inputs.q)), np.array(inputs.cache)
    q[..., -1] = 1.0
    low = rng.uniform(1.0, 1.9, cache.shape[3:]).astype(cache.dtype)  # an ulp is 2^-7
    for blocks, length in zip(np.asarray(inputs.block_table), shape.lengths, strict=True):
        token = np.arange(length)
        slots = blocks[token // shape.block_size], token % shape.block_size, 0
        cache[slots] = low + (token % 2 * 2.0**-7).astype(cache.dtype)[:, None]
        cache[(*slots, -1)] = np.repeat(-rng.integers(0, 16, (length + 1) // 2), 2)[:length]
    arrays = {"q": jnp.asarray(q), "cache": jnp.asarray(cache)}
    return dataclasses.replace(inputs, **arrays, scale=math.log(2))


def requests_of(inputs: Inputs, which: slice) -> Inputs:
    """Some of the requests."""
    some = {name: getattr(inputs, name)[which] for name in REQUESTS}
    return dataclasses.replace(inputs, **some)


@needs_mosaic
def test_bits_do_not_depend_on_batch_table_rows_or_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest request has 11 tiles: three classes of two tiles, the others of one."""
    shape = Shape((690, 0, 100), rows=3, num_heads=8, kv_lora_rank=512)
    inputs = near_ties(shape, seed=1)
    expected = kernel(shape, inputs, cluster=1)
    for tuning in ({"cluster": 2}, {"cluster": 8}, {"slots": 3, "cluster": 4}):
        np.testing.assert_array_equal(
            kernel(shape, inputs, **tuning), expected, err_msg=str(tuning)
        )

    alone = requests_of(inputs, slice(2, None))
    np.testing.assert_array_equal(kernel(shape, alone), expected[2:], err_msg="alone")
    short = dataclasses.replace(alone, block_table=alone.block_table[:, :2])
    np.testing.assert_array_equal(
        kernel(shape, short), expected[2:], err_msg="a narrower block table"
    )
    plain = dataclasses.replace(inputs, q=inputs.q[:, 1:2], positions=inputs.positions[:, 1:2])
    np.testing.assert_array_equal(
        kernel(shape, plain), expected[:, 1:2], err_msg="one row of three"
    )

    from pallas_kernels.latent_attention import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "CLASSES", 2)
    assert (kernel(shape, inputs, cluster=1) != expected).any(), (
        "expected another order of sums to show"
    )


FITS = {
    "query_rows": 80,
    "kv_lora_rank": 512,
    "rope_head_dim": 64,
    "block_size": 64,
    "q_dtype": jnp.bfloat16,
    "cache_dtype": jnp.bfloat16,
}


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"kv_lora_rank": 576},
            "expected a kv_lora_rank of a multiple of 64 up to 512 and a rope_head_dim of 64, "
            "got 576 and 64",
        ),
        (
            {"rope_head_dim": 32},
            "expected a kv_lora_rank of a multiple of 64 up to 512 and a rope_head_dim of 64, "
            "got 512 and 32",
        ),
        ({"block_size": 48}, "block_size: expected 8, 16, 32 or a multiple of 64, got 48"),
        ({"query_rows": 20}, "rows x heads: expected a multiple of 8, got 20"),
        (
            {"q_dtype": jnp.dtype("float32")},
            "dtypes of q and the cache: expected bfloat16, got float32 and",
        ),
        ({}, None),
    ],
)
def test_what_the_kernel_does_not_support_has_a_reason(
    change: dict[str, Any], reason: str | None
) -> None:
    with interpreted():
        got = unsupported(Latents(**(FITS | change)))
    assert got is None if reason is None else got is not None and got.startswith(reason)


def test_the_kernel_refuses_a_cpu_and_an_old_jax() -> None:
    is_old = jax.__version_info__ < (0, 11)
    reason = "expected jax 0.11" if is_old else "device: expected an NVIDIA GPU"
    expected = f"latent_attention, implementation 'mosaic_gpu': {reason}"
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=f"^{expected}"):
        latent_attention(
            make_inputs(SMALL["rows past the end"], seed=0), implementation="mosaic_gpu"
        )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"positions": jnp.zeros((2, 3), jnp.int32)},
            "q: expected bfloat16 (2, 3, 4, 128), got bfloat16 (2, 4, 4, 128)",
        ),
        (
            {"kv_lora_rank": 129},
            "cache: expected [blocks, block_size, 1, 128] with kv_lora_rank 129 of it, got (5, "
            "64, 1, 128)",
        ),
        ({"seq_lens": jnp.zeros(3, jnp.int32)}, "seq_lens: expected int32 (2,), got int32 (3,)"),
        (
            {"implementation": "cuda"},
            "implementation: expected one of reference, mosaic_gpu, got 'cuda'",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], reason: str) -> None:
    inputs = make_inputs(SMALL["rows past the end"], seed=0)
    with pytest.raises(ValueError) as error:
        call(latent_attention, inputs, change)
    assert str(error.value) == reason


def test_bytes_moved_counts_each_latent_once() -> None:
    shape = Shape((10, 0), rows=2, num_heads=4)
    assert bytes_moved(shape) == (10 * 576 + 2 * 2 * 4 * (576 + 512)) * 2
    assert bytes_moved(dataclasses.replace(shape, past_end=2)) == bytes_moved(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_float32_reference_at_real_sizes(name: str) -> None:
    shape = SHAPES[name]
    inputs = make_inputs(shape, seed=3)
    got = run(shape, inputs, "mosaic_gpu")
    wide = dataclasses.replace(
        inputs, q=inputs.q.astype(jnp.float32), cache=inputs.cache.astype(jnp.float32)
    )
    with jax.default_matmul_precision("highest"):
        for b in range(
            0, shape.batch, max(shape.batch // 4, 1)
        ):  # the reference gathers a request's keys and holds all its scores
            one = requests_of(wide, slice(b, b + 1))
            expected = without_padding(shape, jax.jit(reference.latent_attention)(one))
            assert_close(got[b : b + 1], expected, live(shape)[b : b + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.rows <= 8])
def test_bits_on_the_gpu_do_not_depend_on_batch_table_or_ctas(name: str) -> None:
    shape = SHAPES[name]
    inputs = near_ties(shape, seed=4)
    expected = run(shape, inputs, "mosaic_gpu")
    np.testing.assert_array_equal(run(shape, inputs, "mosaic_gpu"), expected, err_msg="twice")
    for cluster in (1, 2, 4, 8):
        np.testing.assert_array_equal(
            kernel(shape, inputs, cluster=cluster), expected, err_msg=f"{cluster} CTAs"
        )
    alone = requests_of(inputs, slice(-1, None))
    np.testing.assert_array_equal(run(shape, alone, "mosaic_gpu"), expected[-1:], err_msg="alone")
    table = jnp.pad(alone.block_table, ((0, 0), (0, 2 * shape.table_pages)))
    wide = dataclasses.replace(alone, block_table=table)
    np.testing.assert_array_equal(
        run(shape, wide, "mosaic_gpu"), expected[-1:], err_msg="a wider block table"
    )
    first = jnp.pad(
        alone.q[:, :1],
        ((0, 0), (0, 0), (0, padded_heads(1, shape.num_heads) - shape.heads), (0, 0)),
    )
    plain = dataclasses.replace(alone, q=first, positions=alone.positions[:, :1])
    np.testing.assert_array_equal(
        run(shape, plain, "mosaic_gpu"), expected[-1:, :1], err_msg="one row"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [None, 1])
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64_on_the_gpu(name: str, cluster: int | None) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(kernel(shape, inputs, cluster=cluster), ground_truth(shape, inputs), live(shape))
