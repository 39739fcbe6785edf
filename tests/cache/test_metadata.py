"""Attention metadata of every draft step equals a from-scratch build in plain Python, and nothing
in it may be stale."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.cache.arrays import PAD_SLOT
from jaxspec.cache.metadata import (
    AttentionMetadata,
    Visibility,
    block_metadata,
    build_metadata,
    rebuild_draft_metadata,
)
from jaxspec.config import (
    REFERENCE_OPS,
    AttentionConfig,
    CacheGroup,
    MLAConfig,
    Ops,
    RopeConfig,
)
from jaxspec.drafts import autoregressive as propose_module
from jaxspec.layers.rope import rope_tables
from pallas_kernels.attention.bounds import key_bounds
from tests.kernels.interpreter import interpreted, needs_mosaic
from tests.support.tiny import ATTENTION

FIELDS = tuple(
    f.name for f in fields(AttentionMetadata) if f.name not in ("bounds", "rope", "last_keys")
)  # those are a kernel's, or None but for a block of drafts
BLOCK_SIZES = (1, 2, 16)
IN_JNP: Any = {"attention": ATTENTION, "ops": REFERENCE_OPS}
LIMIT = 40  # max_model_len: a multiple of no block size but 1 and 2


def from_scratch(
    group: CacheGroup, table: np.ndarray, start: list[int], num_rows: list[int], rows: int
) -> dict[str, np.ndarray]:
    """What the docstrings of AttentionMetadata say, one entry at a time."""
    size, limit = group.block_size, group.max_model_len
    out: dict[str, Any] = {name: [] for name in FIELDS}
    for blocks, first, real in zip(table.tolist(), start, num_rows, strict=True):
        positions = [min(first + i, limit) for i in range(rows)]
        writes = [i < real and first + i < limit for i in range(rows)]
        length = min(first + real, limit) if real else 0
        out["positions"].append(positions)
        out["seq_lens"].append(length)
        out["slot_mapping"].append(
            [
                blocks[p // size] * size + p % size if w else PAD_SLOT
                for p, w in zip(positions, writes, strict=True)
            ]
        )
        out["window_start"].append(
            [0 if group.window is None else max(p - group.window + 1, 0) for p in positions]
        )
        out["num_pages"].append(sum(1 for page in range(len(blocks)) if page * size < length))
    return {
        name: np.array(value, np.int32) for name, value in (out | {"block_table": table}).items()
    }


def differing(metadata: AttentionMetadata, expected: dict[str, np.ndarray]) -> set[str]:
    """The fields that differ in shape, dtype or value."""
    found = set()
    for name in FIELDS:
        value = np.asarray(getattr(metadata, name))
        if (
            value.dtype != np.int32
            or value.shape != expected[name].shape
            or not np.array_equal(value, expected[name])
        ):
            found.add(name)
    return found


def shuffled_table(group: CacheGroup, batch: int) -> np.ndarray:
    pages = -(-group.max_model_len // group.block_size)
    return (
        np.random.default_rng(batch)
        .permutation(batch * pages)
        .astype(np.int32)
        .reshape(batch, pages)
    )


def expected_steps(
    group: CacheGroup, table: np.ndarray, seq_lens: list[int], pending: list[int], K: int
) -> list[dict[str, np.ndarray]]:
    """Step 0 consumes the pending rows; step k >= 1 is the row at position seq_lens + k - 1."""
    steps = [
        from_scratch(
            group, table, [s - n for s, n in zip(seq_lens, pending, strict=True)], pending, K + 1
        )
    ]
    for k in range(1, K):
        live = [int(n > 0) for n in pending]
        start = [s + k - 1 for s in seq_lens]
        steps.append(from_scratch(group, table, start, live, 1))
    return steps


def rebuilt_steps(
    group: CacheGroup, table: np.ndarray, seq_lens: list[int], pending: list[int], K: int
) -> list[AttentionMetadata]:
    """The metadata that propose's steps see, through the functions that propose calls."""
    lens, rows = jnp.asarray(seq_lens, jnp.int32), jnp.asarray(pending, jnp.int32)
    groups, tables = (group,), (jnp.asarray(table),)
    steps = [propose_module.build_metadata(groups, tables, lens - rows, rows, K + 1, **IN_JNP)]
    for step in range(1, K):
        steps.append(
            propose_module.rebuild_draft_metadata(groups, tables, lens, rows, step, **IN_JNP)
        )
    return [metadata for (metadata,) in steps]


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seq_lens=st.lists(st.integers(1, LIMIT), min_size=3, max_size=3),
    pending=st.lists(st.integers(0, 7), min_size=3, max_size=3),
    K=st.integers(1, 6),
)
@example(seq_lens=[LIMIT, LIMIT - 1, LIMIT - 2], pending=[1, 2, 7], K=6)
def test_every_draft_step_equals_a_build_from_scratch(
    block_size: int, window: int | None, seq_lens: list[int], pending: list[int], K: int
) -> None:
    group = CacheGroup(block_size, LIMIT, window)
    pending = [min(n, K + 1, s) for n, s in zip(pending, seq_lens, strict=True)]
    table = shuffled_table(group, 3)
    steps = rebuilt_steps(group, table, seq_lens, pending, K)
    for step, (metadata, expected) in enumerate(
        zip(steps, expected_steps(group, table, seq_lens, pending, K), strict=True)
    ):
        assert not differing(metadata, expected), f"step {step}: {differing(metadata, expected)}"


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_every_offset_and_every_length_up_to_the_limit(block_size: int, window: int | None) -> None:
    """All seq_lens at once, as rows of one batch, for K = 6."""
    group, K = CacheGroup(block_size, LIMIT, window), 6
    seq_lens = list(range(1, LIMIT + 1))
    pending = [min(1 + s % (K + 1), s) for s in seq_lens]
    table = shuffled_table(group, len(seq_lens))
    steps = jax.jit(lambda: rebuilt_steps(group, table, seq_lens, pending, K))()
    for step, (metadata, expected) in enumerate(
        zip(steps, expected_steps(group, table, seq_lens, pending, K), strict=True)
    ):
        assert not differing(metadata, expected), f"step {step}: {differing(metadata, expected)}"


