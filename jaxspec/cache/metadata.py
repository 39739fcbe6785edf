"""Attention metadata: a pure function of (block table, position), rebuilt in the compiled round.

vLLM rebuilds it on the host before every draft step (PR #41162) or runs on stale metadata. Here the
draft loop calls rebuild_draft_metadata, for the KV-cache groups that hold draft layers alone
(PR #37364).

For a pass of few rows, the kernel makes all arrays in one launch. They include the other inputs of
the attention and rotation kernels. In jnp these are about ten launches of 2 us each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.config import (
    REFERENCE_OPS,
    AttentionConfig,
    AttentionKind,
    CacheGroup,
    Ops,
    rope_frequencies,
)
from pallas_kernels.step_metadata import Inputs, last_keys, step_metadata, unsupported

BlockTables = tuple[jax.Array, ...]  # int32 [batch, pages] of each KV-cache group

# The ops that prefill passes to build_metadata: the kernel is made for the few rows of a round.
PREFILL_METADATA_OPS = REFERENCE_OPS


@struct.dataclass
class AttentionMetadata:
    """Inputs of an attention call of one KV-cache group. All are int32 but rope.

    positions:    [batch, rows] of each query row; at most max_model_len, and within the block table
    seq_lens:     [batch] tokens in the cache once these rows are written; 0 for an idle request
    slot_mapping: [batch, rows] cache slot of each row's key and value; PAD_SLOT for a masked row
    block_table:  [batch, pages] block ids of each request
    window_start: [batch, rows] first position that a row sees (0 with full attention)
    num_pages:    [batch] pages of the block table in use
    bounds:       key bounds for the attention kernel (pallas_kernels.attention.bounds); None: the
                  attention op makes them
    rope:         cos and sin (jaxspec.layers.rope.rope_tables); None: the layers make them
    last_keys:    [batch, rows] last position that each row sees; None: its own
    """

    positions: jax.Array
    seq_lens: jax.Array
    slot_mapping: jax.Array
    block_table: jax.Array
    window_start: jax.Array
    num_pages: jax.Array
    bounds: jax.Array | None = None
    rope: tuple[jax.Array, jax.Array] | None = None
    last_keys: jax.Array | None = None


@dataclass(frozen=True)
class Visibility:
    """Which keys the rows of a pass see in one KV-cache group, besides the group's window.

    causal:     a row sees no later row; else every row sees all real rows
    one_window: every row's window begins where the first row's does
    """

    causal: bool = True
    one_window: bool = False


CAUSAL = Visibility()


def build_metadata(
    groups: tuple[CacheGroup, ...],
    block_tables: BlockTables,
    start: jax.Array,
    num_rows: jax.Array,
    rows: int,
    *,
    attention: AttentionKind,
    ops: Ops,
) -> tuple[AttentionMetadata, ...]:
    """Build the metadata of one pass over `rows` query rows per request.

    Returns one AttentionMetadata for each of a model's KV-cache groups.

    The first num_rows int32 [batch] rows are real, from position start int32 [batch]. Rows past
    num_rows, past the block table, or at max_model_len and beyond write nothing. A request with
    num_rows 0 is idle. attention and ops are those of the layers that read the metadata.
    """
    seen = (CAUSAL,) * len(groups)
    return _build(groups, block_tables, start, num_rows, 0, rows, seen, attention, ops)


def block_metadata(
    groups: tuple[CacheGroup, ...],
    block_tables: BlockTables,
    seq_lens: jax.Array,
    active: jax.Array,
    rows: int,
    *,
    padding: int = 0,
    seen: tuple[Visibility, ...],
    attention: AttentionKind,
    ops: Ops,
) -> tuple[AttentionMetadata, ...]:
    """Build the metadata of a block of drafts: `rows` rows per request, right after its context.

    seq_lens int32 [batch] are the tokens in the cache, which become the context. Rows have their
    true positions. A request that is not active [batch] is idle. Rows at max_model_len and beyond
    write nothing.

    padding: idle rows after the block's, which write nothing and which no row sees
    seen:    for each group, which of the block's rows see each other

    The block's keys lie past the request's tokens, as those of rejected rows do, so the next round
    overwrites them. The other arguments are build_metadata's.
    """
    num_rows = jnp.where(active, jnp.int32(rows), 0)
    total = rows + padding
    return _build(groups, block_tables, seq_lens, num_rows, 0, total, seen, attention, ops)


def rebuild_draft_metadata(
    groups: tuple[CacheGroup, ...],
    block_tables: BlockTables,
    seq_lens: jax.Array,
    num_pending: jax.Array,
    step: jax.Array | int,
    *,
    attention: AttentionKind,
    ops: Ops,
) -> tuple[AttentionMetadata, ...]:
    """Build the metadata of draft step 1, 2, ...: one more row per request, right after the last.

    seq_lens int32 [batch] are the tokens in the cache after step 0, which consumed num_pending
    int32 [batch] rows. A request with num_pending 0 stays idle. At max_model_len the row's write
    is dropped and the length stays. The other arguments are build_metadata's.
    """
    seen = (CAUSAL,) * len(groups)
    return _build(groups, block_tables, seq_lens, num_pending, step - 1, 1, seen, attention, ops)


def cache_slots(
    group: CacheGroup,
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    rows: int,
) -> jax.Array:
    """Return build_metadata's slot_mapping int32 [batch, rows] alone, for one group."""
    inputs = _inputs(group, block_table, start, num_rows, 0, rows, CAUSAL)
    return step_metadata(inputs, implementation="reference").slot_mapping


