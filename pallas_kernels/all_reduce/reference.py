"""The all-reduce in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.peers import Peers
from pallas_kernels.rms_norm.reference import rms_norm
from pallas_kernels.vocab_shards import add_in_order

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
    dtype = x.dtype if residual is None else residual.dtype
    total = _rounded(_sum(x, peers), dtype)
    if residual is not None:
        total = _rounded(residual.astype(jnp.float32) + total.astype(jnp.float32), dtype)
    # XLA would store the sum in float32, or add it up again for each reader.
    total = lax.optimization_barrier(total)
    return total if gain is None else (total, rms_norm(total, gain, eps=eps))


def _sum(x: jax.Array, peers: Peers) -> jax.Array:
    """Return the devices' shares, added in float32 and in rank order.

    Two shares have one order. Each device copies its share to the other, which a GPU's copy engine
    can do beside kernels (xla_gpu_collective_permute_mode).
    """
    if peers.size == 2:
        # The share that is added is the one that is sent. XLA would add it before it is rounded,
        # and the devices would get different sums.
        x = lax.optimization_barrier(x)
        other = lax.ppermute(x, peers.axis, [(0, 1), (1, 0)])
        return x.astype(jnp.float32) + other.astype(jnp.float32)
    return add_in_order(lax.all_gather(x, peers.axis).astype(jnp.float32))


def _rounded(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return float32 values in this dtype.

    XLA leaves out a cast to bfloat16 and back, but not reduce_precision.
    """
    info = jnp.finfo(dtype)
    return lax.reduce_precision(values, info.nexp, info.nmant).astype(dtype)
