"""Real shapes of the per-head products, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

ROPE = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """in_heads, out_heads: with those that pad a row, None for num_heads. rotates: 64 more numbers a head, which are rotated."""

    rows: int
    num_heads: int
    depth: int
    width: int
    rotates: bool = False
    in_heads: int | None = None
    out_heads: int | None = None
    dtype: str = "bfloat16"


_GLM_KEYS: dict[str, Any] = {"num_heads": 20, "depth": 192, "width": 512, "rotates": True}
_GLM_VALUES: dict[str, Any] = {"num_heads": 20, "depth": 512, "width": 256}

SHAPES = {
    "glm keys, batch 1, Q 4": Shape(4, **_GLM_KEYS),
    "glm keys, batch 1, Q 1": Shape(1, **_GLM_KEYS, out_heads=24),
    "glm keys, batch 16, Q 4": Shape(64, **_GLM_KEYS),
    "glm keys, batch 16, Q 6": Shape(96, **_GLM_KEYS),
    "glm values, batch 1, Q 4": Shape(4, **_GLM_VALUES),
    "glm values, batch 1, Q 1": Shape(1, **_GLM_VALUES, in_heads=24),
    "glm values, batch 16, Q 4": Shape(64, **_GLM_VALUES),
    "glm values, batch 16, Q 6": Shape(96, **_GLM_VALUES),
    "deepseek-v3 keys, batch 1, Q 4": Shape(4, 128, 128, 512, rotates=True),
    "deepseek-v3 values, batch 1, Q 4": Shape(4, 128, 512, 128),
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Arguments of the public op: normal random numbers, weights over the root of the depth."""
    keys = jax.random.split(jax.random.key(seed), 3)
    dtype = jnp.dtype(shape.dtype)
    angle = jax.random.uniform(keys[2], (shape.rows, ROPE // 2), jnp.float32, 0.0, 6.0)
    depth = shape.depth + (ROPE if shape.rotates else 0)
    return {
        "x": jax.random.normal(
            keys[0], (shape.rows, shape.in_heads or shape.num_heads, depth), dtype
        ),
        "weights": (
            jax.random.normal(keys[1], (shape.num_heads, shape.depth, shape.width))
            * shape.depth**-0.5
        ).astype(dtype),
        "cos": jnp.cos(angle) if shape.rotates else None,
        "sin": jnp.sin(angle) if shape.rotates else None,
        "out_heads": shape.out_heads,
    }


def bytes_moved(shape: Shape) -> int:
    """The fewest bytes of device memory: weights, what is multiplied and rotated, and the result, once each."""
    a_row = shape.num_heads * (shape.depth + shape.width + (2 * ROPE if shape.rotates else 0))
    numbers = shape.num_heads * shape.depth * shape.width + shape.rows * a_row
    return numbers * jnp.dtype(shape.dtype).itemsize + (
        shape.rows * ROPE * 4 if shape.rotates else 0
    )
