"""Logits over a request's temperature, for kernels that exponentiate them or add noise."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Refs

LARGEST = float(jnp.finfo(jnp.float32).max)


def divisor_of(refs: Refs, request: jax.Array) -> jax.Array | None:
    """Return the request's temperature, 1 if greedy; None: the logits are divided already."""
    return (
        None
        if refs.temperature is None
        else jnp.where(refs.greedy[request], 1.0, refs.temperature[request])
    )


def scaled(logits: jax.Array, divisor: jax.Array | None) -> jax.Array:
    """Divide by the temperature, then replace NaN by -inf and +inf by the largest float.

    As in the reference.
    """
    logits = logits if divisor is None else logits / divisor
    return jnp.where(logits == logits, jnp.minimum(logits, LARGEST), -jnp.inf)
