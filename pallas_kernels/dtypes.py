"""The dtype of a product whose operands differ, and casts to a narrower dtype with a scale."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def wider(first: DTypeLike, second: DTypeLike) -> jnp.dtype:
    """Return the dtype with more bits, to which the other converts without rounding.

    The first one wins if they have the same number. Unlike jnp.promote_types, it also works where
    JAX promotes strictly.
    """
    return max(jnp.dtype(first), jnp.dtype(second), key=lambda dtype: dtype.itemsize)


def narrowed(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return x rounded to dtype; in fp8 what is too large becomes the largest number, not NaN."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize > 1:
        return x.astype(dtype)
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(dtype)


def rounded_division(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return x / divisor by a division, as kernels do, and not by a product with the inverse.

    XLA multiplies by the inverse where it sees a broadcast, so the bits would depend on the shape.
    A select by x hides the broadcast, and takes no array of x's size. NaN stays NaN.
    """
    return x / jnp.where(x == x, divisor, 1.0)
