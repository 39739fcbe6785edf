"""bad_words: forbid a word's last token where the generated text ends with its other tokens.

The words of a request lie one after another in one array. So its size is the sum of their lengths,
however many words there are and however long the longest is.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.sampling.limits import MAX_BAD_WORD_TOKENS
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import (
    LogitsProcessor,
    SampledRequest,
    Vocabulary,
    Window,
    resized,
)
from pallas_kernels.vocab_shards import VocabShards


@struct.dataclass
class BadWordsState:
    """The words of each request, and the end of its text.

    token_ids:   int32 [batch, tokens], the tokens of all words, padded with -1
    word_starts: int32 [batch, tokens], for each token the index of its word's first token, or -1
    num_after:   int32 [batch, tokens], for each token the number of its word's tokens after it,
                 or -1
    recent:      int32 [batch, tokens - 1], the last generated tokens at the right, after a padding
                 of -1. No word can continue more than these.
    """

    token_ids: jax.Array
    word_starts: jax.Array
    num_after: jax.Array
    recent: jax.Array


class BadWords(LogitsProcessor[BadWordsState]):
    name = "bad_words"
    passes = 1
    least_sizes = (32,)  # tokens of a request's words together

    def needs(self, params: SamplingParams) -> bool:
        return bool(params.bad_words or params.bad_words_token_ids)

    def sizes(self, params: SamplingParams, vocabulary: Vocabulary) -> tuple[int, ...]:
        return (sum(map(len, params.bad_words_token_ids)),)

    def most_sizes(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        return (MAX_BAD_WORD_TOKENS,)

    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> BadWordsState:
        (size,) = sizes
        token_ids, word_starts, num_after = np.full((3, size), -1, np.int32)
        start = 0
        for word in request.params.bad_words_token_ids:
            end = start + len(word)
            token_ids[start:end], word_starts[start:end] = word, start
            num_after[start:end] = np.arange(len(word) - 1, -1, -1)
            start = end
        recent = np.full(size - 1, -1, np.int32)
        generated = request.generated_token_ids
        known = min(len(generated), size - 1)
        recent[size - 1 - known :] = generated[len(generated) - known :]
        return BadWordsState(token_ids, word_starts, num_after, recent)  # type: ignore[arg-type]

    def resize(self, state: BadWordsState, sizes: tuple[int, ...]) -> BadWordsState:
        """Pad or cut the words at the end, and the text on its left.

        The padding of `recent` stands for tokens that the host does not know yet. Only words of
        later requests are long enough to read it.
        """
        (size,) = sizes
        if state.token_ids.shape[1] == size:  # and nothing compiles
            return state
        return BadWordsState(
            token_ids=resized(state.token_ids, size),
            word_starts=resized(state.word_starts, size),
            num_after=resized(state.num_after, size),
            recent=resized(state.recent[:, ::-1], size - 1)[:, ::-1],
        )

    def apply(self, state: BadWordsState, logits: jax.Array, window: Window) -> jax.Array:
        batch, rows, vocab = logits.shape
        text, num_recent = state.recent, state.recent.shape[1]
        if window.draft_tokens is not None:
            text = jnp.concatenate([text, window.draft_tokens], axis=1)
        request = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        token_ids, num_after = state.token_ids[:, None], state.num_after[:, None]
        # [batch, rows, tokens]: the token that the text has where a word's token has to be
        found = text.at[request, num_recent + row - num_after].get(mode="fill", fill_value=-1)
        differs = (num_after > 0) & (found != token_ids)
        # A word's first token counts how many of the word's tokens the text does not end with. The
        # padding of -1 would wrap.
        first = jnp.where(num_after < 0, token_ids.shape[2], state.word_starts[:, None])
        missing = jnp.zeros(differs.shape, jnp.int32)
        missing = missing.at[request, row, first].add(differs.astype(jnp.int32), mode="drop")
        fits = missing.at[request, row, first].get(mode="fill", fill_value=1) == 0
        place = window.shards.place(token_ids, vocab)
        forbidden = jnp.where(fits & (num_after == 0), place, vocab)
        return logits.at[request, row, forbidden].set(-jnp.inf, mode="drop")

    def observe(
        self, state: BadWordsState, tokens: jax.Array, shards: VocabShards
    ) -> BadWordsState:
        num_new = (tokens >= 0).sum(axis=1, keepdims=True, dtype=jnp.int32)
        last = num_new + jnp.arange(state.recent.shape[1], dtype=jnp.int32)
        text = jnp.concatenate([state.recent, tokens], axis=1)
        return replace(state, recent=jnp.take_along_axis(text, last, axis=1))
