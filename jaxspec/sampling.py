"""Sampling: per-request state, the named random streams, and Gumbel-max.

Every random number of a request is a function of its key, a stream's name, and two integers. "sample" is keyed by the
position of the token it draws, so a seed gives the same text with and without speculation (rule "strict" and plain
decoding; the draft shares it there). "draft", "accept" and "recover" are keyed by the round's first seq_len and the
offset in the round: fresh in every round, and independent of each other. vLLM shared the draft's noise with the
recovered token, which biased its output (issue #47386); noise keyed by position alone biases block verification,
which looks at draws beyond what it accepts and would meet them again in the next round.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

PIECE = 256  # of a row whose largest value is sought
STREAMS = {"sample": 0, "draft": 1, "accept": 2, "recover": 3}


@struct.dataclass
class Penalties:
    """repetition, presence, frequency: float32 [batch]; 1, 0 and 0 are off.
    output_counts: int32 [batch, vocab], how often each token was generated. prompt_seen: bool [batch, vocab], whether the prompt has it."""

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    output_counts: jax.Array
    prompt_seen: jax.Array


@struct.dataclass
class MinTokens:
    """min_len: int32 [batch], tokens that a request must hold, prompt included, before one of stop_token_ids, int32 [batch, stops]
    padded with -1, may follow."""

    min_len: jax.Array
    stop_token_ids: jax.Array


@struct.dataclass
class BadWords:
    """token_ids: int32 [batch, words, length], each word at the right, padded with -1 on its left. recent: int32 [batch, length - 1], the
    last tokens that a request has generated, at the right too, which are all that a word can go on from."""

    token_ids: jax.Array
    recent: jax.Array


@struct.dataclass
class SamplingState:
    """Per-request sampling parameters on the device; one row a slot.

    keys:        uint32 [batch, 2], the two halves of the seed
    temperature: float32 [batch], 0 is greedy
    top_k:       int32 [batch], 0 is off
    top_p:       float32 [batch], 1 is off
    min_p:       float32 [batch], 0 is off
    logit_bias:  float32 [batch, vocab], -inf forbids a token
    Those with a default are None unless the round's features ask for them (jaxspec.config.SamplingFeatures).
    """

    keys: jax.Array
    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array | None = None
    logit_bias: jax.Array | None = None
    penalties: Penalties | None = None
    min_tokens: MinTokens | None = None
    bad_words: BadWords | None = None

    @property
    def greedy(self) -> jax.Array:
        """bool [batch]"""
        return self.temperature == 0.0


def stream_keys(keys: jax.Array, stream: str, position: jax.Array, offset: jax.Array | int) -> jax.Array:
    """One key a request [batch] for a stream, a position int32 [batch] and an offset (scalar or [batch])."""
    offset = jnp.broadcast_to(jnp.asarray(offset, jnp.int32), position.shape)

    def fold(key: jax.Array, position: jax.Array, offset: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
        for part in (STREAMS[stream], position, offset):
            key = jax.random.fold_in(key, part)
        return key

    return jax.vmap(fold)(keys, position, offset)


def gumbel_noise(keys: jax.Array, stream: str, position: jax.Array, offset: jax.Array | int, size: int) -> jax.Array:
    """Standard Gumbel, float32 [batch, size], of full tail: JAX's default form never exceeds about 16."""
    folded = stream_keys(keys, stream, position, offset)
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32, mode="high"))(folded)


def uniform_noise(keys: jax.Array, stream: str, position: jax.Array, size: int) -> jax.Array:
    """Uniform on [0, 1), float32 [batch, size]: column i is the number of offset i."""
    if size == 0:
        return jnp.zeros((*position.shape, 0), jnp.float32)
    columns = [jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(stream_keys(keys, stream, position, i)) for i in range(size)]
    return jnp.stack(columns, axis=1)


def scale_by_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """logits [batch, ..., vocab] over temperature [batch]; greedy rows are left as they are."""
    divisor = jnp.where(temperature == 0.0, 1.0, temperature)
    return logits / divisor.reshape(-1, *([1] * (logits.ndim - 1)))


def argmax(x: jax.Array) -> jax.Array:
    """Index of the largest value, the lowest of them, int32 [batch], of x [batch, vocab] without NaN.

    In two stages, pieces of a row and then the pieces: XLA reduces a row in one block of threads, and what is fused into it (at
    temperature above 0 a row's noise) would then be computed by a single one of a GPU's multiprocessors.
    """
    pieces = jnp.pad(x, ((0, 0), (0, -x.shape[1] % PIECE)), constant_values=-jnp.inf).reshape(x.shape[0], -1, PIECE)
    index = lax.broadcasted_iota(jnp.int32, pieces.shape, 1) * PIECE + lax.broadcasted_iota(jnp.int32, pieces.shape, 2)
    best = (pieces, index)
    for axis in (2, 1):
        best = lax.reduce(best, (jnp.float32(-jnp.inf), jnp.int32(np.iinfo(np.int32).max)), _larger, (axis,))
    return best[1]


def _larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Of two (value, index): the larger value, the lower index where they are equal."""
    first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
    return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])


def sample(logits: jax.Array, noise: jax.Array | None, greedy: jax.Array) -> jax.Array:
    """Gumbel-max: argmax(logits + noise) int32 [batch]; greedy rows (and all, if noise is None) argmax(logits).

    logits, noise: float32 [batch, vocab]. NaN logits count as -inf, so that an id is always in range.
    """
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    if noise is None:
        return argmax(logits)
    return argmax(jnp.where(greedy[:, None], logits, logits + noise))
