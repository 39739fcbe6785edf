"""Paged attention: every implementation equals float64 NumPy, and the kernel's rows do not depend
on what surrounds them."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import (
    IMPLEMENTATIONS,
    Heads,
    Inputs,
    packs,
    paged_attention,
    reference,
    unsupported,
)
from pallas_kernels.attention.shapes import SHAPES, Shape, bytes_moved, flops, make_inputs, tiles
from pallas_kernels.packing import pack, unpack
from tests.kernels.attention import assert_close, ground_truth, live
from tests.kernels.interpreter import by_implementation, call, interpreted, needs_mosaic
from tests.support.slow import slow

implementations = by_implementation(IMPLEMENTATIONS)

# Small enough for the interpreter. A tile holds 64 keys and there are 8 classes of tiles, so 64,
# 65, 512, 513 are the edges.
SMALL = {
    "draft step, one head a group": Shape(
        (64, 1, 65), rows=1, num_heads=2, num_kv_heads=2, head_dim=128
    ),
    "verify, group of 4": Shape((130, 0, 63), rows=4, num_heads=8, num_kv_heads=2, head_dim=128),
    "verify, group of 3, head_dim 64": Shape(
        (130, 2, 64), rows=4, num_heads=9, num_kv_heads=3, head_dim=64
    ),
    "verify, group of 8, 8 rows, one page": Shape(
        (5, 60), rows=8, num_heads=8, num_kv_heads=1, head_dim=64
    ),
    "around eight tiles": Shape((512, 513), rows=2, num_heads=2, num_kv_heads=1, head_dim=64),
    "classes of two tiles": Shape((1000, 130), rows=3, num_heads=4, num_kv_heads=1, head_dim=64),
    "rows past the end": Shape(
        (100, 3), rows=4, num_heads=4, num_kv_heads=1, head_dim=64, past_end=2
    ),
    "sinks": Shape((100, 0, 7), rows=4, num_heads=6, num_kv_heads=2, head_dim=64, sinks=True),
    "sinks, one head a group": Shape(
        (70, 7), rows=2, num_heads=2, num_kv_heads=2, head_dim=64, sinks=True
    ),
    "window and sinks": Shape(
        (200, 40, 0), rows=3, num_heads=8, num_kv_heads=1, head_dim=64, window=70, sinks=True
    ),
    "window of ten tiles": Shape(
        (700, 520), rows=2, num_heads=2, num_kv_heads=1, head_dim=64, window=600
    ),
    "4 row tiles": Shape((150, 20), rows=40, num_heads=3, num_kv_heads=1, head_dim=64),
    "prefill, window": Shape((90,), rows=70, num_heads=4, num_kv_heads=1, head_dim=64, window=30),
    "blocks of 16": Shape(
        (100, 17), rows=2, num_heads=4, num_kv_heads=2, head_dim=64, block_size=16
    ),
    "blocks of 128": Shape(
        (200, 100), rows=2, num_heads=4, num_kv_heads=2, head_dim=64, block_size=128
    ),
    # These have more than 128 query rows a KV head, which is the prefill kernel's; 64 of them are a
    # warpgroup's.
    "prefill, the first chunk": Shape((48, 40), rows=48, num_heads=8, num_kv_heads=2, head_dim=128),
    "prefill, a later chunk": Shape((300,), rows=48, num_heads=4, num_kv_heads=1, head_dim=64),
    "prefill, ragged and idle tiles": Shape(
        (150, 0, 60), rows=48, num_heads=4, num_kv_heads=1, head_dim=64, past_end=20
    ),
    "prefill, group of 8, window and sinks": Shape(
        (200, 64), rows=48, num_heads=8, num_kv_heads=1, head_dim=64, window=70, sinks=True
    ),
    "prefill, window that begins in two tiles": Shape(
        (367,), rows=48, num_heads=4, num_kv_heads=1, head_dim=64, window=150
    ),
    "prefill, group of 3": Shape((129,), rows=48, num_heads=6, num_kv_heads=2, head_dim=64),
    "prefill, group of 5, sinks, blocks of 16": Shape(
        (190,), rows=33, num_heads=5, num_kv_heads=1, head_dim=64, block_size=16, sinks=True
    ),
    "prefill, group of 1, blocks of 128": Shape(
        (250,), rows=200, num_heads=1, num_kv_heads=1, head_dim=64, block_size=128
    ),
    "fp8, verify, group of 4": Shape(
        (130, 0, 63), rows=2, num_heads=8, num_kv_heads=2, head_dim=128, fp8=True
    ),
    "fp8, window and sinks": Shape(
        (200, 40), rows=3, num_heads=8, num_kv_heads=1, head_dim=64, window=70, sinks=True, fp8=True
    ),
    "fp8, prefill, group of 5, sinks, blocks of 16": Shape(
        (120, 0),
        rows=33,
        num_heads=5,
        num_kv_heads=1,
        head_dim=128,
        block_size=16,
        sinks=True,
        fp8=True,
    ),
}
PREFILL = [
    name
    for name, shape in SMALL.items()
    if shape.rows * shape.num_heads // shape.num_kv_heads > 128
]


# One program a shape, where each of the reference's 30 operations would be one.
compiled = jax.jit(paged_attention, static_argnames="implementation")


def run(inputs: Inputs, implementation: str) -> np.ndarray:
    if implementation == "mosaic_gpu" and jax.default_backend() == "cpu":
        with interpreted():
            out = paged_attention(inputs, implementation=implementation)
    else:
        out = compiled(inputs, implementation=implementation)
    return np.asarray(out).astype(np.float32)


def kernel(inputs: Inputs, **tuning: Any) -> np.ndarray:
    from pallas_kernels.attention import mosaic_gpu

    with interpreted() if jax.default_backend() == "cpu" else contextlib.nullcontext():
        return np.asarray(
            mosaic_gpu.paged_attention(inputs, tuning=mosaic_gpu.Tuning(**tuning))
        ).astype(np.float32)


def prefill_kernel(inputs: Inputs, **tuning: Any) -> np.ndarray:
    from pallas_kernels.attention.mosaic_gpu import prefill

    with interpreted() if jax.default_backend() == "cpu" else contextlib.nullcontext():
        out = prefill.paged_attention(inputs, tuning=prefill.Tuning(**tuning))
    return np.asarray(out).astype(np.float32)


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # the interpreter's NumPy, about the padding
@implementations
@pytest.mark.parametrize("name", SMALL)
def test_equals_float64(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(run(inputs, implementation), ground_truth(shape, inputs), live(shape))


def near_ties(shape: Shape, seed: int) -> Inputs:
    """Inputs whose every output is a tie between two bfloat16 neighbours but for float32 rounding,
    so that another order of sums shows.

    Weights are powers of two, equal for two keys side by side, whose values are neighbours. In fp8,
    whose neighbours are too far apart, the mean of two values is half way between two bfloat16s.
    """
    inputs = make_inputs(shape, seed)
    rng = np.random.default_rng(seed)
    q, k, v = (np.array(a) for a in (inputs.q, inputs.k_cache, inputs.v_cache))
    q[...] = 0.0
    q[..., 0] = 1.0
    low = rng.uniform(1.0, 1.9, v.shape[2:]).astype(v.dtype)  # an ulp is 2^-7
    for blocks, length in zip(np.asarray(inputs.block_table), shape.lengths, strict=True):
        token = np.arange(length)
        slots = blocks[token // shape.block_size], token % shape.block_size
        k[(*slots, slice(None), 0)] = np.repeat(-rng.integers(0, 16, (length + 1) // 2), 2)[
            :length, None
        ]
        odd = (token % 2 == 1)[:, None, None]
        if shape.fp8:
            v[slots] = np.where(odd, np.array(9 * 2.0**-8, v.dtype), low)
        else:
            v[slots] = low + (odd * 2.0**-7).astype(v.dtype)
    ones = jnp.ones(shape.num_kv_heads) if shape.fp8 else None
    inputs = dataclasses.replace(inputs, k_scale=ones, v_scale=ones)
    arrays = {name: jnp.asarray(x) for name, x in (("q", q), ("k_cache", k), ("v_cache", v))}
    return dataclasses.replace(inputs, **arrays, scale=math.log(2))


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """BLAS rounds as a row's place and the matrix's width say; wgmma does not."""
    monkeypatch.setattr(
        np, "matmul", lambda a, b, dtype: np.einsum("mk,kn->mn", a.astype(dtype), b.astype(dtype))
    )


BY_REQUEST = ("q", "block_table", "positions", "seq_lens", "window_start")


def requests_of(inputs: Inputs, which: slice) -> Inputs:
    """Some of the requests."""
    some = {name: getattr(inputs, name)[which] for name in BY_REQUEST}
    return dataclasses.replace(inputs, **some)


def with_table(inputs: Inputs, table: jax.Array) -> Inputs:
    return dataclasses.replace(inputs, block_table=table)


@needs_mosaic
def test_bits_do_not_depend_on_batch_table_rows_or_ctas(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest request has 11 tiles: three classes of two tiles, the others of one."""
    shape = Shape((690, 0, 100), rows=3, num_heads=4, num_kv_heads=2, head_dim=64)
    inputs = near_ties(shape, seed=1)
    expected = kernel(inputs, cluster=1)
    for cluster in (2, 4, 8):
        np.testing.assert_array_equal(
            kernel(inputs, cluster=cluster), expected, err_msg=f"{cluster} CTAs"
        )
    np.testing.assert_array_equal(kernel(inputs, slots=3, cluster=1), expected, err_msg="3 slots")
    np.testing.assert_array_equal(
        kernel(inputs, cluster=1, heads=2), expected, err_msg="2 heads a CTA"
    )

    alone = requests_of(inputs, slice(2, None))
    np.testing.assert_array_equal(kernel(alone), expected[2:], err_msg="alone")

    short = with_table(alone, alone.block_table[:, :2])
    np.testing.assert_array_equal(kernel(short), expected[2:], err_msg="a narrower block table")

    plain = rows_of(inputs, 1, 2)
    np.testing.assert_array_equal(kernel(plain), expected[:, 1:2], err_msg="one row of three")

    from pallas_kernels.attention.mosaic_gpu import plan, tile_order

    for module in (plan, tile_order):
        monkeypatch.setattr(module, "CLASSES", 2)
    assert (kernel(inputs, cluster=1) != expected).any(), "expected another order of sums to show"


