"""A pass's metadata: the kernel makes the reference's, to the bit; the reference is what plain
Python says, a row at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import Inputs as AttentionInputs
from pallas_kernels.attention import paged_attention
from pallas_kernels.attention.bounds import KEYS
from pallas_kernels.step_metadata import (
    IMPLEMENTATIONS,
    PAD_SLOT,
    Inputs,
    StepMetadata,
    step_metadata,
)
from pallas_kernels.step_metadata.shapes import SHAPES, Shape, bytes_moved, make_inputs
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic

implementations = by_implementation(IMPLEMENTATIONS)

# The interpreter takes a fraction of a second a request.
SMALL = {
    "draft step": Shape(
        16, 1, queries_per_kv=4, head_dim=64, pages=5, block_size=16, max_model_len=70, masked=3
    ),
    "verify": Shape(
        16, 4, queries_per_kv=3, head_dim=64, pages=5, block_size=16, max_model_len=70, masked=3
    ),
    "verify, window": Shape(
        16,
        4,
        queries_per_kv=4,
        head_dim=128,
        window=3,
        pages=5,
        block_size=16,
        max_model_len=70,
        masked=3,
    ),
    "window of one token": Shape(
        8, 2, queries_per_kv=1, head_dim=64, window=1, pages=5, block_size=16, max_model_len=70
    ),
    "window over tiles of keys": Shape(
        8,
        6,
        queries_per_kv=5,
        head_dim=64,
        window=100,
        pages=5,
        block_size=64,
        max_model_len=320,
        masked=1,
    ),
    "the table ends before the longest context": Shape(
        8, 4, queries_per_kv=8, head_dim=64, pages=4, block_size=16, max_model_len=1000
    ),
    "a block": Shape(
        8,
        5,
        queries_per_kv=4,
        head_dim=64,
        pages=5,
        block_size=16,
        max_model_len=70,
        masked=2,
        causal=False,
    ),
    "a block with one window": Shape(
        8,
        4,
        queries_per_kv=3,
        head_dim=64,
        window=3,
        pages=5,
        block_size=16,
        max_model_len=70,
        masked=1,
        one_window=True,
    ),
    "a block with one window, not causal": Shape(
        8,
        4,
        queries_per_kv=8,
        head_dim=64,
        window=20,
        pages=5,
        block_size=16,
        max_model_len=70,
        masked=1,
        one_window=True,
        causal=False,
    ),
    "one request": Shape(
        1, 4, queries_per_kv=3, head_dim=64, pages=3, block_size=64, max_model_len=150
    ),
    "64 requests, a head a group": Shape(
        64, 2, queries_per_kv=1, head_dim=64, pages=2, block_size=16, max_model_len=20, masked=9
    ),
}


def run(inputs: Inputs, implementation: str) -> StepMetadata:
    """As NumPy arrays."""
    if implementation == "reference":
        made = jax.jit(step_metadata)(inputs)
    else:
        with interpreted():
            made = step_metadata(inputs, implementation=implementation)
    arrays: Any = [np.asarray(x) for x in made]
    return StepMetadata(*arrays)


def in_plain_python(shape: Shape, inputs: Inputs) -> dict[str, np.ndarray]:
    """From the docstrings, one request and one row at a time."""
    table, step = np.asarray(inputs.block_table), int(inputs.step)
    size, limit = shape.block_size, min(shape.max_model_len, shape.pages * shape.block_size)
    out: dict[str, list[Any]] = {
        name: [] for name in ("positions", "seq_lens", "slot_mapping", "window_start", "bounds")
    }
    for blocks, start, real in zip(
        table, np.asarray(inputs.start) + step, np.asarray(inputs.num_rows), strict=True
    ):
        rows = [min(start + i, limit) for i in range(shape.rows)]
        length = min(start + min(real, shape.rows), limit) if real else 0
        anchors = [rows[0]] * len(rows) if shape.one_window else rows
        seen_from = [0 if shape.window is None else max(p - shape.window + 1, 0) for p in anchors]
        last = rows if shape.causal else [length - 1] * len(rows)
        out["positions"].append(rows)
        out["seq_lens"].append(length)
        out["window_start"].append(seen_from)
        slot = lambda i: blocks[(start + i) // size] * size + (start + i) % size  # noqa: B023, E731
        out["slot_mapping"].append(
            [slot(i) if i < real and start + i < limit else PAD_SLOT for i in range(shape.rows)]
        )
        keys = [
            range(min(s, p + 1, length), min(p + 1, length))
            for s, p in zip(seen_from, last, strict=True)
        ]
        columns = -(-shape.rows * shape.queries_per_kv // 8) * 8
        limits = [
            [getattr(k, end) for k in keys for _ in range(shape.queries_per_kv)]
            for end in ("start", "stop")
        ]
        tiles = {key // KEYS for k in keys for key in k}
        first, past = (min(tiles), max(tiles) + 1) if tiles else (-(-shape.pages * size // KEYS), 0)
        padded = [row + [0] * (columns - len(row)) for row in limits]
        out["bounds"].append([[*padded[0], *padded[1], first, past, length, length]])
    return {name: np.array(value, np.int32) for name, value in out.items()}


@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_plain_python(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    made = run(inputs, implementation)._asdict()
    for field, expected in in_plain_python(shape, inputs).items():
        assert made[field].dtype == np.int32
        np.testing.assert_array_equal(made[field], expected, err_msg=field)
    angles = made["positions"][..., None].astype(np.float32) * np.array(
        inputs.frequencies, np.float32
    )
    np.testing.assert_allclose(made["cos"], np.cos(angles.astype(np.float64)), atol=1e-6)
    np.testing.assert_allclose(made["sin"], np.sin(angles.astype(np.float64)), atol=1e-6)


@needs_mosaic
@pytest.mark.parametrize("attention_factor", [1.0, 1.3])
def test_tables_are_the_references_to_the_bit(attention_factor: float) -> None:
    inputs = dataclasses.replace(
        make_inputs(SMALL["verify"], seed=3), attention_factor=attention_factor
    )
    reference, kernel = run(inputs, "reference"), run(inputs, "mosaic_gpu")
    assert (
        reference.cos is not None
        and np.abs(reference.cos).max() <= attention_factor < np.abs(reference.cos).max() + 1e-3
    )
    jax.tree.map(np.testing.assert_array_equal, reference, kernel)


def test_what_nobody_asks_for_is_left_out() -> None:
    inputs = make_inputs(SMALL["verify"], seed=0)
    made = step_metadata(dataclasses.replace(inputs, queries_per_kv=None, frequencies=None))
    assert made.bounds is None and made.cos is None and made.sin is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"start": jnp.zeros(3, jnp.int32)},
            "block_table: expected int32 (3, 5), got int32 (16, 5)",
        ),
        ({"num_rows": jnp.zeros(16, bool)}, "num_rows: expected int32 (16,), got bool (16,)"),
        ({"step": jnp.zeros(1, jnp.int32)}, "step: expected int32 (), got int32 (1,)"),
        (
            {"implementation": "triton"},
            "implementation: expected one of reference, mosaic_gpu, got 'triton'",
        ),
        (
            {"implementation": "mosaic_gpu", "queries_per_kv": None},
            "step_metadata, implementation 'mosaic_gpu': queries_per_kv and frequencies: "
            "expected both, got None and",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError) as error:
        call(step_metadata, make_inputs(SMALL["verify"], seed=0), change)
    assert str(error.value).startswith(reason)


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"queries_per_kv": 9}, "expected at most 32 rows x heads a KV head, got 4 x 9"),
        (
            {"frequencies": (1.0,) * 24},
            "expected a rope_dim that is a multiple of 8 and a divisor of 256, got 48",
        ),
    ],
)
def test_what_the_kernel_does_not_support_is_an_error(change: dict[str, Any], reason: str) -> None:
    inputs = dataclasses.replace(make_inputs(SMALL["verify"], seed=0), **change)
    with interpreted(), pytest.raises(ValueError) as error:
        step_metadata(inputs, implementation="mosaic_gpu")
    assert str(error.value) == f"step_metadata, implementation 'mosaic_gpu': {reason}"


def test_bytes_moved_counts_what_goes_in_and_out() -> None:
    shape = Shape(2, 3, queries_per_kv=4, head_dim=64)
    made = run(make_inputs(shape, seed=0), "reference")
    inputs = (
        2 * (3 + 1 + 1) + 1 + 32
    )  # pages, start and count of each request, the step, the frequencies
    assert bytes_moved(shape) == 4 * inputs + sum(x.nbytes for x in made if x is not None)
    assert bytes_moved(dataclasses.replace(shape, batch=4)) > bytes_moved(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*SMALL, *SHAPES])
def test_equals_the_reference_to_the_bit_on_the_gpu(name: str) -> None:
    inputs = make_inputs((SMALL | SHAPES)[name], seed=5)
    jax.tree.map(np.testing.assert_array_equal, run(inputs, "reference"), run(inputs, "mosaic_gpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_every_position_is_rotated_by_the_bits_of_a_prefill_chunk(theta: float) -> None:
    """131,072 positions: 4 rows of each of 32,768 requests against XLA's cos and sin of one long
    chunk."""
    frequencies, rows, batch = (
        tuple((theta ** (-np.arange(0, 128, 2) / 128)).astype(np.float32).tolist()),
        4,
        1 << 15,
    )
    common: dict[str, Any] = {
        "block_size": 64,
        "max_model_len": 1 << 17,
        "queries_per_kv": 4,
        "frequencies": frequencies,
    }
    table = jnp.zeros((batch, 2048), jnp.int32)
    start, counts = jnp.arange(batch, dtype=jnp.int32) * rows, jnp.full(batch, rows, jnp.int32)
    inputs = Inputs(block_table=table, start=start, num_rows=counts, rows=rows, **common)
    kernel = step_metadata(inputs, implementation="mosaic_gpu")
    first = {"block_table": table[:1], "start": start[:1], "num_rows": counts[:1]}
    chunk = jax.jit(step_metadata)(Inputs(**first, rows=1 << 17, **common))
    for ours, theirs in ((kernel.cos, chunk.cos), (kernel.sin, chunk.sin)):
        np.testing.assert_array_equal(np.asarray(ours).reshape(-1, 64), np.asarray(theirs)[0])


@needs_mosaic
@pytest.mark.parametrize("window", [None, 70])
def test_attention_reads_these_bounds_as_its_own(window: int | None) -> None:
    check_attention(window)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 70])
def test_attention_reads_these_bounds_as_its_own_on_the_gpu(window: int | None) -> None:
    check_attention(window)


def check_attention(window: int | None) -> None:
    shape = Shape(
        3,
        4,
        queries_per_kv=3,
        head_dim=64,
        window=window,
        pages=3,
        block_size=64,
        max_model_len=150,
        masked=1,
    )
    inputs = make_inputs(shape, seed=1)
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (3, 4, 6, 64), jnp.bfloat16)
    caches = [jax.random.normal(key, (9, 64, 2, 64), jnp.bfloat16) for key in keys[1:]]
    made = StepMetadata(*(jnp.asarray(x) for x in run(inputs, "mosaic_gpu")))
    assert made.bounds is not None
    queries = AttentionInputs(
        q=q,
        k_cache=caches[0],
        v_cache=caches[1],
        block_table=inputs.block_table,
        positions=made.positions,
        seq_lens=made.seq_lens,
        window_start=made.window_start,
        scale=0.125,
        window=window,
    )

    def attend(bounds: jax.Array | None) -> jax.Array:
        given = dataclasses.replace(queries, bounds=bounds)
        return paged_attention(given, implementation="mosaic_gpu")

    with interpreted():
        own = attend(None)
        given = attend(made.bounds)
        nothing = attend(jnp.zeros_like(made.bounds))
        with pytest.raises(
            ValueError,
            match=r"^bounds: expected int32 \(3, row tiles, 36\), got int32 \(3, 1, 35\)$",
        ):
            attend(made.bounds[..., 1:])
    np.testing.assert_array_equal(
        np.asarray(given).astype(np.float32), np.asarray(own).astype(np.float32)
    )
    assert not np.asarray(nothing).any() and np.asarray(own).any(), (
        "the bounds that are given are the ones that are read"
    )
