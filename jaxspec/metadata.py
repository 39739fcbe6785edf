"""Attention metadata: a pure function of (block table, position), so that it is rebuilt inside the compiled round.

vLLM rebuilds it on the host before every draft step (PR #41162) or runs on stale metadata; here the draft loop's
body calls rebuild_draft_metadata, and only for the KV-cache groups that hold draft layers (PR #37364).
"""

from __future__ import annotations

from typing import Any, overload

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.config import CacheGroup
from jaxspec.kv_cache import PAD_SLOT

CacheGroups = CacheGroup | tuple[CacheGroup, ...]  # of a model: one, or one for each type of attention among its layers
BlockTables = jax.Array | tuple[jax.Array, ...]  # int32 [batch, pages], for every group or one each


@struct.dataclass
class AttentionMetadata:
    """Everything that an attention call of one KV-cache group needs, and nothing else. All int32.

    positions:    [batch, rows] of each query row; at most max_model_len, and what the block table holds.
    seq_lens:     [batch] tokens in the cache once these rows are written; 0 for an idle request.
    slot_mapping: [batch, rows] where each row's key and value go; PAD_SLOT for a masked row.
    block_table:  [batch, pages] block ids of each request.
    window_start: [batch, rows] first position that a row sees (0 with full attention).
    num_pages:    [batch] pages of the block table in use.
    """

    positions: jax.Array
    seq_lens: jax.Array
    slot_mapping: jax.Array
    block_table: jax.Array
    window_start: jax.Array
    num_pages: jax.Array


@overload
def build_metadata(group: CacheGroup, block_table: jax.Array, start: jax.Array, num_rows: jax.Array, rows: int) -> AttentionMetadata: ...


@overload
def build_metadata(
    group: tuple[CacheGroup, ...], block_table: BlockTables, start: jax.Array, num_rows: jax.Array, rows: int
) -> tuple[AttentionMetadata, ...]: ...


def build_metadata(
    group: CacheGroups, block_table: BlockTables, start: jax.Array, num_rows: jax.Array, rows: int
) -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Metadata for `rows` query rows a request, of which the first num_rows [batch] are real, from position start [batch].

    Rows past num_rows, at max_model_len and beyond, or past the block table, write nothing. A request with num_rows 0 is idle.
    For a model whose layers differ in attention `group` is a tuple, and so is what returns; block_table is then one for all, or a tuple.
    """
    return _of_groups(group, block_table, start, num_rows, rows)


def _of_groups(group: Any, block_table: Any, start: jax.Array, num_rows: jax.Array, rows: int) -> Any:
    if isinstance(group, tuple):
        tables = block_table if isinstance(block_table, tuple) else (block_table,) * len(group)
        return tuple(_build(g, table, start, num_rows, rows) for g, table in zip(group, tables, strict=True))
    return _build(group, block_table, start, num_rows, rows)


def _build(group: CacheGroup, block_table: jax.Array, start: jax.Array, num_rows: jax.Array, rows: int) -> AttentionMetadata:
    limit = min(group.max_model_len, block_table.shape[1] * group.block_size)
    positions = start[:, None] + jnp.arange(rows, dtype=jnp.int32)
    writes = (jnp.arange(rows) < num_rows[:, None]) & (positions < limit)
    positions = jnp.minimum(positions, limit)
    page = jnp.minimum(positions // group.block_size, block_table.shape[1] - 1)
    slots = jnp.take_along_axis(block_table, page, axis=1) * group.block_size + positions % group.block_size
    seq_lens = jnp.where(num_rows > 0, jnp.minimum(start + num_rows, limit), 0)
    return AttentionMetadata(
        positions=positions,
        seq_lens=seq_lens,
        slot_mapping=jnp.where(writes, slots, PAD_SLOT),
        block_table=block_table,
        window_start=_window_start(group, positions),
        num_pages=-(-seq_lens // group.block_size),
    )


def _window_start(group: CacheGroup, positions: jax.Array) -> jax.Array:
    if group.window is not None:
        return jnp.maximum(positions - group.window + 1, 0)
    return jnp.zeros_like(positions) if group.chunk is None else positions // group.chunk * group.chunk


@overload
def rebuild_draft_metadata(
    group: CacheGroup, block_table: jax.Array, seq_lens: jax.Array, num_pending: jax.Array, step: jax.Array | int
) -> AttentionMetadata: ...


@overload
def rebuild_draft_metadata(
    group: tuple[CacheGroup, ...], block_table: BlockTables, seq_lens: jax.Array, num_pending: jax.Array, step: jax.Array | int
) -> tuple[AttentionMetadata, ...]: ...


def rebuild_draft_metadata(
    group: CacheGroups, block_table: BlockTables, seq_lens: jax.Array, num_pending: jax.Array, step: jax.Array | int
) -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Metadata of draft step 1, 2, ...: one more row a request, right after the last one; idle requests (num_pending 0) stay idle.

    seq_lens [batch] are the tokens in the cache after step 0, which consumed num_pending [batch] rows. At max_model_len the row's write is
    dropped and the length stays. `group` and block_table as in build_metadata.
    """
    return _of_groups(group, block_table, seq_lens + (step - 1), jnp.minimum(num_pending, 1), rows=1)
