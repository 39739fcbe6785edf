"""Named shapes of Gumbel-max, shared by tests and benchmarks.

Draft steps and plain decoding of real vocabularies, and small shapes for tests.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.gumbel_sample.inputs import Inputs


@dataclass(frozen=True)
class Shape:
    """Rows of `vocab` logits.

    target_vocab: the vocabulary whose ids key the noise, if it is another (a draft's tokens under
    the strict rule). mixed: some rows are greedy, some logits -inf or NaN, some rows all of that
    or flat; for tests, not to be timed.
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
    # One piece; an even and an odd width, the last piece moved back; ids of another vocabulary.
    "tiny": Shape(12, 128, mixed=True),
    "tiny, even": Shape(12, 514, mixed=True),
    "tiny, odd": Shape(12, 777, mixed=True),
    "tiny, 14 pieces": Shape(12, 3334, mixed=True),
    "tiny, strict": Shape(12, 512, 1777, mixed=True),
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return random inputs of this shape."""
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
        chosen = jax.random.permutation(keys[2], shape.target_vocab)[:vocab]
        token_ids = jnp.sort(chosen).astype(jnp.int32)
    return Inputs(
        logits=logits,
        temperature=temperature,
        keys=jax.random.bits(keys[3], (rows, 2), jnp.uint32),
        position=jax.random.randint(keys[4], (rows,), 0, 4096, jnp.int32),
        offset=jnp.int32(seed % 5),
        token_ids=token_ids,
        stream=1,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes: the logits, the ids if any, and five words for each row.

    The words are the token, the key (two), the temperature and the position.
    """
    return 4 * (shape.rows * (shape.vocab + 5) + (0 if shape.target_vocab is None else shape.vocab))