@needs_mosaic
@pytest.mark.slow  # the order of tiles and of sums is that of bfloat16
def test_bits_over_fp8_do_not_depend_on_batch_rows_or_ctas() -> None:
    shape = Shape((330, 100), rows=2, num_heads=2, num_kv_heads=1, head_dim=64, fp8=True)
    inputs = near_ties(shape, seed=1)
    expected = kernel(inputs, cluster=1)
    np.testing.assert_array_equal(kernel(inputs, cluster=4), expected, err_msg="4 CTAs")
    alone = rows_of(requests_of(inputs, slice(1, None)), 1, 2)
    np.testing.assert_array_equal(kernel(alone, slots=2), expected[1:, 1:], err_msg="one row alone")
    reordered = dataclasses.replace(inputs, seq_lens=inputs.seq_lens - 1)
    assert (kernel(reordered, cluster=1) != expected).any(), "expected fewer keys to show"


def rows_of(inputs: Inputs, first: int, past: int) -> Inputs:
    """Some rows of every request."""
    names = ("q", "positions", "window_start")
    some = {name: getattr(inputs, name)[:, first:past] for name in names}
    return dataclasses.replace(inputs, **some)


@needs_mosaic
@pytest.mark.parametrize("window", [None, 100])
def test_a_prefill_rows_bits_do_not_depend_on_its_chunk_batch_or_table(
    window: int | None, exact_products: None
) -> None:
    """Rows 252 .. 299 see four or five tiles of 64 keys; in other chunks their tile begins and ends
    elsewhere, and is masked elsewhere."""
    shape = Shape((120, 300), rows=48, num_heads=4, num_kv_heads=1, head_dim=64, window=window)
    inputs = near_ties(shape, seed=1)
    expected = prefill_kernel(inputs)
    alone = requests_of(inputs, slice(1, None))
    for tuning in ({"slots": 2}, {"warpgroups": 2}):
        np.testing.assert_array_equal(
            prefill_kernel(alone, **tuning), expected[1:], err_msg=str(tuning)
        )
    wide = with_table(alone, jnp.pad(alone.block_table, ((0, 0), (0, 3))))
    np.testing.assert_array_equal(
        prefill_kernel(wide), expected[1:], err_msg="alone, a wider block table"
    )
    for first, past in (
        (0, 4),
        (4, 47),
    ):  # positions 252 .. 255, of which a chunk sees four tiles only, and the others but one
        np.testing.assert_array_equal(
            prefill_kernel(rows_of(alone, first, past)),
            expected[1:, first:past],
            err_msg=f"rows {first} .. {past}",
        )
    if window is None:
        assert (prefill_kernel(inputs, keys=128) != expected).any(), (
            "expected another order of sums to show"
        )


