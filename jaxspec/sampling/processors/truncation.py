"""top_k and top_p: keep the likeliest tokens."""

from __future__ import annotations

import jax
import numpy as np
from flax import struct

from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import (
    LogitsProcessor,
    SampledRequest,
    Vocabulary,
    Window,
)
from pallas_kernels.truncation import truncate


@struct.dataclass
class TruncationState:
    """How much of the distribution each request keeps.

    top_k: int32 [batch], 0 is off
    top_p: float32 [batch], 1 is off
    """

    top_k: jax.Array
    top_p: jax.Array


class Truncation(LogitsProcessor[TruncationState]):
    name = "truncation"
    passes = 18

    def needs(self, params: SamplingParams) -> bool:
        return not params.greedy and (params.top_k > 0 or params.top_p < 1)

    def init(
        self, request: SampledRequest, vocabulary: Vocabulary, sizes: tuple[int, ...]
    ) -> TruncationState:
        params = request.params
        return TruncationState(
            top_k=np.int32(0 if params.greedy else max(params.top_k, 0)),  # type: ignore[arg-type]
            top_p=np.float32(1 if params.greedy else params.top_p),  # type: ignore[arg-type]
        )

    def apply(self, state: TruncationState, logits: jax.Array, window: Window) -> jax.Array:
        return truncate(logits, state.top_k, state.top_p, shards=window.shards)
