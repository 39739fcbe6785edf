"""Named real shapes of sum and norm, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shape:
    """rows of a pass, width of a row, parts of a product's depth."""

    rows: int
    width: int
    parts: int = 2


SHAPES = {
    f"{name} rows {rows}": Shape(rows, width)
    for name, width in (("llama-3-8b", 4096), ("llama-3.2-3b", 3072))
    for rows in (128, 256)
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Keyword arguments of the public op; a gain around one, as trained ones are."""
    keys = jax.random.split(jax.random.key(seed), 3)
    rows, width = shape.rows, shape.width
    return {
        "parts": jax.random.normal(keys[0], (shape.parts, rows, width), jnp.float32),
        "residual": jax.random.normal(keys[1], (rows, width), jnp.bfloat16),
        "gain": (1 + 0.1 * jax.random.normal(keys[2], (width,))).astype(jnp.bfloat16),
        "eps": 1e-5,
    }


def bytes_moved(shape: Shape) -> int:
    """Parts and residual in, the sum and its norm out, and the gain."""
    return shape.width * (shape.rows * (4 * shape.parts + 6) + 2)
