"""The noise of tokens in float64, from jax's own hash; keys are jax.random's."""

from __future__ import annotations

import jax
import numpy as np
from jax.extend.random import threefry_2x32


def stream_key(words: jax.Array, *folded: int | jax.Array) -> np.ndarray:
    """Key words [2] folded in with stream, position and offset, one after another: uint32 [2]."""
    key = jax.random.wrap_key_data(words, impl="threefry2x32")
    for data in folded:
        key = jax.random.fold_in(key, data)
    return np.asarray(jax.random.key_data(key))


def halves(key: np.ndarray, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The upper 23 bits of the two words that 0 and a token's id hash to, int64 [tokens] each."""
    count = np.stack([np.zeros(len(token_ids)), token_ids]).astype(np.uint32)
    high, low = np.asarray(threefry_2x32(tuple(key), count)).astype(np.int64) >> 9
    return high, low


def gumbel(key: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel, float64 [tokens]: of the middle of one of 2^46 intervals below 1/2, of the
    lower end of one of 2^23 above it."""
    high, low = halves(key, token_ids)
    x = np.where(high < 2**22, (high * 2**23 + low + 0.5) * 2.0**-46, high * 2.0**-23)
    return -np.log(-np.log1p(-x))