def test_without_rebuilding_the_derived_fields_are_stale_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison above notices more than lengths when later steps run on step 1's metadata."""
    monkeypatch.setattr(propose_module, "rebuild_draft_metadata", step_1_always)
    group, K = CacheGroup(2, LIMIT, window=3), 4
    seq_lens, pending = [5, 8, 11], [1, 3, 2]
    table = shuffled_table(group, 3)
    steps = zip(
        rebuilt_steps(group, table, seq_lens, pending, K),
        expected_steps(group, table, seq_lens, pending, K),
        strict=True,
    )
    found = [differing(metadata, expected) for metadata, expected in steps]
    assert found[:2] == [set(), set()]
    assert all(
        f == {"positions", "seq_lens", "slot_mapping", "window_start", "num_pages"}
        for f in found[2:]
    ), found


def step_1_always(
    groups: Any, block_tables: Any, seq_lens: Any, num_pending: Any, step: Any, **options: Any
) -> tuple[AttentionMetadata, ...]:
    """Step 1's metadata, at every step."""
    return rebuild_draft_metadata(groups, block_tables, seq_lens, num_pending, 1, **options)


KERNEL_OPS = Ops(step_metadata="mosaic_gpu")


@needs_mosaic
def test_the_kernel_makes_every_field_and_what_its_readers_read_besides() -> None:
    group, attention = (
        CacheGroup(2, LIMIT, window=3),
        AttentionConfig(4, 2, 8, rope=RopeConfig(theta=100.0)),
    )
    table, start, rows = (
        jnp.asarray(shuffled_table(group, 3)),
        jnp.asarray([5, 0, LIMIT - 1], jnp.int32),
        jnp.asarray([2, 0, 3], jnp.int32),
    )
    for build, last in ((build_metadata, 3), (rebuild_draft_metadata, 2)):
        args, options = ((group,), (table,), start, rows, last), {"attention": attention}
        static = (0, 4) if build is build_metadata else 0
        in_jnp = jax.jit(partial(build, **options, ops=REFERENCE_OPS), static_argnums=static)
        (plain,) = in_jnp(*args)
        assert plain.bounds is None and plain.rope is None
        with interpreted():
            (made,) = build(*args, **options, ops=KERNEL_OPS)
        assert not differing(made, {name: np.asarray(getattr(plain, name)) for name in FIELDS})
        jax.tree.map(
            np.testing.assert_array_equal,
            made.rope,
            rope_tables(attention.rope, 8, plain.positions),
        )
        own = key_bounds(
            plain.positions,
            plain.seq_lens,
            plain.window_start,
            queries_per_kv=2,
            max_keys=table.shape[1] * 2,
        )
        np.testing.assert_array_equal(made.bounds, own)


