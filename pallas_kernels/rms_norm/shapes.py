"""Named real shapes of the RMS norm, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Shape:
    """rows of a pass, width of a row."""

    rows: int
    width: int


SHAPES = {
    f"{name} rows {rows}": Shape(rows, width)
    for name, width in (
        ("llama-3-8b", 4096),
        ("EAGLE-3 of llama-3-8b, fused", 12288),
        ("smollm2", 576),
    )
    for rows in (1, 4, 64, 256)
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Keyword arguments of the public op; weights around one, as trained ones are."""
    x_key, weight_key = jax.random.split(jax.random.key(seed))
    return {
        "x": jax.random.normal(x_key, (shape.rows, shape.width), jnp.bfloat16),
        "weight": (1 + 0.1 * jax.random.normal(weight_key, (shape.width,))).astype(jnp.bfloat16),
        "eps": 1e-5,
    }


def bytes_moved(shape: Shape) -> int:
    """Rows in and out, and the weight."""
    return 2 * shape.width * (2 * shape.rows + 1)
