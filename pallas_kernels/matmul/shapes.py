"""Real shapes of the matmul op, shared by tests and benchmarks: every product of a decode step, at the rows of a few batches."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

ROWS = (1, 4, 8, 16, 64)
MANY_ROWS = (128, 256)  # of gate and up alone: batches of 32 and 64 with four rows each


@dataclasses.dataclass(frozen=True)
class Shape:
    """x [rows, depth] by weights of `widths`, [depth, width] each ([width, depth] if transposed)."""

    rows: int
    depth: int
    widths: tuple[int, ...]
    residual: bool = False
    swiglu: bool = False
    transposed: bool = False
    out_dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.widths[0] if self.swiglu else sum(self.widths)


_PRODUCTS: dict[str, dict[str, Any]] = {
    "llama-3-8b qkv": {"depth": 4096, "widths": (4096, 1024, 1024)},
    "llama-3-8b o": {"depth": 4096, "widths": (4096,), "residual": True},
    "llama-3-8b gate_up": {"depth": 4096, "widths": (14336, 14336), "swiglu": True},
    "llama-3-8b down": {"depth": 14336, "widths": (4096,), "residual": True},
    "llama-3-8b head": {"depth": 4096, "widths": (128256,), "out_dtype": "float32"},
    "llama-3-8b eagle3 fc": {"depth": 3 * 4096, "widths": (4096,)},
    "llama-3-8b eagle3 qkv": {"depth": 2 * 4096, "widths": (4096, 1024, 1024)},
    "llama-3-8b eagle3 head": {"depth": 4096, "widths": (32000,), "out_dtype": "float32"},
    "smollm2 qkv": {"depth": 576, "widths": (576, 192, 192)},
    "smollm2 o": {"depth": 576, "widths": (576,), "residual": True},
    "smollm2 gate_up": {"depth": 576, "widths": (1536, 1536), "swiglu": True},
    "smollm2 down": {"depth": 1536, "widths": (576,), "residual": True},
    "smollm2 head": {"depth": 576, "widths": (49152,), "transposed": True, "out_dtype": "float32"},
}

SHAPES = {
    f"{name} rows {rows}": Shape(rows, **product)
    for name, product in _PRODUCTS.items()
    for rows in ROWS
}
_GATE_UP = {name: product for name, product in _PRODUCTS.items() if "swiglu" in product}
SHAPES |= {
    f"{name} rows {rows}": Shape(rows, **product)
    for name, product in _GATE_UP.items()
    for rows in MANY_ROWS
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Arguments of the public op: normal random numbers, scaled so that every product is of the residual's size."""
    keys = jax.random.split(jax.random.key(seed), len(shape.widths) + 2)

    def weight(key: jax.Array, width: int) -> jax.Array:
        dims = (width, shape.depth) if shape.transposed else (shape.depth, width)
        return jax.random.normal(key, dims, jnp.bfloat16) * jnp.asarray(
            1 / math.sqrt(shape.depth), jnp.bfloat16
        )

    return {
        "x": jax.random.normal(keys[0], (shape.rows, shape.depth), jnp.bfloat16),
        "weights": tuple(
            weight(key, width) for key, width in zip(keys[2:], shape.widths, strict=True)
        ),
        "residual": jax.random.normal(keys[1], (shape.rows, shape.width), jnp.bfloat16)
        if shape.residual
        else None,
        "swiglu": shape.swiglu,
        "transposed": shape.transposed,
        "out_dtype": jnp.dtype(shape.out_dtype),
    }


def bytes_moved(shape: Shape) -> int:
    """The fewest bytes of device memory: every weight, the input and the residual read once, the result written once."""
    read = shape.depth * (sum(shape.widths) + shape.rows) + (
        shape.rows * shape.width if shape.residual else 0
    )
    return 2 * read + shape.rows * shape.width * jnp.dtype(shape.out_dtype).itemsize


def flops(shape: Shape) -> int:
    """Of the products."""
    return 2 * shape.rows * shape.depth * sum(shape.widths)