@pytest.mark.parametrize(
    ("groups", "attention", "rows"),
    [
        ((CacheGroup(2, LIMIT),), AttentionConfig(4, 2, 8), 17),  # a prefill chunk
        ((CacheGroup(2, LIMIT, chunk=4),), AttentionConfig(4, 2, 8), 1),
        ((CacheGroup(2, LIMIT),), MLAConfig(4, 16, None, 8, 8, 8), 1),
        ((CacheGroup(2, LIMIT), CacheGroup(2, LIMIT, window=3)), AttentionConfig(4, 2, 8), 1),
    ],
)
def test_the_rest_is_made_in_jnp_whatever_the_ops(
    groups: tuple[CacheGroup, ...], attention: Any, rows: int
) -> None:
    """Off a GPU the kernel would be an error."""
    tables, ones = (jnp.zeros((1, 20), jnp.int32),) * len(groups), jnp.ones(1, jnp.int32)
    made, in_jnp = (
        build_metadata(groups, tables, ones, ones, rows, attention=attention, ops=ops)
        for ops in (KERNEL_OPS, REFERENCE_OPS)
    )
    assert len(made) == len(groups)
    for metadata in made:
        assert metadata.bounds is None and metadata.rope is None
    jax.tree.map(np.testing.assert_array_equal, made, in_jnp)


@pytest.mark.parametrize("build", [build_metadata, rebuild_draft_metadata])
@pytest.mark.parametrize("missing", ["attention", "ops"])
def test_metadata_without_its_readers_attention_or_ops_is_an_error(
    build: Any, missing: str
) -> None:
    tables, ones = (jnp.zeros((1, 20), jnp.int32),), jnp.ones(1, jnp.int32)
    options = {name: value for name, value in IN_JNP.items() if name != missing}
    with pytest.raises(TypeError, match=missing):
        build((CacheGroup(2, LIMIT),), tables, ones, ones, 1, **options)


# ---- cases that vLLM's suite states


def rebuilt(
    start: list[int], steps: int, limit: int, rows: list[int] | None = None
) -> AttentionMetadata:
    group, lens = CacheGroup(16, limit), jnp.asarray(start, jnp.int32)
    groups, tables = (group,), (jnp.asarray(shuffled_table(group, len(start))),)
    num_rows = jnp.asarray([1] * len(start) if rows is None else rows, jnp.int32)
    (metadata,) = (
        rebuild_draft_metadata(groups, tables, lens, num_rows, steps, **IN_JNP)
        if steps
        else build_metadata(groups, tables, lens - num_rows, num_rows, 3, **IN_JNP)
    )
    return metadata


def test_lengths_grow_by_one_a_step() -> None:
    assert rebuilt([100, 200, 300], steps=2, limit=1024).seq_lens.tolist() == [102, 202, 302]


def test_lengths_stop_at_the_limit() -> None:
    assert rebuilt([1023], steps=3, limit=1024).seq_lens.tolist() == [1024]


def test_padding_rows_keep_length_0() -> None:
    metadata = rebuilt([7, 0, 0], steps=2, limit=1024, rows=[2, 0, 0])
    assert metadata.seq_lens.tolist() == [9, 0, 0] and metadata.num_pages.tolist() == [1, 0, 0]
    assert metadata.slot_mapping[1:].tolist() == [[PAD_SLOT], [PAD_SLOT]]