def _build(
    groups: tuple[CacheGroup, ...],
    block_tables: BlockTables,
    start: jax.Array,
    num_rows: jax.Array,
    step: jax.Array | int,
    rows: int,
    seen: tuple[Visibility, ...],
    attention: AttentionKind,
    ops: Ops,
) -> tuple[AttentionMetadata, ...]:
    # The kernel makes one group's metadata and rotation tables; a model of several groups has its
    # tables made once, in jnp, for all of them.
    kernel_attention = attention if len(groups) == 1 else None
    return tuple(
        _build_group(group, table, start, num_rows, step, rows, rule, kernel_attention, ops)
        for group, table, rule in zip(groups, block_tables, seen, strict=True)
    )


def _build_group(
    group: CacheGroup,
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    step: jax.Array | int,
    rows: int,
    seen: Visibility,
    attention: AttentionKind | None,
    ops: Ops,
) -> AttentionMetadata:
    """Build one group's metadata; see pallas_kernels.step_metadata.step_metadata for the arrays."""
    options: dict[str, Any] = {}
    if ops.step_metadata != "reference" and (reader := _kernel_reader(group, attention, rows)):
        rope = reader.rope
        frequencies = tuple(rope_frequencies(rope, reader.rope_dim).tolist())
        options = {
            "queries_per_kv": reader.num_heads // reader.num_kv_heads,
            "frequencies": frequencies,
            "attention_factor": rope.attention_factor,
        }
    inputs = _inputs(group, block_table, start, num_rows, step, rows, seen, **options)
    made = step_metadata(inputs, implementation=ops.step_metadata if options else "reference")
    window_start = made.window_start
    if group.chunk is not None:
        window_start = made.positions // group.chunk * group.chunk
    rope_tables = None
    if made.cos is not None and made.sin is not None:
        rope_tables = (made.cos[:, :, None], made.sin[:, :, None])
    return AttentionMetadata(
        positions=made.positions,
        seq_lens=made.seq_lens,
        slot_mapping=made.slot_mapping,
        block_table=block_table,
        window_start=window_start,
        num_pages=-(-made.seq_lens // group.block_size),
        bounds=made.bounds,
        rope=rope_tables,
        last_keys=None if seen.causal else last_keys(made.positions, made.seq_lens, causal=False),
    )


def _inputs(
    group: CacheGroup,
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    step: jax.Array | int,
    rows: int,
    seen: Visibility,
    **options: Any,
) -> Inputs:
    """Return the inputs of step_metadata for one group; options are those of the kernel alone."""
    return Inputs(
        block_table=block_table,
        start=start,
        num_rows=num_rows,
        step=step,
        rows=rows,
        block_size=group.block_size,
        max_model_len=group.max_model_len,
        window=group.window,
        one_window=seen.one_window,
        causal=seen.causal,
        **options,
    )


def _kernel_reader(
    group: CacheGroup, attention: AttentionKind | None, rows: int
) -> AttentionConfig | None:
    """Return the attention config if the kernel can make its metadata, else None.

    The kernel serves keys and values by head, without chunks, and few rows.
    """
    if not isinstance(attention, AttentionConfig) or group.chunk is not None:
        return None
    queries_per_kv = attention.num_heads // attention.num_kv_heads
    reason = unsupported(rows, queries_per_kv, attention.rope_dim)
    return attention if reason is None else None