@needs_mosaic
@pytest.mark.parametrize("cluster", [None, 1])
def test_the_promise_of_a_window_changes_nothing(cluster: int | None) -> None:
    """A window of three tiles or four: fewer CTAs share a row's keys, and some classes have no tile
    between others that have one."""
    inputs = make_inputs(
        Shape((300, 0, 200), rows=3, num_heads=4, num_kv_heads=2, head_dim=64, window=150), seed=2
    )
    promised, silent = (
        kernel(dataclasses.replace(inputs, window=w), cluster=cluster) for w in (150, None)
    )
    np.testing.assert_array_equal(promised, silent)


@needs_mosaic
@pytest.mark.parametrize("fp8", [False, True])
def test_a_cta_of_several_heads_gives_what_one_of_each_gives(fp8: bool) -> None:
    shape = Shape(
        (200, 0, 70), rows=2, num_heads=8, num_kv_heads=4, head_dim=64, window=100, sinks=True
    )
    inputs = make_inputs(dataclasses.replace(shape, fp8=fp8), seed=3)
    expected = kernel(inputs, cluster=1, heads=1)
    for heads, slots in ((2, 1), (4, 2)):
        np.testing.assert_array_equal(
            kernel(inputs, cluster=1, heads=heads, slots=slots), expected, err_msg=f"{heads} heads"
        )


