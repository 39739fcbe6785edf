"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import jax

from jaxspec.config import RopeConfig, rope_frequencies
from pallas_kernels.rope_cache.reference import rotate
from pallas_kernels.step_metadata.reference import rotation

RopeTables = tuple[jax.Array, jax.Array]


def rope_tables(rope: RopeConfig, head_dim: int, positions: jax.Array) -> RopeTables:
    """Return cos and sin of positions int32 [batch, rows].

    Both are float32 [batch, rows, 1, head_dim / 2].
    """
    cos, sin = rotation(positions, rope_frequencies(rope, head_dim), rope.attention_factor)
    return cos[..., None, :], sin[..., None, :]


def apply_rope(x: jax.Array, tables: RopeTables) -> jax.Array:
    """Rotate x [batch, rows, heads, head_dim] in float32.

    The halves of a head are paired (Hugging Face's rotate_half).
    """
    return rotate(x, *tables)
