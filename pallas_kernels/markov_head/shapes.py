"""Named shapes of a Markov head's draft, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.markov_head.inputs import Draw, Inputs


@dataclass(frozen=True)
class Shape:
    """A step of `rows` requests, of a block of `steps` drafts.

    vocab:  of the drafts
    tokens: rows of W1, None for vocab
    """

    rows: int
    rank: int
    vocab: int
    steps: int = 7
    tokens: int | None = None
    dtype: str = "bfloat16"


_HEADS = {"smollm2": (64, 49_152), "qwen3-8b": (256, 151_936)}
SHAPES = {
    f"{name} rows {rows}": Shape(rows, *sizes)
    for name, sizes in _HEADS.items()
    for rows in (1, 4, 16, 64)
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return random inputs. The first tokens are W1's last and its first."""
    keys = jax.random.split(jax.random.key(seed), 4)
    dtype, tokens = jnp.dtype(shape.dtype), shape.tokens or shape.vocab
    token = jax.random.randint(keys[0], (shape.rows,), 0, tokens, jnp.int32)
    ends = jnp.array([tokens - 1, 0], jnp.int32)[: shape.rows]
    weight = jax.random.normal(keys[1], (shape.rank, shape.vocab)) * shape.rank**-0.5
    return Inputs(
        base=jax.random.normal(keys[2], (shape.rows, shape.steps, shape.vocab), jnp.float32),
        step=jnp.int32(seed % shape.steps),
        token=token.at[: len(ends)].set(ends),
        table=jax.random.normal(keys[3], (tokens, shape.rank), dtype),
        weight=weight.astype(dtype),
        draw=Draw.of(**draw_arguments(shape.rows, seed)),
    )


def draw_arguments(rows: int, seed: int) -> dict[str, Any]:
    """Return what make_inputs' draw is made of. Every third row is greedy."""
    row = jnp.arange(rows, dtype=jnp.int32)
    return {
        "temperature": jnp.where(row % 3 == 2, 0.0, 0.7 + 0.1 * (row % 4).astype(jnp.float32)),
        "keys": jax.random.bits(jax.random.key(seed + 1), (rows, 2), jnp.uint32),
        "position": row * 7 + seed,
        "stream": 1,
    }


def bytes_moved(shape: Shape, *, op: str = "markov_argmax") -> int:
    """Return the fewest bytes: W2, and for each row its part of W1, its logits and two tokens.

    op: markov_draw also writes the logits, and reads a temperature and a key
    """
    size = jnp.dtype(shape.dtype).itemsize
    of_row = size * shape.rank + 4 * shape.vocab + 8
    if op == "markov_draw":
        of_row += 4 * shape.vocab + 12
    return size * shape.rank * shape.vocab + shape.rows * of_row
