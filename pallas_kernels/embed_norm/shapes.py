"""Named real shapes of embedding and norm, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.embed_norm.inputs import Inputs


@dataclass(frozen=True)
class Shape:
    """A pass of `rows` rows.

    draft: an EAGLE-3 head's, with a hidden state. norm_residual: see Inputs.
    """

    rows: int
    width: int
    vocab: int
    draft: bool = False
    norm_residual: bool = False


_MODELS = {"llama-3-8b": (4096, 128256), "smollm2": (576, 49152)}
SHAPES = {
    f"{name} rows {rows}": Shape(rows, *sizes)
    for name, sizes in _MODELS.items()
    for rows in (1, 4, 64)
}
SHAPES |= {
    f"EAGLE-3 of {name} rows {rows}": Shape(rows, *sizes, draft=True)
    for name, sizes in _MODELS.items()
    for rows in (1, 4, 64)
}
SHAPES |= {
    f"EAGLE-3 of {name}, residual normed, rows 4": Shape(4, *sizes, True, True)
    for name, sizes in _MODELS.items()
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return random inputs; the first tokens are the vocabulary's last and its first."""
    keys = iter(jax.random.split(jax.random.key(seed), 5))

    def normal(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes, jnp.bfloat16)

    def gain() -> jax.Array:
        return (1 + 0.1 * normal(shape.width)).astype(jnp.bfloat16)

    tokens = jax.random.randint(next(keys), (shape.rows,), 0, shape.vocab, jnp.int32)
    ends = jnp.array([shape.vocab - 1, 0], jnp.int32)[: shape.rows]
    inputs = Inputs(
        tokens=tokens.at[: len(ends)].set(ends),
        table=normal(shape.vocab, shape.width),
        weight=gain(),
        eps=1e-5,
    )
    if not shape.draft:
        return inputs
    return replace(
        inputs,
        hidden=normal(shape.rows, shape.width),
        hidden_weight=gain(),
        norm_residual=shape.norm_residual,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes: rows in and out, the weights, the tokens."""
    arrays = 2 * shape.rows + 1  # the embedding, read and written, and its gain
    if shape.draft:
        arrays *= 2
    if shape.norm_residual or not shape.draft:
        arrays += shape.rows
    return 2 * shape.width * arrays + 4 * shape.rows
