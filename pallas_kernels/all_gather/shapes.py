"""Named real shapes of the all-gather, shared by tests and benchmarks."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Words of a device, K = 3: a draw's, a round's scores with q, and the drafts' rejected rows.
SHAPES = {
    "draw, batch 1": 2,
    "scores, batch 1": 24,
    "scores, batch 64": 1536,
    "rows of 32,000, batch 1": 16_000,
    "rows of 32,000, batch 16": 256_000,
}


def make_inputs(count: int, size: int, seed: int) -> jax.Array:
    """Return words int32 [size, count]; all bits may be set."""
    bits = jax.random.bits(jax.random.key(seed), (size, count), jnp.uint32)
    return jax.lax.bitcast_convert_type(bits, jnp.int32)


def bytes_moved(count: int, size: int) -> int:
    """Return the bytes that a device sends: each word goes to each peer, with an epoch."""
    return 8 * (size - 1) * count