@needs_mosaic
@pytest.mark.parametrize(
    ("rows", "plans", "fp8"),
    [
        (7, ((2, 1), (2, 4), (4, 2)), False),
        (5, ((3, 4),), True),
        (9, ((4, 1),), True),
        slow(7, ((2, 1), (2, 4), (4, 2)), True),
        slow(5, ((3, 4),), False),
        slow(9, ((4, 1),), False),
    ],
)
def test_parts_of_the_queries_give_what_all_of_them_give(
    rows: int, plans: tuple[tuple[int, int], ...], fp8: bool, exact_products: None
) -> None:
    """The last part has a row less than the others, and parts see other keys than the whole. Of
    nine rows, the second row tile has parts without rows."""
    shape = Shape((330, 0, 100), rows=rows, num_heads=8, num_kv_heads=2, head_dim=64, window=90)
    inputs = make_inputs(dataclasses.replace(shape, fp8=fp8, sinks=True), seed=4)
    expected = kernel(inputs, parts=1, cluster=2)
    for parts, cluster in plans:
        np.testing.assert_array_equal(
            kernel(inputs, parts=parts, cluster=cluster), expected, err_msg=f"{parts} x {cluster}"
        )


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # the interpreter's NumPy, about the padding
@implementations
@pytest.mark.parametrize(
    "name", ["verify, group of 3, head_dim 64", "draft step, one head a group", "sinks"]
)
def test_packed_queries_give_the_same_whatever_pads_them(name: str, implementation: str) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=5)
    expected = run(inputs, implementation)
    for padding in (jnp.nan, jnp.inf, 1e30):
        np.testing.assert_array_equal(
            run(packed_inputs(shape, inputs, padding), implementation),
            expected,
            err_msg=str(padding),
        )


