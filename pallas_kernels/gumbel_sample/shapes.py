"""Named shapes of Gumbel-max, shared by tests and benchmarks: draft steps and plain decoding of real vocabularies, and small ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shape:
    """target_vocab: the one whose ids key the noise, where it is another (a draft's tokens under the strict rule).

    mixed: some rows are greedy, some logits -inf or NaN, some rows all of that or flat: for tests, not to be timed.
    """

    rows: int
    vocab: int
    target_vocab: int | None = None
    mixed: bool = False


SHAPES = {
    "llama3-8b draft, batch 1": Shape(1, 32_000),
    "llama3-8b draft, batch 16": Shape(16, 32_000),
    "llama3-8b draft, batch 64": Shape(64, 32_000),
    "llama3-8b draft, batch 64, strict": Shape(64, 32_000, 128_256),
    "llama3-8b, batch 1": Shape(1, 128_256),
    "llama3-8b, batch 64": Shape(64, 128_256),
    "qwen3-8b, batch 16": Shape(16, 151_936),
    "gpt-oss, batch 4": Shape(4, 201_088),
    "smollm2, batch 1": Shape(1, 49_152),
    "smollm2, batch 64": Shape(64, 49_152),
    # One piece; an even and an odd width, the last piece moved back; another vocabulary's ids.
    "tiny": Shape(12, 128, mixed=True),
    "tiny, even": Shape(12, 514, mixed=True),
    "tiny, odd": Shape(12, 777, mixed=True),
    "tiny, 14 pieces": Shape(12, 3334, mixed=True),
    "tiny, strict": Shape(12, 512, 1777, mixed=True),
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Arguments of the op by name."""
    rows, vocab = shape.rows, shape.vocab
    keys = jax.random.split(jax.random.key(seed), 6)
    row, column = jnp.arange(rows)[:, None], jnp.arange(vocab)
    logits = 2.5 * jax.random.normal(keys[0], (rows, vocab), jnp.float32)
    temperature = jax.random.uniform(keys[1], (rows,), jnp.float32, 0.5, 1.5)
    if shape.mixed:
        temperature = jnp.where(jnp.arange(rows) % 4 == 3, 0.0, temperature)
        logits = jnp.where((row % 3 == 1) & (column % 5 != 2), -jnp.inf, logits)
        logits = jnp.where((row % 6 == 5) & (column % 7 == 3), jnp.nan, logits)
        logits = jnp.where(row == 2, jnp.float32(1.5), logits)
        logits = jnp.where((row == 3) | (row == 9), jnp.round(logits), logits)  # greedy, with ties
        logits = jnp.where(
            (row == 7) | (row == 8), jnp.where(column % 2 == 0, -jnp.inf, jnp.nan), logits
        )
    token_ids = None
    if shape.target_vocab is not None:
        token_ids = jnp.sort(jax.random.permutation(keys[2], shape.target_vocab)[:vocab]).astype(
            jnp.int32
        )
    return {
        "logits": logits,
        "temperature": temperature,
        "keys": jax.random.bits(keys[3], (rows, 2), jnp.uint32),
        "position": jax.random.randint(keys[4], (rows,), 0, 4096, jnp.int32),
        "offset": jnp.int32(seed % 5),
        "token_ids": token_ids,
        "stream": 1,
    }


def bytes_moved(shape: Shape) -> int:
    """The logits, and the ids if there are some; the token, key, temperature and position of a row."""
    return 4 * (shape.rows * (shape.vocab + 5) + (0 if shape.target_vocab is None else shape.vocab))
