"""Real shapes of the experts, shared by tests and benchmarks.

The passes of a decode round of three models, at batches of 1 and 16.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.moe.inputs import Gate, Inputs
from pallas_kernels.moe.mxfp4 import Mxfp4Weight, random_weight

ROWS = (1, 4, 6, 16, 64, 96)  # a draft step, K + 1 of K = 3 and 5; the same of 16 requests


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows x [rows, hidden] through top_k of num_experts experts.

    gate_up is [experts, hidden, 2 * size] and down [experts, size, hidden]. routing: "random"
    (each row its own experts), "same" (all rows the same ones) or "spread" (one after the other:
    every expert is hit if rows * top_k suffice). mxfp4: weights are packed.
    """

    rows: int
    num_experts: int
    top_k: int
    hidden: int
    size: int
    gate: Gate = "silu"
    bias: bool = False
    routing: str = "random"
    mxfp4: bool = False


_MODELS = {
    "gpt-oss-20b": Shape(0, 32, 4, 2880, 2880, gate="clamped", bias=True),
    "gpt-oss-20b mxfp4": Shape(0, 32, 4, 2880, 2880, gate="clamped", bias=True, mxfp4=True),
    "glm-4.7-flash": Shape(0, 64, 4, 2048, 1536),
    "qwen3-30b-a3b": Shape(0, 128, 8, 2048, 768),
}
SHAPES = {
    f"{name} rows {rows}": dataclasses.replace(shape, rows=rows)
    for name, shape in _MODELS.items()
    for rows in ROWS
}


def route(shape: Shape, seed: int) -> np.ndarray:
    """Return chosen experts, int32 [rows, top_k], no expert twice in a row."""
    rng, rows, top_k = np.random.default_rng(seed), shape.rows, shape.top_k
    if shape.routing == "same":
        ids = np.tile(rng.permutation(shape.num_experts)[:top_k], (rows, 1))
    elif shape.routing == "spread":
        ids = np.arange(rows * top_k).reshape(rows, top_k) % shape.num_experts
    else:
        ids = np.stack([rng.permutation(shape.num_experts)[:top_k] for _ in range(rows)])
    return ids.astype(np.int32)


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers, scaled so that x and the result are of one size."""
    keys = jax.random.split(jax.random.key(seed), 6)

    def normal(key: jax.Array, *dims: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(key, dims, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)

    count, hidden, size = shape.num_experts, shape.hidden, shape.size

    def matrices(key: jax.Array, depth: int, width: int) -> jax.Array | Mxfp4Weight:
        if shape.mxfp4:  # a code's root mean square is about 3
            exponent = round(-math.log2(3 * math.sqrt(depth)))
            return random_weight(key, (count, depth, width), exponent)
        return normal(key, count, depth, width, scale=1 / math.sqrt(depth))

    logits = jax.random.normal(keys[1], (shape.rows, shape.top_k), jnp.float32)
    return Inputs(
        x=normal(keys[0], shape.rows, hidden),
        ids=jnp.asarray(route(shape, seed)),
        weights=jax.nn.softmax(logits),
        gate_up=matrices(keys[2], hidden, 2 * size),
        down=matrices(keys[3], size, hidden),
        gate_up_bias=normal(keys[4], count, 2 * size) if shape.bias else None,
        down_bias=normal(keys[5], count, hidden) if shape.bias else None,
        gate=shape.gate,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    Each expert that make_inputs hits with seed 0 is read once; rows are read and written.
    """
    hit = len(np.unique(route(shape, 0)))
    weights = 3 * shape.hidden * shape.size
    biases = 2 * shape.size + shape.hidden if shape.bias else 0
    per_expert = (weights * 17 // 32 if shape.mxfp4 else 2 * weights) + 2 * biases
    rows = 4 * shape.rows * shape.hidden
    return hit * per_expert + rows + 8 * shape.rows * shape.top_k