@pytest.mark.filterwarnings(
    "ignore:invalid value encountered:RuntimeWarning"
)  # the interpreter's NumPy, about the padding
@implementations
@pytest.mark.parametrize(
    "shape",
    [
        SMALL["verify, group of 3, head_dim 64"],
        SMALL["sinks"],
        # Two, three and four parts, whose last one has a row of padding.
        Shape((130, 9, 64), 5, num_heads=4, num_kv_heads=1, head_dim=64),
        *(
            slow(Shape((130, 9, 64), rows, num_heads=4, num_kv_heads=1, head_dim=64))
            for rows in (3, 7)
        ),
    ],
    ids=lambda shape: f"{shape.rows} rows of {shape.num_heads}",
)
def test_results_of_packed_queries_go_to_their_rows(shape: Shape, implementation: str) -> None:
    """Two of the rows are not kept, and their queries may hold anything."""
    inputs = packed_inputs(shape, make_inputs(shape, seed=5), 0.0)
    expected = run(inputs, implementation)
    rows = np.random.default_rng(1).permutation(shape.batch * shape.rows).astype(np.int32)
    kept = rows.size - 2
    group = shape.num_heads // shape.num_kv_heads
    q = np.asarray(inputs.q).copy()
    for request, row in np.argwhere(rows.reshape(shape.batch, shape.rows) >= kept):
        q[request, :, row * group : (row + 1) * group] = np.nan
    moved = dataclasses.replace(
        inputs,
        q=jnp.asarray(q),
        out_rows=jnp.asarray(rows.reshape(shape.batch, shape.rows)),
        num_out_rows=kept,
    )
    found = run(moved, implementation)
    assert found.shape == (kept, *expected.shape[2:])
    flat = expected.reshape(-1, *expected.shape[2:])
    np.testing.assert_array_equal(found, flat[np.argsort(rows)[:kept]])


def packed_inputs(shape: Shape, inputs: Inputs, padding: float) -> Inputs:
    packed = pack(inputs.q, shape.num_kv_heads)
    used = shape.rows * shape.num_heads // shape.num_kv_heads
    assert packed.shape[2] > used, "expected a shape with padding"
    q = packed.at[:, :, used:].set(padding)
    return dataclasses.replace(inputs, q=q, packed_heads=shape.num_heads)


def plan_of(batch: int, num_kv_heads: int, pages: int) -> Any:
    from pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu.Plan(
        batch=batch,
        rows=4,
        num_heads=4 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=128,
        block_size=64,
        pages=pages,
        window=None,
        scale=1.0,
        tuning=mosaic_gpu.Tuning(),
        has_sinks=False,
        is_fp8=False,
        interpreted=True,
    )


@needs_mosaic
@pytest.mark.parametrize(
    ("batch", "num_kv_heads", "pages", "expected"),
    [
        (1, 8, 8, 1),
        (33, 8, 8, 1),
        (34, 8, 8, 2),
        (64, 8, 16, 2),
        (72, 8, 8, 1),
        (128, 8, 8, 4),
        (100, 3, 8, 1),
        (64, 8, 20, 1),
    ],
)
def test_a_short_cta_does_so_many_heads_that_no_second_wave_is_needed(
    batch: int, num_kv_heads: int, pages: int, expected: int
) -> None:
    """Of 264 places; where the heads of 72 requests would need four times one head's time, three
    waves are better."""
    assert plan_of(batch, num_kv_heads, pages).heads == expected


@needs_mosaic
@pytest.mark.parametrize(("batch", "pages", "slots", "heads"), [(64, 8, 2, 2), (16, 512, 3, 1)])
def test_tiles_of_fp8_in_flight_and_heads_of_a_cta(
    batch: int, pages: int, slots: int, heads: int
) -> None:
    plan = dataclasses.replace(plan_of(batch, 8, pages), is_fp8=True)
    assert (plan.slots, plan.heads) == (slots, heads)


