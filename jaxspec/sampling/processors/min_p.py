"""min_p: drop tokens less likely than min_p times the likeliest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import (
    LogitsProcessor,
    SampledRequest,
    Vocabulary,
    Window,
)


class MinP(LogitsProcessor[jax.Array]):
    """State: float32 [batch]; 0 is off."""

    name = "min_p"
    passes = 3

    def needs(self, params: SamplingParams) -> bool:
        return not params.greedy and params.min_p > 0

    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> jax.Array:
        params = request.params
        return np.float32(0 if params.greedy else params.min_p)  # type: ignore[return-value]

    def apply(self, state: jax.Array, logits: jax.Array, window: Window) -> jax.Array:
        highest = window.shards.maximum(jnp.max(logits, axis=-1, keepdims=True))
        threshold = highest + jnp.log(state)[:, None, None]
        return jnp.where((logits < threshold) & (state > 0)[:, None, None], -jnp.inf, logits)
