"""Real shapes of the per-head products, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.head_matmul.inputs import Inputs

ROPE = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product of `rows` rows.

    in_heads, out_heads: heads with those that pad a row; None for num_heads. rotates: each head
    has ROPE more numbers, which are rotated.
    """

    rows: int
    num_heads: int
    depth: int
    width: int
    rotates: bool = False
    in_heads: int | None = None
    out_heads: int | None = None
    dtype: str = "bfloat16"


_GLM_KEYS = Shape(1, num_heads=20, depth=192, width=512, rotates=True)
_GLM_VALUES = Shape(1, num_heads=20, depth=512, width=256)
_of = dataclasses.replace

SHAPES = {
    "glm keys, batch 1, Q 4": _of(_GLM_KEYS, rows=4),
    "glm keys, batch 1, Q 1": _of(_GLM_KEYS, rows=1, out_heads=24),
    "glm keys, batch 16, Q 4": _of(_GLM_KEYS, rows=64),
    "glm keys, batch 16, Q 6": _of(_GLM_KEYS, rows=96),
    "glm values, batch 1, Q 4": _of(_GLM_VALUES, rows=4),
    "glm values, batch 1, Q 1": _of(_GLM_VALUES, rows=1, in_heads=24),
    "glm values, batch 16, Q 4": _of(_GLM_VALUES, rows=64),
    "glm values, batch 16, Q 6": _of(_GLM_VALUES, rows=96),
    "deepseek-v3 keys, batch 1, Q 4": Shape(4, 128, 128, 512, rotates=True),
    "deepseek-v3 values, batch 1, Q 4": Shape(4, 128, 512, 128),
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers; weights are divided by the root of the depth."""
    keys = jax.random.split(jax.random.key(seed), 3)
    dtype = jnp.dtype(shape.dtype)
    angle = jax.random.uniform(keys[2], (shape.rows, ROPE // 2), jnp.float32, 0.0, 6.0)
    x = shape.rows, shape.in_heads or shape.num_heads, shape.depth + shape.rotates * ROPE
    weights = jax.random.normal(keys[1], (shape.num_heads, shape.depth, shape.width))
    return Inputs(
        x=jax.random.normal(keys[0], x, dtype),
        weights=(weights * shape.depth**-0.5).astype(dtype),
        cos=jnp.cos(angle) if shape.rotates else None,
        sin=jnp.sin(angle) if shape.rotates else None,
        out_heads=shape.out_heads,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory: weights, used parts of x, and the result, once."""
    of_row = shape.num_heads * (shape.depth + shape.width + (2 * ROPE if shape.rotates else 0))
    numbers = shape.num_heads * shape.depth * shape.width + shape.rows * of_row
    return numbers * jnp.dtype(shape.dtype).itemsize + (
        shape.rows * ROPE * 4 if shape.rotates else 0
    )
