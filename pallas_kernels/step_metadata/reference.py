"""A pass's metadata in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.bounds import key_bounds

PAD_SLOT = np.iinfo(np.int32).max  # of a row that is not written: outside every cache


class StepMetadata(NamedTuple):
    """What step_metadata makes.

    positions:    int32 [batch, rows], at most max_model_len, and what the block table holds
    seq_lens:     int32 [batch], tokens in the cache once the rows are written; 0 for an idle request
    slot_mapping: int32 [batch, rows], block * block_size + offset; PAD_SLOT for a row that is not written
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


def step_metadata(
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    step: jax.Array | int,
    *,
    rows: int,
    block_size: int,
    max_model_len: int,
    window: int | None,
    group: int | None,
    frequencies: tuple[float, ...] | None,
    attention_factor: float,
) -> StepMetadata:
    """See pallas_kernels.step_metadata.step_metadata."""
    pages = block_table.shape[1]
    limit = min(max_model_len, pages * block_size)
    start, num_rows = start + step, jnp.minimum(num_rows, rows)
    positions = start[:, None] + jnp.arange(rows, dtype=jnp.int32)
    written = (jnp.arange(rows) < num_rows[:, None]) & (positions < limit)
    positions = jnp.minimum(positions, limit)
    page = jnp.minimum(positions // block_size, pages - 1)
    slots = jnp.take_along_axis(block_table, page, axis=1) * block_size + positions % block_size
    seq_lens = jnp.where(num_rows > 0, jnp.minimum(start + num_rows, limit), 0)
    window_start = (
        jnp.zeros_like(positions) if window is None else jnp.maximum(positions - window + 1, 0)
    )
    bounds = (
        None
        if group is None
        else key_bounds(positions, seq_lens, window_start, group=group, max_keys=pages * block_size)
    )
    cos, sin = (
        (None, None) if frequencies is None else rotation(positions, frequencies, attention_factor)
    )
    return StepMetadata(
        positions, seq_lens, jnp.where(written, slots, PAD_SLOT), window_start, bounds, cos, sin
    )


def rotation(
    positions: jax.Array, frequencies: tuple[float, ...] | np.ndarray, attention_factor: float
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [batch, rows, rope_dim / 2], of positions [batch, rows]."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (
        (cos, sin) if attention_factor == 1.0 else (cos * attention_factor, sin * attention_factor)
    )
