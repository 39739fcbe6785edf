"""Real shapes of the router op, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Shape:
    """x [rows, hidden] by a router [hidden, num_experts]; bias_dtype: None without a bias."""

    rows: int
    num_experts: int
    top_k: int
    hidden: int
    kind: str
    bias_dtype: str | None = None
    scaling: float = 1.0


_MODELS = {
    "gpt-oss-20b": Shape(0, 32, 4, 2880, "softmax", "bfloat16"),
    "glm-4.7-flash": Shape(0, 64, 4, 2048, "sigmoid", "float32", 1.8),
}
SHAPES = {
    f"{name} rows {rows}": dataclasses.replace(shape, rows=rows)
    for name, shape in _MODELS.items()
    for rows in (1, 4, 16, 64, 96)
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Arguments of the public op: logits and biases of a size."""
    keys = jax.random.split(jax.random.key(seed), 3)
    router = jax.random.normal(keys[1], (shape.hidden, shape.num_experts), jnp.bfloat16)
    bias = (
        None
        if shape.bias_dtype is None
        else jax.random.normal(keys[2], (shape.num_experts,), jnp.dtype(shape.bias_dtype))
    )
    return {
        "x": jax.random.normal(keys[0], (shape.rows, shape.hidden), jnp.bfloat16),
        "router": router * jnp.asarray(1 / math.sqrt(shape.hidden), jnp.bfloat16),
        "bias": bias,
        "top_k": shape.top_k,
        "kind": shape.kind,
        "scaling": shape.scaling,
    }


def bytes_moved(shape: Shape) -> int:
    """The router and the rows read, the choices written."""
    return 2 * shape.hidden * (shape.num_experts + shape.rows) + 8 * shape.rows * shape.top_k
