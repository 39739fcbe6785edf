"""Gumbel-max in plain jnp: the specification of the op, and the path on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import noise
from pallas_kernels.gumbel_sample.inputs import Inputs
from pallas_kernels.vocab_shards import WHOLE, Indexed, VocabShards, first_highest

PIECE = 256  # values of a row that are reduced first


def gumbel_sample(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.gumbel_sample.gumbel_sample."""
    shards, ids = inputs.shards, inputs.token_ids
    ids = shards.ids(inputs.vocab) if ids is None else shards.own(ids)
    stream = noise.Stream(inputs.keys, inputs.position, inputs.stream)
    key = stream.key(inputs.offset)
    return argmax(scores(inputs.logits, inputs.temperature, key, ids), shards)


def scores(
    logits: jax.Array, temperature: jax.Array, key: noise.Key, token_ids: jax.Array
) -> jax.Array:
    """Return scores float32 [rows, vocab]: a row's token is its highest. NaN becomes -inf.

    key: two words uint32 [rows, 1]
    """
    greedy = (temperature == 0.0)[:, None]
    scaled = logits / jnp.where(greedy, 1.0, temperature[:, None])
    scaled = jnp.where(jnp.isnan(scaled), -jnp.inf, scaled)
    return jnp.where(greedy, scaled, scaled + noise.gumbel(key, token_ids))


def argmax(x: jax.Array, shards: VocabShards = WHOLE) -> jax.Array:
    """Return the token id of the largest value, int32 [batch], of x [batch, vocab] without NaN.

    x is the own piece of rows that are cut over devices. Of equal values the first counts.
    """
    value, index = highest(x)
    if shards.is_whole:
        return index
    return first_highest(*shards.gather((value, index + shards.first_id(x.shape[1]))))[1]


def highest(x: jax.Array) -> Indexed:
    """Return the largest value and its index, each [batch], of x [batch, vocab] without NaN.

    Of equal values the first counts. The search has two stages, pieces of a row and then the
    pieces: XLA reduces a row in one block of threads, and would compute what it fuses into the
    reduction (a row's noise, at temperature above 0) on one multiprocessor of the GPU.
    """
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % PIECE)), constant_values=-jnp.inf)
    pieces = padded.reshape(x.shape[0], -1, PIECE)
    piece = lax.broadcasted_iota(jnp.int32, pieces.shape, 1)
    index = piece * PIECE + lax.broadcasted_iota(jnp.int32, pieces.shape, 2)
    return highest_along(highest_along((pieces, index), 2), 1)


def highest_along(scores: Indexed, axis: int) -> Indexed:
    """Return the largest values along an axis, with their indices. Of equal ones the lowest counts.

    scores: values without NaN and the index of each, of one shape
    """
    lowest = (jnp.float32(-jnp.inf), jnp.int32(np.iinfo(np.int32).max))
    value, index = lax.reduce(scores, lowest, _larger, (axis,))
    return value, index


def _larger(a: Indexed, b: Indexed) -> Indexed:
    """Return the larger value with its index; of equal values the lower index."""
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])
