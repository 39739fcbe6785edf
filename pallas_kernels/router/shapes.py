"""Real shapes of the router op, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.router.inputs import Inputs, Kind


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows x [rows, hidden] and a router [hidden, num_experts]; bias_dtype: None for no bias."""

    rows: int
    num_experts: int
    top_k: int
    hidden: int
    kind: Kind
    bias_dtype: str | None = None
    scaling: float = 1.0


_MODELS = {
    "gpt-oss-20b": Shape(0, 32, 4, 2880, "softmax", "bfloat16"),
    "glm-4.7-flash": Shape(0, 64, 4, 2048, "sigmoid", "float32", 1.8),
    "qwen3-30b-a3b": Shape(0, 128, 8, 2048, "softmax"),
}
SHAPES = {
    f"{name} rows {rows}": dataclasses.replace(shape, rows=rows)
    for name, shape in _MODELS.items()
    for rows in (1, 4, 16, 64, 96)
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return random inputs whose logits and biases are of one size."""
    keys = jax.random.split(jax.random.key(seed), 3)
    router = jax.random.normal(keys[1], (shape.hidden, shape.num_experts), jnp.bfloat16)
    bias = None
    if shape.bias_dtype is not None:
        bias = jax.random.normal(keys[2], (shape.num_experts,), jnp.dtype(shape.bias_dtype))
    return Inputs(
        x=jax.random.normal(keys[0], (shape.rows, shape.hidden), jnp.bfloat16),
        router=router * jnp.asarray(1 / math.sqrt(shape.hidden), jnp.bfloat16),
        bias=bias,
        top_k=shape.top_k,
        kind=shape.kind,
        scaling=shape.scaling,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes: the router and the rows read, the choices written."""
    return 2 * shape.hidden * (shape.num_experts + shape.rows) + 8 * shape.rows * shape.top_k
