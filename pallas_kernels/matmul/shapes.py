"""Real shapes of the matmul op, shared by tests and benchmarks.

Every product of a decode step, at the rows of a few batches.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.matmul.inputs import Inputs

ROWS = (1, 4, 8, 16, 64)
MANY_ROWS = (128, 256)  # of gate and up alone: batches of 32 and 64 with four rows each


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product of x [rows, depth] and weights [depth, width], one for each of `widths`.

    transposed: weights are [width, depth].
    """

    rows: int
    depth: int
    widths: tuple[int, ...]
    bias: bool = False
    residual: bool = False
    swiglu: bool = False
    transposed: bool = False
    out_dtype: str = "bfloat16"

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.widths[0] if self.swiglu else sum(self.widths)


_PRODUCTS = {
    "llama-3-8b qkv": Shape(1, 4096, (4096, 1024, 1024)),
    "llama-3-8b o": Shape(1, 4096, (4096,), residual=True),
    "llama-3-8b gate_up": Shape(1, 4096, (14336, 14336), swiglu=True),
    "llama-3-8b down": Shape(1, 14336, (4096,), residual=True),
    "llama-3-8b head": Shape(1, 4096, (128256,), out_dtype="float32"),
    "llama-3-8b eagle3 fc": Shape(1, 3 * 4096, (4096,)),
    "llama-3-8b eagle3 qkv": Shape(1, 2 * 4096, (4096, 1024, 1024)),
    "llama-3-8b eagle3 head": Shape(1, 4096, (32000,), out_dtype="float32"),
    "gpt-oss-20b qkv": Shape(1, 2880, (5120,), bias=True),
    "gpt-oss-20b o": Shape(1, 4096, (2880,), bias=True, residual=True),
    "smollm2 qkv": Shape(1, 576, (576, 192, 192)),
    "smollm2 o": Shape(1, 576, (576,), residual=True),
    "smollm2 gate_up": Shape(1, 576, (1536, 1536), swiglu=True),
    "smollm2 down": Shape(1, 1536, (576,), residual=True),
    "smollm2 head": Shape(1, 576, (49152,), transposed=True, out_dtype="float32"),
}

SHAPES = {
    f"{name} rows {rows}": dataclasses.replace(product, rows=rows)
    for name, product in _PRODUCTS.items()
    for rows in (*ROWS, *MANY_ROWS)
    if rows in ROWS or product.swiglu
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers, scaled so that every product is of the residual's size."""
    keys = jax.random.split(jax.random.key(seed), len(shape.widths) + 3)
    scale = jnp.asarray(1 / math.sqrt(shape.depth), jnp.bfloat16)

    def weight(key: jax.Array, width: int) -> jax.Array:
        dims = (width, shape.depth) if shape.transposed else (shape.depth, width)
        return jax.random.normal(key, dims, jnp.bfloat16) * scale

    bias, residual = None, None
    if shape.bias:
        bias = jax.random.normal(keys[-1], (shape.width,), jnp.bfloat16)
    if shape.residual:
        residual = jax.random.normal(keys[1], (shape.rows, shape.width), jnp.bfloat16)
    return Inputs(
        x=jax.random.normal(keys[0], (shape.rows, shape.depth), jnp.bfloat16),
        weights=tuple(weight(key, w) for key, w in zip(keys[2:-1], shape.widths, strict=True)),
        bias=bias,
        residual=residual,
        swiglu=shape.swiglu,
        transposed=shape.transposed,
        out_dtype=jnp.dtype(shape.out_dtype),
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    Every weight, the input, the bias and the residual are read once; the result is written once.
    """
    read = shape.depth * (sum(shape.widths) + shape.rows)
    read += shape.width * (shape.bias + shape.rows * shape.residual)
    return 2 * read + shape.rows * shape.width * jnp.dtype(shape.out_dtype).itemsize


def flops(shape: Shape) -> int:
    """Return the arithmetic of the products."""
    return 2 * shape.rows * shape.depth * sum(shape.widths)
