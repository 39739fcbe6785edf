"""The dtype of a product whose operands differ."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike


def wider(first: DTypeLike, second: DTypeLike) -> jnp.dtype:
    """Return the dtype with more bits, to which the other converts without rounding.

    The first one wins if they have the same number. Unlike jnp.promote_types, it also works where
    JAX promotes strictly.
    """
    return max(jnp.dtype(first), jnp.dtype(second), key=lambda dtype: dtype.itemsize)
