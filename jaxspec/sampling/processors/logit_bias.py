"""logit_bias, allowed_token_ids and banned_token_ids: one number added to each token's logit."""

from __future__ import annotations

import jax
import numpy as np

from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import (
    Axes,
    LogitsProcessor,
    SampledRequest,
    Vocabulary,
    Window,
)


class LogitBias(LogitsProcessor[jax.Array]):
    """State: float32 [batch, vocab], added to the logits; -inf forbids a token.

    vLLM masks allowed and banned tokens before bad_words. Here their -inf is part of the sum: the
    processors between keep -inf, so the result is the same.
    """

    name = "logit_bias"
    passes = 2

    def needs(self, params: SamplingParams) -> bool:
        return bool(
            params.logit_bias or params.banned_token_ids or params.allowed_token_ids is not None
        )

    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> jax.Array:
        params = request.params
        bias = np.zeros(vocabulary.size, np.float32)
        if params.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(params.allowed_token_ids)] = 0
        bias[list(params.banned_token_ids)] = -np.inf
        for token, value in params.logit_bias.items():
            bias[token] += value
        return bias  # type: ignore[return-value]

    def axes(self, state: jax.Array) -> Axes:
        return (None, "vocab")

    def apply(self, state: jax.Array, logits: jax.Array, window: Window) -> jax.Array:
        return logits + state[:, None]