@needs_mosaic
@pytest.mark.parametrize(
    ("batch", "pages", "expected"),
    [(1, 16, 1), (1, 17, 2), (16, 13, 1), (16, 66, 2), (64, 13, 1), (64, 66, 2)],
)
def test_one_tile_is_in_flight_where_ctas_have_few_or_are_many_and_short(
    batch: int, pages: int, expected: int
) -> None:
    assert plan_of(batch, 8, pages).slots == expected


@needs_mosaic
@pytest.mark.parametrize(
    ("batch", "rows", "pages", "expected"),
    [
        (1, 1, 7, (1, 8)),
        (1, 4, 7, (2, 4)),
        (1, 6, 7, (3, 4)),
        (1, 8, 7, (4, 4)),
        (1, 4, 64, (2, 4)),
        (1, 4, 65, (1, 8)),
        (1, 8, 65, (2, 4)),
        (2, 1, 7, (1, 4)),
        (2, 1, 65, (1, 8)),
        (4, 4, 7, (2, 2)),
        (4, 4, 512, (2, 2)),
        (8, 4, 7, (1, 2)),
        (8, 4, 65, (1, 4)),
        (16, 4, 7, (1, 2)),
        (16, 8, 7, (2, 1)),
        (16, 8, 65, (1, 2)),
        (16, 4, 512, (1, 2)),
        (64, 4, 7, (1, 1)),
    ],
)
def test_parts_of_the_queries_and_ctas_that_share_keys(
    batch: int, rows: int, pages: int, expected: tuple[int, int]
) -> None:
    plan = dataclasses.replace(plan_of(batch, 8, pages), rows=rows)
    assert (plan.parts, plan.cluster) == expected


@needs_mosaic
def test_parts_hold_whole_rows() -> None:
    """Of eight query heads a KV head, a part of 8 columns has a row; of 7, none has whole rows."""
    plan = plan_of(1, 8, 7)
    assert dataclasses.replace(plan, num_heads=64).parts == 4
    assert dataclasses.replace(plan, num_heads=56).parts == 1
    inputs = make_inputs(Shape((9,), 4, num_heads=4, num_kv_heads=1, head_dim=64), seed=0)
    with pytest.raises(ValueError, match="whole rows and 8 columns, got 4 of 16 columns"):
        kernel(inputs, parts=4)


@needs_mosaic
def test_packs_where_the_rows_are_one_row_tile() -> None:
    assert packs("mosaic_gpu", rows=8, queries_per_kv=4)
    assert not packs("mosaic_gpu", rows=9, queries_per_kv=4)
    assert not packs("reference", rows=1, queries_per_kv=4)


def test_pack_and_unpack_are_inverse() -> None:
    q = jnp.arange(2 * 3 * 6 * 4, dtype=jnp.float32).reshape(2, 3, 6, 4)
    packed = pack(q, 2)
    assert packed.shape == (2, 2, 16, 4)
    np.testing.assert_array_equal(
        packed[1, 1, 3 * 2 + 1], q[1, 2, 3 + 1]
    )  # row 2, head 1 of the second group
    np.testing.assert_array_equal(packed[:, :, 9:], 0.0)
    np.testing.assert_array_equal(unpack(packed, 3, 6), q)


FITS = {
    "rows": 4,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 128,
    "block_size": 64,
    "q_dtype": jnp.bfloat16,
    "cache_dtype": jnp.bfloat16,
}


@needs_mosaic
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 96}, "head_dim: expected 64 or 128, got 96"),
        ({"block_size": 48}, "block_size: expected 8, 16, 32 or a multiple of 64, got 48"),
        ({"num_heads": 256}, "num_heads / num_kv_heads: expected at most 32, got 128"),
        (
            {"q_dtype": jnp.dtype("float32")},
            "dtypes of q and the caches: expected bfloat16, and it or float8_e4m3fn, got float32",
        ),
        (
            {"cache_dtype": jnp.dtype("float32")},
            "dtypes of q and the caches: expected bfloat16, and it or float8_e4m3fn, got ",
        ),
        ({"cache_dtype": jnp.dtype("float8_e4m3fn")}, None),
        ({}, None),
    ],
)
def test_what_the_kernel_does_not_support_has_a_reason(
    change: dict[str, Any], reason: str | None
) -> None:
    with interpreted():
        got = unsupported(Heads(**(FITS | change)))
    assert got is None if reason is None else got is not None and got.startswith(reason)


