"""The router in plain jnp: the specification of the op, and the path for many rows and on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.router.inputs import Inputs


def route(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.router.route."""
    bias, top_k = inputs.bias, inputs.top_k
    logits = jnp.matmul(inputs.x, inputs.router, preferred_element_type=jnp.float32)
    added = 0.0 if bias is None else bias.astype(jnp.float32)
    if inputs.kind == "softmax":
        chosen, ids = lax.top_k(logits + added, top_k)
        if inputs.normalise:  # what all logits divide by cancels out
            return ids, jax.nn.softmax(chosen, axis=-1)
        return ids, jnp.exp(chosen - jax.nn.logsumexp(logits + added, axis=-1, keepdims=True))
    scores = jax.nn.sigmoid(logits)
    _, ids = lax.top_k(scores + added, top_k)
    return ids, weigh(scores, ids, scaling=inputs.scaling, normalise=inputs.normalise)


def weigh(scores: jax.Array, ids: jax.Array, *, scaling: float, normalise: bool) -> jax.Array:
    """Return the weights [rows, top_k] of a sigmoid router's choice.

    scores: [rows, experts]; ids: [rows, top_k].
    """
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * scaling
