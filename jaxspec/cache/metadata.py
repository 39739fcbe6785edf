"""Attention metadata: a pure function of (block table, position), so that it is rebuilt inside the compiled round.

vLLM rebuilds it on the host before every draft step (PR #41162) or runs on stale metadata; here the draft loop's
body calls rebuild_draft_metadata, and only for the KV-cache groups that hold draft layers (PR #37364).

With its kernel, a pass of few rows over layers that are all alike has one launch for all of it, and for what the kernels of attention and
rotation read besides: in jnp these are about ten, and each takes the 2 us of a launch.
"""

from __future__ import annotations

from typing import Any, overload

import jax
from flax import struct

from jaxspec.config import REFERENCE_KERNELS, AttentionConfig, CacheGroup, Kernels, rope_frequencies
from pallas_kernels.step_metadata import Inputs, step_metadata, unsupported

CacheGroups = (
    CacheGroup | tuple[CacheGroup, ...]
)  # of a model: one, or one for each type of attention among its layers
BlockTables = jax.Array | tuple[jax.Array, ...]  # int32 [batch, pages], for every group or one each


@struct.dataclass
class AttentionMetadata:
    """Everything that an attention call of one KV-cache group needs, and nothing else. All int32, but for rope.

    positions:    [batch, rows] of each query row; at most max_model_len, and what the block table holds.
    seq_lens:     [batch] tokens in the cache once these rows are written; 0 for an idle request.
    slot_mapping: [batch, rows] where each row's key and value go; PAD_SLOT for a masked row.
    block_table:  [batch, pages] block ids of each request.
    window_start: [batch, rows] first position that a row sees (0 with full attention).
    num_pages:    [batch] pages of the block table in use.
    bounds:       what the attention kernel reads of these (pallas_kernels.attention.bounds); None: it is made where attention is called.
    rope:         cos and sin, as jaxspec.layers.rope_tables makes them; None: they are made where the layers are called.
    """

    positions: jax.Array
    seq_lens: jax.Array
    slot_mapping: jax.Array
    block_table: jax.Array
    window_start: jax.Array
    num_pages: jax.Array
    bounds: jax.Array | None = None
    rope: tuple[jax.Array, jax.Array] | None = None


@overload
def build_metadata(
    group: CacheGroup,
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    rows: int,
    **readers: Any,
) -> AttentionMetadata: ...


@overload
def build_metadata(
    group: tuple[CacheGroup, ...],
    block_table: BlockTables,
    start: jax.Array,
    num_rows: jax.Array,
    rows: int,
    **readers: Any,
) -> tuple[AttentionMetadata, ...]: ...


def build_metadata(
    group: CacheGroups,
    block_table: BlockTables,
    start: jax.Array,
    num_rows: jax.Array,
    rows: int,
    **readers: Any,
) -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Metadata for `rows` query rows a request, of which the first num_rows [batch] are real, from position start [batch].

    Rows past num_rows, at max_model_len and beyond, or past the block table, write nothing. A request with num_rows 0 is idle.
    For a model whose layers differ in attention `group` is a tuple, and so is what returns; block_table is then one for all, or a tuple.
    readers: attention, the AttentionConfig of the layers that will read it, and kernels, their Kernels; without them it is made in jnp.
    """
    return _of_groups(group, block_table, start, num_rows, 0, rows, **readers)


@overload
def rebuild_draft_metadata(
    group: CacheGroup,
    block_table: jax.Array,
    seq_lens: jax.Array,
    num_pending: jax.Array,
    step: jax.Array | int,
    **readers: Any,
) -> AttentionMetadata: ...


@overload
def rebuild_draft_metadata(
    group: tuple[CacheGroup, ...],
    block_table: BlockTables,
    seq_lens: jax.Array,
    num_pending: jax.Array,
    step: jax.Array | int,
    **readers: Any,
) -> tuple[AttentionMetadata, ...]: ...


def rebuild_draft_metadata(
    group: CacheGroups,
    block_table: BlockTables,
    seq_lens: jax.Array,
    num_pending: jax.Array,
    step: jax.Array | int,
    **readers: Any,
) -> AttentionMetadata | tuple[AttentionMetadata, ...]:
    """Metadata of draft step 1, 2, ...: one more row a request, right after the last one; idle requests (num_pending 0) stay idle.

    seq_lens [batch] are the tokens in the cache after step 0, which consumed num_pending [batch] rows. At max_model_len the row's write is
    dropped and the length stays. group, block_table and readers as in build_metadata.
    """
    return _of_groups(group, block_table, seq_lens, num_pending, step - 1, 1, **readers)


def _of_groups(group: Any, block_table: Any, *args: Any, **readers: Any) -> Any:
    if isinstance(group, tuple):
        tables = block_table if isinstance(block_table, tuple) else (block_table,) * len(group)
        return tuple(_build(g, table, *args) for g, table in zip(group, tables, strict=True))
    return _build(group, block_table, *args, **readers)


def _build(
    group: CacheGroup,
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    step: jax.Array | int,
    rows: int,
    *,
    attention: Any = None,
    kernels: Kernels = REFERENCE_KERNELS,
) -> AttentionMetadata:
    """See pallas_kernels.step_metadata.step_metadata for what the arrays are."""
    options: dict[str, Any] = {}
    if kernels.step_metadata == "mosaic_gpu" and _is_one_launch(group, attention, rows):
        rope = attention.rope
        frequencies = tuple(rope_frequencies(rope, attention.rope_dim).tolist())
        options = {
            "queries_per_kv": attention.num_heads // attention.num_kv_heads,
            "frequencies": frequencies,
        }
        options |= {"attention_factor": rope.attention_factor}
    sizes = {
        "rows": rows,
        "block_size": group.block_size,
        "max_model_len": group.max_model_len,
        "window": group.window,
    }
    inputs = Inputs(
        block_table=block_table, start=start, num_rows=num_rows, step=step, **sizes, **options
    )
    made = step_metadata(inputs, implementation="mosaic_gpu" if options else "reference")
    return AttentionMetadata(
        positions=made.positions,
        seq_lens=made.seq_lens,
        slot_mapping=made.slot_mapping,
        block_table=block_table,
        window_start=made.window_start
        if group.chunk is None
        else made.positions // group.chunk * group.chunk,
        num_pages=-(-made.seq_lens // group.block_size),
        bounds=made.bounds,
        rope=None
        if made.cos is None or made.sin is None
        else (made.cos[:, :, None], made.sin[:, :, None]),
    )


def _is_one_launch(group: CacheGroup, attention: Any, rows: int) -> bool:
    """Whether the kernel makes the metadata: of keys and values of heads, without chunks; prefill's many rows are jnp's."""
    if not isinstance(attention, AttentionConfig) or group.chunk is not None:
        return False
    return (
        unsupported(rows, attention.num_heads // attention.num_kv_heads, attention.rope_dim) is None
    )
