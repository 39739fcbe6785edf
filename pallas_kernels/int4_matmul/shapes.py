"""Real shapes of the int4_matmul op, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, UNIT, Int4Weight
from pallas_kernels.matmul.inputs import Inputs

ROWS = (1, 4, 16, 64)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A product of x [rows, depth] and a weight [depth, width], or gate and up with swiglu.

    group: depths that share a scale. zeros: whether each group has a zero too.
    """

    rows: int
    depth: int
    width: int
    group: int = 128
    zeros: bool = False
    residual: bool = False
    swiglu: bool = False
    out_dtype: str = "bfloat16"


_PRODUCTS = {
    "llama-3-8b qkv": Shape(1, 4096, 6144),
    "llama-3-8b o": Shape(1, 4096, 4096, residual=True),
    "llama-3-8b gate_up": Shape(1, 4096, 14336, swiglu=True),
    "llama-3-8b gate_up zeros": Shape(1, 4096, 14336, swiglu=True, zeros=True),
    "llama-3-8b down": Shape(1, 14336, 4096, residual=True),
    "llama-3-8b down zeros": Shape(1, 14336, 4096, residual=True, zeros=True),
    "llama-3-8b head": Shape(1, 4096, 128256, out_dtype="float32"),
    "smollm2 qkv": Shape(1, 576, 960, group=64),
    "smollm2 down": Shape(1, 1536, 576, residual=True),
}

SHAPES = {
    f"{name} rows {rows}": dataclasses.replace(product, rows=rows)
    for name, product in _PRODUCTS.items()
    for rows in ROWS
}


def make_inputs(shape: Shape, seed: int) -> Inputs[Int4Weight]:
    """Return random codes and scales, such that every product is of the residual's size."""
    keys = jax.random.split(jax.random.key(seed), 4)
    units = shape.width // COLUMNS, shape.depth // DEPTHS, UNIT
    groups = shape.depth // shape.group, shape.width

    def weight(key: jax.Array) -> Int4Weight:
        scales = jax.random.uniform(key, groups, jnp.float32, 0.5, 2.0)
        zeros = jax.random.randint(key, groups, 0, 16).astype(jnp.uint8) if shape.zeros else None
        return Int4Weight(
            lax.bitcast_convert_type(jax.random.bits(key, units, jnp.uint32), jnp.int32),
            (scales / (4 * math.sqrt(shape.depth))).astype(jnp.bfloat16),
            zeros,
        )

    residual = None
    if shape.residual:
        residual = jax.random.normal(keys[1], (shape.rows, shape.width), jnp.bfloat16)
    return Inputs(
        x=jax.random.normal(keys[0], (shape.rows, shape.depth), jnp.bfloat16),
        weights=tuple(weight(key) for key in keys[2:])[: 2 if shape.swiglu else 1],
        residual=residual,
        swiglu=shape.swiglu,
        out_dtype=jnp.dtype(shape.out_dtype),
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    Every weight, the input and the residual are read once; the result is written once.
    """
    by_group = 3 if shape.zeros else 2
    weights = shape.depth * shape.width // 2 + shape.depth // shape.group * shape.width * by_group
    result = shape.rows * shape.width * jnp.dtype(shape.out_dtype).itemsize
    rows = 2 * shape.rows * (shape.depth + (shape.width if shape.residual else 0))
    return (2 if shape.swiglu else 1) * weights + rows + result


def flops(shape: Shape) -> int:
    """Return the arithmetic of the products."""
    return 2 * shape.rows * shape.depth * shape.width * (2 if shape.swiglu else 1)
