"""SwiGLU in kernels, with its roundings."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def swiglu(gate: jax.Array, up: jax.Array, dtype: DTypeLike = jnp.bfloat16) -> jax.Array:
    """Return silu(gate) * up in dtype, each rounded once.

    gate, up: float32 arrays of values that are rounded to dtype
    """
    silu = (gate / (1.0 + jnp.exp(-gate))).astype(dtype)
    return (silu.astype(jnp.float32) * up).astype(dtype)
