"""Gumbel-max in plain jnp: the specification of the op, and the path on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import noise

PIECE = 256  # of a row whose largest value is sought


def gumbel_sample(
    logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    position: jax.Array,
    offset: jax.Array,
    token_ids: jax.Array | None,
    *,
    stream: int,
) -> jax.Array:
    """See pallas_kernels.gumbel_sample.gumbel_sample."""
    greedy = temperature == 0.0
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32) if token_ids is None else token_ids
    gumbel = noise.gumbel(noise.Stream(keys, position, stream).key(offset), ids)
    scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
    scaled = jnp.where(jnp.isnan(scaled), -jnp.inf, scaled)
    return argmax(jnp.where(greedy[:, None], scaled, scaled + gumbel))


def argmax(x: jax.Array) -> jax.Array:
    """Index of the largest value, the lowest of them, int32 [batch], of x [batch, vocab] without NaN.

    In two stages, pieces of a row and then the pieces: XLA reduces a row in one block of threads, and what is fused into it (at
    temperature above 0 a row's noise) would then be computed by a single one of a GPU's multiprocessors.
    """
    pieces = jnp.pad(x, ((0, 0), (0, -x.shape[1] % PIECE)), constant_values=-jnp.inf).reshape(
        x.shape[0], -1, PIECE
    )
    index = lax.broadcasted_iota(jnp.int32, pieces.shape, 1) * PIECE + lax.broadcasted_iota(
        jnp.int32, pieces.shape, 2
    )
    best = (pieces, index)
    for axis in (2, 1):
        best = lax.reduce(
            best, (jnp.float32(-jnp.inf), jnp.int32(np.iinfo(np.int32).max)), _larger, (axis,)
        )
    return best[1]


def _larger(
    a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Of two (value, index): the larger value, the lower index where they are equal."""
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])