def test_the_kernel_refuses_a_cpu_and_an_old_jax() -> None:
    is_old = jax.__version_info__ < (0, 11)
    reason = "expected jax 0.11" if is_old else "device: expected an NVIDIA GPU"
    expected = f"attention, implementation 'mosaic_gpu': {reason}"
    if jax.default_backend() != "cpu":
        pytest.skip("there is a GPU")
    inputs = make_inputs(SMALL["sinks"], seed=0)
    with pytest.raises(ValueError, match=f"^{expected}"):
        paged_attention(inputs, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sinks": jnp.zeros(5)}, "sinks: expected float32 (6,), got float32 (5,)"),
        ({"window": 0}, "window: expected at least 1 key or None, got 0"),
        ({"packed_heads": 6}, "q: expected (3, 2, 16, 64), got (3, 4, 6, 64)"),
        ({"k_scale": jnp.ones(3)}, "k_scale: expected float32 (1,) or (2,), got float32 (3,)"),
        ({"v_scale": jnp.ones(2, int)}, "v_scale: expected float32 (1,) or (2,), got int32 (2,)"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], reason: str) -> None:
    inputs = make_inputs(SMALL["sinks"], seed=0)
    with pytest.raises(ValueError) as error:
        call(paged_attention, inputs, change)
    assert str(error.value) == reason


def test_bytes_moved_counts_each_key_once() -> None:
    shape = Shape((10, 0), rows=2, num_heads=4, num_kv_heads=2, head_dim=64)
    assert bytes_moved(shape) == (2 * 10 * 2 * 64 + 2 * 2 * 2 * 4 * 64) * 2
    assert (
        bytes_moved(dataclasses.replace(shape, window=3))
        == (2 * 4 * 2 * 64 + 2 * 2 * 2 * 4 * 64) * 2
    )


def test_bytes_moved_counts_a_byte_for_a_key_in_fp8() -> None:
    shape = Shape((10, 0), rows=2, num_heads=4, num_kv_heads=2, head_dim=64, fp8=True)
    assert bytes_moved(shape) == 2 * 10 * 2 * 64 + 2 * 2 * 2 * 4 * 64 * 2


def test_tiles_of_a_chunk_share_their_blocks_and_see_what_is_before_them() -> None:
    shape = Shape(2 * tiles(8, 16, 4), rows=4, num_heads=4, num_kv_heads=2, head_dim=64, chunk=2)
    assert shape.lengths == (12, 16, 12, 16) and shape.positions()[1].tolist() == [12, 13, 14, 15]
    table = np.asarray(make_inputs(shape, seed=0).block_table)
    assert table[0] == table[1] and table[2] == table[3] and table[0] != table[2]
    assert bytes_moved(shape) == (2 * 2 * 16 * 2 * 64 + 2 * 4 * 4 * 4 * 64) * 2
    assert flops(shape) == 2 * 4 * 64 * 4 * sum(range(9, 17))
    assert flops(dataclasses.replace(shape, window=3)) == 2 * 4 * 64 * 4 * 3 * 8


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_equals_the_float32_reference_at_real_sizes(name: str) -> None:
    shape = SHAPES[name]
    inputs = make_inputs(shape, seed=3)
    got = run(inputs, "mosaic_gpu")
    floats = ("q", "k_cache", "v_cache")
    wide = {name: getattr(inputs, name).astype(jnp.float32) for name in floats}
    inputs = dataclasses.replace(inputs, **wide)
    # A slice of a device array compiles for every place.
    on_host = {name: np.asarray(getattr(inputs, name)) for name in BY_REQUEST}
    inputs = dataclasses.replace(inputs, **on_host)
    with jax.default_matmul_precision("highest"):
        for b in range(
            shape.batch
        ):  # one request at a time: the reference gathers its keys and holds all its scores
            one = requests_of(inputs, slice(b, b + 1))
            expected = np.asarray(jax.jit(reference.paged_attention)(one))
            assert_close(got[b : b + 1], expected, live(shape)[b : b + 1])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in SHAPES if "prefill" in name])
