"""Metadata of a pass in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.bounds import key_bounds
from pallas_kernels.step_metadata.inputs import Inputs

PAD_SLOT = np.iinfo(np.int32).max  # of a row that is not written: outside every cache


class StepMetadata(NamedTuple):
    """Attention metadata of a pass.

    positions:    int32 [batch, rows], at most max_model_len and the block table's end
    seq_lens:     int32 [batch], tokens in the cache with these rows; 0 for an idle request
    slot_mapping: int32 [batch, rows], block * block_size + offset; PAD_SLOT for an unwritten row
    window_start: int32 [batch, rows], the first position that a row sees
    bounds:       as pallas_kernels.attention.bounds.key_bounds makes them, or None
    cos, sin:     float32 [batch, rows, rope_dim / 2], or None
    """

    positions: jax.Array
    seq_lens: jax.Array
    slot_mapping: jax.Array
    window_start: jax.Array
    bounds: jax.Array | None
    cos: jax.Array | None
    sin: jax.Array | None


def step_metadata(inputs: Inputs) -> StepMetadata:
    """Run the op; see pallas_kernels.step_metadata.step_metadata."""
    block_table, rows, block_size = inputs.block_table, inputs.rows, inputs.block_size
    window, pages, limit = inputs.window, block_table.shape[1], inputs.limit
    start, num_rows = inputs.start + inputs.step, jnp.minimum(inputs.num_rows, rows)
    positions = start[:, None] + jnp.arange(rows, dtype=jnp.int32)
    written = (jnp.arange(rows) < num_rows[:, None]) & (positions < limit)
    positions = jnp.minimum(positions, limit)
    page = jnp.minimum(positions // block_size, pages - 1)
    slots = jnp.take_along_axis(block_table, page, axis=1) * block_size + positions % block_size
    seq_lens = jnp.where(num_rows > 0, jnp.minimum(start + num_rows, limit), 0)
    window_start = jnp.zeros_like(positions)
    if window is not None:
        anchors = positions[:, :1] if inputs.one_window else positions
        window_start = jnp.broadcast_to(jnp.maximum(anchors - window + 1, 0), positions.shape)
    bounds = cos = sin = None
    if inputs.queries_per_kv is not None:
        bounds = key_bounds(
            last_keys(positions, seq_lens, causal=inputs.causal),
            seq_lens,
            window_start,
            queries_per_kv=inputs.queries_per_kv,
            max_keys=pages * block_size,
        )
    if inputs.frequencies is not None:
        cos, sin = rotation(positions, inputs.frequencies, inputs.attention_factor)
    slot_mapping = jnp.where(written, slots, PAD_SLOT)
    return StepMetadata(positions, seq_lens, slot_mapping, window_start, bounds, cos, sin)


def last_keys(positions: jax.Array, seq_lens: jax.Array, *, causal: bool) -> jax.Array:
    """Return the last position that each row sees, int32 [batch, rows].

    It is the row's own, or without causality the last token in the cache (-1 for an idle request).
    """
    return positions if causal else jnp.broadcast_to(seq_lens[:, None] - 1, positions.shape)


def rotation(
    positions: jax.Array, frequencies: tuple[float, ...] | np.ndarray, attention_factor: float
) -> tuple[jax.Array, jax.Array]:
    """Return cos and sin, float32 [batch, rows, rope_dim / 2], of positions [batch, rows]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (
        (cos, sin) if attention_factor == 1.0 else (cos * attention_factor, sin * attention_factor)
    )
