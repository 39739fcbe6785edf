"""The all-reduce in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.all_reduce.inputs import Peers
from pallas_kernels.rms_norm.reference import rms_norm

Result: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]  # the sum; with a gain (sum, normed)


def all_reduce(
    x: jax.Array,
    peers: Peers,
    *,
    residual: jax.Array | None,
    gain: jax.Array | None,
    eps: float,
) -> Result:
    """Run the op; see pallas_kernels.all_reduce.all_reduce."""
    partials = lax.all_gather(x, peers.axis).astype(jnp.float32)
    total = partials[0]
    for rank in range(1, peers.size):
        total = total + partials[rank]
    if residual is None:
        total = total.astype(x.dtype)
    else:
        rounded = total.astype(residual.dtype).astype(jnp.float32)
        total = (residual.astype(jnp.float32) + rounded).astype(residual.dtype)
    return total if gain is None else (total, rms_norm(total, gain, eps=eps))
