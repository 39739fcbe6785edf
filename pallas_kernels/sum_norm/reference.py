"""Sum and norm in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax

from pallas_kernels.rms_norm.reference import rms_norm


def sum_norm(
    parts: jax.Array, residual: jax.Array, gain: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.sum_norm.sum_norm."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    total = (total + residual.astype(total.dtype)).astype(residual.dtype)
    return total, rms_norm(total, gain, eps=eps)
