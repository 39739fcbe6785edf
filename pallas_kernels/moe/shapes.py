"""Real shapes of the experts' op, shared by tests and benchmarks: the passes of a decode round of two models, at batches of 1 and 16."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

ROWS = (1, 4, 6, 16, 64, 96)  # a draft step, K + 1 of K = 3 and 5; the same of 16 requests


@dataclasses.dataclass(frozen=True)
class Shape:
    """x [rows, hidden] through top_k of num_experts experts, gate_up [experts, hidden, 2 * size] and down [experts, size, hidden].

    routing: "random" (each row its own experts), "same" (all rows the same ones) or "spread" (one after the other: every expert is hit
    if rows * top_k suffice).
    """

    rows: int
    num_experts: int
    top_k: int
    hidden: int
    size: int
    gate: str = "silu"
    bias: bool = False
    routing: str = "random"


_MODELS = {
    "gpt-oss-20b": Shape(0, 32, 4, 2880, 2880, gate="clamped", bias=True),
    "glm-4.7-flash": Shape(0, 64, 4, 2048, 1536),
}
SHAPES = {
    f"{name} rows {rows}": dataclasses.replace(shape, rows=rows)
    for name, shape in _MODELS.items()
    for rows in ROWS
}


def route(shape: Shape, seed: int) -> np.ndarray:
    """int32 [rows, top_k], no expert twice in a row."""
    rng = np.random.default_rng(seed)
    if shape.routing == "same":
        return np.tile(rng.permutation(shape.num_experts)[: shape.top_k], (shape.rows, 1)).astype(
            np.int32
        )
    if shape.routing == "spread":
        return (
            np.arange(shape.rows * shape.top_k).reshape(shape.rows, shape.top_k) % shape.num_experts
        ).astype(np.int32)
    return np.stack(
        [rng.permutation(shape.num_experts)[: shape.top_k] for _ in range(shape.rows)]
    ).astype(np.int32)


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Arguments of the public op: normal random numbers, scaled so that what goes in and what comes out is of one size."""
    keys = jax.random.split(jax.random.key(seed), 6)

    def normal(key: jax.Array, *dims: int, scale: float = 1.0) -> jax.Array:
        return jax.random.normal(key, dims, jnp.bfloat16) * jnp.asarray(scale, jnp.bfloat16)

    count, hidden, size = shape.num_experts, shape.hidden, shape.size
    return {
        "x": normal(keys[0], shape.rows, hidden),
        "ids": jnp.asarray(route(shape, seed)),
        "weights": jax.nn.softmax(
            jax.random.normal(keys[1], (shape.rows, shape.top_k), jnp.float32)
        ),
        "gate_up": normal(keys[2], count, hidden, 2 * size, scale=1 / math.sqrt(hidden)),
        "down": normal(keys[3], count, size, hidden, scale=1 / math.sqrt(size)),
        "gate_up_bias": normal(keys[4], count, 2 * size) if shape.bias else None,
        "down_bias": normal(keys[5], count, hidden) if shape.bias else None,
        "gate": shape.gate,
    }


def bytes_moved(shape: Shape) -> int:
    """The fewest bytes of device memory: each expert that make_inputs' seed 0 hits read once, the rows in and out."""
    hit = len(np.unique(route(shape, 0)))
    per_expert = 3 * shape.hidden * shape.size + (
        2 * shape.size + shape.hidden if shape.bias else 0
    )
    return 2 * (hit * per_expert + 2 * shape.rows * shape.hidden) + 8 * shape.rows * shape.top_k
