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
from flax import struct

from pallas_kernels import noise
from pallas_kernels.gumbel_sample import gumbel_sample
from pallas_kernels.gumbel_sample.reference import argmax

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


def noise_stream(keys: jax.Array, stream: str, position: jax.Array) -> noise.Stream:
    """A stream's numbers at positions int32 [batch], for an op that makes them where it reads them."""
    return noise.Stream(keys, position, STREAMS[stream])


def gumbel_noise(
    keys: jax.Array, stream: str, position: jax.Array, offset: jax.Array | int, size: int
) -> jax.Array:
    """Standard Gumbel, float32 [batch, size]; see pallas_kernels.noise.Stream."""
    return noise_stream(keys, stream, position).gumbel(size, offset)


def draw(
    logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    stream: str,
    position: jax.Array,
    offset: jax.Array | int,
    token_ids: jax.Array | None = None,
    *,
    implementation: str = "reference",
) -> jax.Array:
    """A token int32 [batch] of each row of logits float32 [batch, vocab], with the noise of a stream; offset is a scalar.

    token_ids: see pallas_kernels.gumbel_sample. The same as sample(scale_by_temperature(...), gumbel_noise(...), ...).
    """
    offset = jnp.asarray(offset, jnp.int32)
    return gumbel_sample(
        logits,
        temperature,
        keys,
        position,
        offset,
        token_ids,
        stream=STREAMS[stream],
        implementation=implementation,
    )


def scale_by_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """logits [batch, ..., vocab] over temperature [batch]; greedy rows are left as they are."""
    divisor = jnp.where(temperature == 0.0, 1.0, temperature)
    return logits / divisor.reshape(-1, *([1] * (logits.ndim - 1)))


def sample(logits: jax.Array, gumbel: jax.Array | None, greedy: jax.Array) -> jax.Array:
    """Gumbel-max: argmax(logits + gumbel) int32 [batch]; greedy rows (and all, if gumbel is None) argmax(logits).

    logits, gumbel: float32 [batch, vocab]. NaN logits count as -inf, so that an id is always in range.
    """
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    if gumbel is None:
        return argmax(logits)
    return argmax(jnp.where(greedy[:, None], logits, logits + gumbel))
