"""bad_words: forbid a word's last token where the generated text ends with its other tokens."""

from __future__ import annotations

from dataclasses import replace

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
)


@struct.dataclass
class BadWordsState:
    """The words of each request, and the end of its text.

    token_ids: int32 [batch, words, length], each word at the right, padded with -1 on its left
    recent:    int32 [batch, length - 1], the last generated tokens, at the right too. A word can
               continue no more than these.
    """

    token_ids: jax.Array
    recent: jax.Array


class BadWords(LogitsProcessor[BadWordsState]):
    name = "bad_words"
    least_sizes = (8, 4)  # words of a request, and tokens of the longest

    def needs(self, params: SamplingParams) -> bool:
        return bool(params.bad_words or params.bad_words_token_ids)

    def sizes(self, params: SamplingParams, vocabulary: Vocabulary) -> tuple[int, ...]:
        words = params.bad_words_token_ids
        return len(words), max(map(len, words), default=0)

    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> BadWordsState:
        num_words, length = sizes
        token_ids = np.full((num_words, length), -1, np.int32)
        for row, word in enumerate(request.params.bad_words_token_ids):
            token_ids[row, length - len(word) :] = word
        recent = np.full(length - 1, -1, np.int32)
        generated = request.generated_token_ids
        known = min(len(generated), length - 1)
        recent[length - 1 - known :] = generated[len(generated) - known :]
        return BadWordsState(token_ids, recent)  # type: ignore[arg-type]

    def grow(self, state: BadWordsState, sizes: tuple[int, ...]) -> BadWordsState:
        """Pad words and text on their left.

        The padding of `recent` stands for tokens that the host does not know yet. Only words of
        later requests are long enough to read it.
        """
        more, longer = (
            max(0, n - m) for n, m in zip(sizes, state.token_ids.shape[1:], strict=True)
        )
        return BadWordsState(
            jnp.pad(state.token_ids, ((0, 0), (0, more), (longer, 0)), constant_values=-1),
            jnp.pad(state.recent, ((0, 0), (longer, 0)), constant_values=-1),
        )

    def apply(self, state: BadWordsState, logits: jax.Array, window: Window) -> jax.Array:
        batch, rows, vocab = logits.shape
        tokens = state.recent
        if window.draft_tokens is not None:
            tokens = jnp.concatenate([tokens, window.draft_tokens], axis=1)
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        before = row + jnp.arange(state.recent.shape[1], dtype=jnp.int32)
        # [batch, 1, words, length - 1] against [batch, rows, 1, length - 1]
        begun = state.token_ids[:, None, :, :-1]
        fits = jnp.all((begun < 0) | (begun == tokens[:, before][:, :, None]), axis=-1)
        last = state.token_ids[:, None, :, -1]
        forbidden = jnp.where(fits & (last >= 0), last, vocab)  # -1 would wrap
        request = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        return logits.at[request, row, forbidden].set(-jnp.inf, mode="drop")

    def observe(self, state: BadWordsState, tokens: jax.Array) -> BadWordsState:
        num_new = (tokens >= 0).sum(axis=1, keepdims=True, dtype=jnp.int32)
        last = num_new + jnp.arange(state.recent.shape[1], dtype=jnp.int32)
        text = jnp.concatenate([state.recent, tokens], axis=1)
        return replace(state, recent=jnp.take_along_axis(text, last, axis=1))
