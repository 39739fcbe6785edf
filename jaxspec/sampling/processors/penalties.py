"""Repetition, frequency and presence penalties on tokens of the prompt and of the text so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import (
    LogitsProcessor,
    SampledRequest,
    Vocabulary,
    Window,
    unsplit,
)
from pallas_kernels.vocab_shards import VocabShards


@struct.dataclass
class PenaltiesState:
    """The penalties of each request, and the tokens that they apply to.

    repetition:    float32 [batch], 1 is off
    presence:      float32 [batch], 0 is off
    frequency:     float32 [batch], 0 is off
    output_counts: int32 [batch, vocab], how often each token was generated
    prompt_seen:   bool [batch, vocab], whether the prompt has the token
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    output_counts: jax.Array
    prompt_seen: jax.Array


class Penalties(LogitsProcessor[PenaltiesState]):
    name = "penalties"
    passes = 3
    large_state = True

    def needs(self, params: SamplingParams) -> bool:
        return (
            params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> PenaltiesState:
        params = request.params
        counts = _counts(request.generated_token_ids, vocabulary).astype(np.int32)
        return PenaltiesState(
            repetition=np.float32(params.repetition_penalty),  # type: ignore[arg-type]
            presence=np.float32(params.presence_penalty),  # type: ignore[arg-type]
            frequency=np.float32(params.frequency_penalty),  # type: ignore[arg-type]
            output_counts=counts,  # type: ignore[arg-type]
            prompt_seen=_counts(request.prompt_token_ids, vocabulary) > 0,  # type: ignore[arg-type]
        )

    def axes(self, state: PenaltiesState) -> PenaltiesState:
        cut: Any = (None, "vocab")
        return replace(jax.tree.map(unsplit, state), output_counts=cut, prompt_seen=cut)

    def apply(self, state: PenaltiesState, logits: jax.Array, window: Window) -> jax.Array:
        rows, vocab = logits.shape[1:]
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        token = window.shards.ids(vocab)
        counts = state.output_counts[:, None]
        for i in range(rows - 1):
            assert window.draft_tokens is not None
            drafted = window.draft_tokens[:, i, None, None] == token
            counts = counts + (drafted & (row > i)).astype(jnp.int32)
        generated = counts > 0
        repetition, frequency, presence = (
            x[:, None, None] for x in (state.repetition, state.frequency, state.presence)
        )
        repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
        logits = jnp.where(generated | state.prompt_seen[:, None], repeated, logits)
        logits = logits - frequency * counts.astype(jnp.float32)
        return logits - presence * generated.astype(jnp.float32)

    def observe(
        self, state: PenaltiesState, tokens: jax.Array, shards: VocabShards
    ) -> PenaltiesState:
        counts = state.output_counts
        batch, vocab = counts.shape
        row = jnp.arange(batch, dtype=jnp.int32)[:, None]
        column = jnp.where(tokens < 0, vocab, shards.place(tokens, vocab))  # -1 would wrap
        return replace(state, output_counts=counts.at[row, column].add(1, mode="drop"))


def _counts(token_ids: Sequence[int], vocabulary: Vocabulary) -> np.ndarray:
    """How often each token occurs, int64 [vocab]."""
    return np.bincount(np.asarray(token_ids, np.int64), minlength=vocabulary.size)