def test_bits_of_prefill_on_the_gpu_do_not_depend_on_batch_table_or_chunk(name: str) -> None:
    inputs = near_ties(dataclasses.replace(SHAPES[name], lengths=SHAPES[name].lengths[:8]), seed=4)
    expected = run(inputs, "mosaic_gpu")
    np.testing.assert_array_equal(run(inputs, "mosaic_gpu"), expected, err_msg="twice")
    alone = requests_of(inputs, slice(-1, None))
    for tuning in ({"slots": 2}, {"warpgroups": 2}):
        np.testing.assert_array_equal(
            prefill_kernel(alone, **tuning), expected[-1:], err_msg=str(tuning)
        )
    wide = with_table(alone, jnp.pad(alone.block_table, ((0, 0), (0, 7))))
    np.testing.assert_array_equal(
        run(wide, "mosaic_gpu"), expected[-1:], err_msg="alone, a wider block table"
    )
    np.testing.assert_array_equal(
        prefill_kernel(rows_of(alone, 3, 43)), expected[-1:, 3:43], err_msg="40 rows"
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "slots"), [(64, 4), (128, 2)])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("name", PREFILL)
def test_prefill_equals_float64_on_the_gpu(name: str, overlap: bool, keys: int, slots: int) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    if shape.fp8 and keys == 128 and not overlap:
        slots = 1  # weights and two rings of two tiles do not fit in shared memory
    got = prefill_kernel(inputs, keys=keys, slots=slots, overlap=overlap)
    assert_close(got, ground_truth(shape, inputs), live(shape))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if shape.rows <= 8])
def test_bits_on_the_gpu_do_not_depend_on_batch_table_or_ctas(name: str) -> None:
    shape = SHAPES[name]
    inputs = near_ties(shape, seed=4)
    expected = run(inputs, "mosaic_gpu")
    np.testing.assert_array_equal(run(inputs, "mosaic_gpu"), expected, err_msg="twice")
    # What a first CTA of 32 columns of 128 values receives from seven others does not fit.
    is_wide = shape.rows * shape.num_heads // shape.num_kv_heads > 24 and shape.head_dim > 64
    for cluster in (1, 2, 4) if is_wide else (1, 2, 4, 8):
        np.testing.assert_array_equal(
            kernel(inputs, cluster=cluster), expected, err_msg=f"{cluster} CTAs"
        )
    from pallas_kernels.attention.mosaic_gpu import Plan, Tuning

    plan = Plan.of(inputs, Tuning())
    for parts in filter(plan.divides, (1, 2, 3, 4)):
        for cluster in (2, 4):
            np.testing.assert_array_equal(
                kernel(inputs, parts=parts, cluster=cluster),
                expected,
                err_msg=f"{parts} parts in clusters of {cluster}",
            )
    for heads in [heads for heads in (2, 3, 4) if shape.num_kv_heads % heads == 0]:
        np.testing.assert_array_equal(
            kernel(inputs, cluster=1, heads=heads), expected, err_msg=f"{heads} heads a CTA"
        )
    alone = requests_of(inputs, slice(-1, None))
    np.testing.assert_array_equal(run(alone, "mosaic_gpu"), expected[-1:], err_msg="alone")
    wide = with_table(alone, jnp.pad(alone.block_table, ((0, 0), (0, 2 * shape.table_pages))))
    np.testing.assert_array_equal(
        run(wide, "mosaic_gpu"), expected[-1:], err_msg="a wider block table"
    )
    plain = rows_of(alone, 0, 1)
    np.testing.assert_array_equal(run(plain, "mosaic_gpu"), expected[-1:, :1], err_msg="one row")


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("name", [name for name in SMALL if name not in PREFILL])
def test_equals_float64_on_the_gpu(name: str, cluster: int) -> None:
    shape = SMALL[name]
    inputs = make_inputs(shape, seed=len(name))
    assert_close(kernel(inputs, cluster=cluster), ground_truth(shape, inputs), live(shape))
