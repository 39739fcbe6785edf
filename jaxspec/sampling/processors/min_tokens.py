"""min_tokens: forbid end-of-text and stop tokens until a text is long enough.

As in vLLM, end-of-text tokens are forbidden even where ignore_eos is set.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.config.reading import MAX_INT32
from jaxspec.sampling.params import (
    SamplingParams,
    end_token_ids,
    most_end_token_ids,
)
from jaxspec.sampling.processors.processor import (
    LogitsProcessor,
    SampledRequest,
    Vocabulary,
    Window,
    resized,
)


@struct.dataclass
class MinTokensState:
    """The least length of each request, and the tokens that may not end it before.

    min_len:        int32 [batch], tokens that the request must hold, prompt included, before one of
                    stop_token_ids may follow; 0 is off
    stop_token_ids: int32 [batch, stops], padded with -1
    """

    min_len: jax.Array
    stop_token_ids: jax.Array


class MinTokens(LogitsProcessor[MinTokensState]):
    name = "min_tokens"
    passes = 1
    least_sizes = (4,)  # tokens that end a request

    def needs(self, params: SamplingParams) -> bool:
        return params.min_tokens > 0

    def sizes(self, params: SamplingParams, vocabulary: Vocabulary) -> tuple[int, ...]:
        return (len(end_token_ids(params, vocabulary.eos_token_ids)),)

    def most_sizes(self, vocabulary: Vocabulary) -> tuple[int, ...]:
        return (most_end_token_ids(vocabulary.eos_token_ids),)

    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> MinTokensState:
        params = request.params
        length = len(request.prompt_token_ids) + params.min_tokens if params.min_tokens else 0
        length = min(length, MAX_INT32)
        stops = np.full(sizes, -1, np.int32)
        ends = end_token_ids(params, vocabulary.eos_token_ids) if params.min_tokens else ()
        stops[: len(ends)] = ends
        return MinTokensState(np.int32(length), stops)  # type: ignore[arg-type]

    def resize(self, state: MinTokensState, sizes: tuple[int, ...]) -> MinTokensState:
        return replace(state, stop_token_ids=resized(state.stop_token_ids, *sizes))

    def apply(self, state: MinTokensState, logits: jax.Array, window: Window) -> jax.Array:
        batch, rows, vocab = logits.shape
        length = window.positions[:, None] + jnp.arange(rows, dtype=jnp.int32)
        too_short = length < state.min_len[:, None]
        stops = state.stop_token_ids[:, None]
        place = window.shards.place(stops, vocab)
        # A scatter writes the few tokens that are forbidden, where a mask compares each token of
        # the vocabulary with every stop token.
        forbidden = jnp.where(too_short[:, :, None] & (stops >= 0), place, vocab)
        request = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        row = jnp.arange(rows, dtype=jnp.int32)[:, None]
        return logits.at[request, row, forbidden].set(-jnp.inf, mode="drop")
