"""Sampling: per-request state, the named random streams, and Gumbel-max.

Every random number of a request is a function of its key, a stream's name, and two integers.
"sample" is keyed by the position of the token it draws. So a seed gives the same text with and
without speculation (rule "strict" and plain decoding; the draft shares the stream there). "draft",
"accept" and "recover" are keyed by the round's first seq_len and the offset in the round: fresh in
every round, and independent of each other.

vLLM shared the draft's noise with the recovered token, which biased its output (issue #47386).
Noise keyed by position alone biases block verification: it looks at draws beyond what it accepts
and would meet them again in the next round.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from pallas_kernels import noise
from pallas_kernels.gumbel_sample import Inputs, gumbel_sample
from pallas_kernels.gumbel_sample.reference import argmax
from pallas_kernels.vocab_shards import WHOLE, VocabShards

STREAMS = {"sample": 0, "draft": 1, "accept": 2, "recover": 3}


@struct.dataclass
class SamplingState:
    """Per-request sampling parameters on the device; one row per slot.

    keys:        uint32 [batch, 2], the two halves of the seed
    temperature: float32 [batch], 0 is greedy
    processors:  for each logits processor that a running request needs, its name and its state
                 (jaxspec.sampling.processors)
    """

    keys: jax.Array
    temperature: jax.Array
    processors: dict[str, Any] = struct.field(default_factory=dict)

    @property
    def greedy(self) -> jax.Array:
        """bool [batch]"""
        return self.temperature == 0.0


def noise_stream(keys: jax.Array, stream: str, position: jax.Array) -> noise.Stream:
    """Return a stream's numbers at positions int32 [batch], for an op that makes them itself."""
    return noise.Stream(keys, position, STREAMS[stream])


def gumbel_noise(
    keys: jax.Array,
    stream: str,
    position: jax.Array,
    offset: jax.Array | int,
    size: int,
    shards: VocabShards = WHOLE,
) -> jax.Array:
    """Return standard Gumbel noise, float32 [batch, size]; see pallas_kernels.noise.Stream."""
    return noise_stream(keys, stream, position).gumbel(size, offset, shards)


def draw(
    logits: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    stream: str,
    position: jax.Array,
    offset: jax.Array | int,
    token_ids: jax.Array | None = None,
    *,
    shards: VocabShards = WHOLE,
    implementation: str = "reference",
) -> jax.Array:
    """Draw a token from each row of logits, with a stream's noise; int32 [batch].

    logits: float32 [batch, vocab], the own piece of rows that are cut over devices
    offset: a scalar
    token_ids: see pallas_kernels.gumbel_sample

    The result equals that of sample(scale_by_temperature(...), gumbel_noise(...), ...).
    """
    inputs = Inputs(
        logits=logits,
        temperature=temperature,
        keys=keys,
        position=position,
        offset=jnp.asarray(offset, jnp.int32),
        token_ids=token_ids,
        stream=STREAMS[stream],
        shards=shards,
    )
    return gumbel_sample(inputs, implementation=implementation)


def scale_by_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Divide logits [batch, ..., vocab] by temperature [batch]; greedy rows stay as they are."""
    divisor = jnp.where(temperature == 0.0, 1.0, temperature)
    return logits / divisor.reshape(-1, *([1] * (logits.ndim - 1)))


def sample(
    logits: jax.Array,
    gumbel: jax.Array | None,
    greedy: jax.Array,
    shards: VocabShards = WHOLE,
) -> jax.Array:
    """Return argmax(logits + gumbel), int32 [batch] (Gumbel-max).

    logits, gumbel: float32 [batch, vocab], the own piece of each row. Greedy rows, and all rows if
    gumbel is None, return argmax(logits). NaN logits count as -inf, so that an id is always in
    range.
    """
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    if gumbel is None:
        return argmax(logits, shards)
    return argmax(jnp.where(greedy[:, None], logits, logits + gumbel), shards)