@pytest.mark.parametrize(("position", "following"), [(50, 51), (98, 99), (99, 100), (100, 100)])
def test_positions_advance_and_are_clamped_at_the_limit(position: int, following: int) -> None:
    """vLLM's first runner moves positions of 100 and beyond to 0 (PAD); ours, like its second,
    clamps and drops the write."""
    before = rebuilt([position + 1], steps=0, limit=100)
    assert before.positions[0, 0] == position
    (after,) = rebuild_draft_metadata(
        (CacheGroup(16, 100),),
        (before.block_table,),
        jnp.asarray([position + 1], jnp.int32),
        jnp.ones(1, jnp.int32),
        1,
        **IN_JNP,
    )
    assert after.positions.tolist() == [[following]]
    assert (after.slot_mapping[0, 0] == PAD_SLOT) == (following >= 100)


def test_rejected_rows_are_masked_and_the_last_real_row_is_sampled() -> None:
    """Three queries of 3 rows with [1, 0, 2] rejected: the flat sample indices [1, 5, 6]."""
    group = CacheGroup(4, 64)
    table = jnp.asarray(shuffled_table(group, 3))
    kept = jnp.asarray([2, 3, 1], jnp.int32)
    start = jnp.asarray([10, 20, 30], jnp.int32)
    (metadata,) = build_metadata((group,), (table,), start, kept, 3, **IN_JNP)
    assert metadata.positions.tolist() == [[10, 11, 12], [20, 21, 22], [30, 31, 32]]
    assert (metadata.slot_mapping != PAD_SLOT).tolist() == [
        [True, True, False],
        [True, True, True],
        [True, False, False],
    ]
    assert (jnp.arange(3) * 3 + kept - 1).tolist() == [1, 5, 6]
    assert metadata.seq_lens.tolist() == [12, 23, 31]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_block_of_drafts_lies_after_its_context_and_sees_all_of_itself(
    block_size: int, window: int | None, causal: bool
) -> None:
    """Every length at once, idle requests and max_model_len among them, by counting keys."""
    group, rows = CacheGroup(block_size, LIMIT, window), 6
    seq_lens = np.arange(LIMIT + 1, dtype=np.int32)
    active = seq_lens % 7 != 3
    table = shuffled_table(group, len(seq_lens))
    (made,) = block_metadata(
        (group,),
        (jnp.asarray(table),),
        jnp.asarray(seq_lens),
        jnp.asarray(active),
        rows,
        seen=(Visibility(causal=causal, one_window=True),),
        **IN_JNP,
    )
    num_rows = np.where(active, rows, 0).tolist()
    expected = from_scratch(group, table, seq_lens.tolist(), num_rows, rows)
    first = np.zeros(LIMIT + 1) if window is None else np.maximum(seq_lens - window + 1, 0)
    expected["window_start"] = np.tile(first[:, None], (1, rows)).astype(np.int32)
    assert not differing(made, expected)
    if causal:
        assert made.last_keys is None
    else:
        whole = np.where(active, np.minimum(seq_lens + rows, LIMIT), 0) - 1
        np.testing.assert_array_equal(made.last_keys, np.tile(whole[:, None], (1, rows)))


@pytest.mark.parametrize("causal", [True, False])
def test_idle_rows_after_a_block_write_nothing_and_change_no_other_row(causal: bool) -> None:
    group, rows, padding = CacheGroup(4, LIMIT, 5), 6, 2
    seq_lens = np.arange(LIMIT + 1, dtype=np.int32)
    table = jnp.asarray(shuffled_table(group, len(seq_lens)))
    arguments = ((group,), (table,), jnp.asarray(seq_lens), jnp.asarray(seq_lens % 7 != 3), rows)
    seen = (Visibility(causal=causal, one_window=True),)
    (alone,) = block_metadata(*arguments, seen=seen, **IN_JNP)
    (padded,) = block_metadata(*arguments, padding=padding, seen=seen, **IN_JNP)
    np.testing.assert_array_equal(padded.slot_mapping[:, rows:], PAD_SLOT)
    assert padded.seq_lens.tolist() == alone.seq_lens.tolist()
    for name in ("slot_mapping", "positions", "window_start", "last_keys"):
        one, other = getattr(alone, name), getattr(padded, name)
        assert (one is None) == (other is None), name
        if one is not None:
            np.testing.assert_array_equal(one, other[:, :rows], err_msg=name)
