"""Named real shapes of the all-reduce, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


@dataclass(frozen=True)
class Shape:
    """rows of a pass; width of a row; dtype of the shares; norms: with residual and norm."""

    rows: int
    width: int
    dtype: DTypeLike = jnp.bfloat16
    norms: bool = True


SHAPES = {
    f"{name} rows {rows}": Shape(rows, width)
    for name, width in (("llama-3-8b", 4096), ("llama-3-70b", 8192))
    for rows in (1, 4, 16, 64)
}
SHAPES |= {f"llama-3-8b rows {rows}, float32": Shape(rows, 4096, jnp.float32) for rows in (4, 64)}
SHAPES |= {f"llama-3-8b rows {rows}, sum alone": Shape(rows, 4096, norms=False) for rows in (4, 64)}


def make_inputs(shape: Shape, size: int, seed: int) -> dict[str, Any]:
    """Return the arrays of the public op, x as [size, rows, width]: each device's share."""
    keys = jax.random.split(jax.random.key(seed), 3)
    sizes = (shape.rows, shape.width)
    arrays = {"x": jax.random.normal(keys[0], (size, *sizes)).astype(shape.dtype)}
    if not shape.norms:
        return arrays
    gain = 1 + 0.1 * jax.random.normal(keys[2], (shape.width,))
    return arrays | {
        "residual": jax.random.normal(keys[1], sizes, jnp.bfloat16),
        "gain": gain.astype(jnp.bfloat16),
    }


def bytes_moved(shape: Shape, size: int) -> int:
    """Return the bytes that a device sends: each value goes to each peer, with an epoch."""
    return 2 * (size - 1) * shape.rows * shape.width * jnp.dtype(shape.dtype).itemsize
