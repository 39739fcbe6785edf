"""The router in plain jnp: the specification of the op, and the path for many rows and on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def route(
    x: jax.Array,
    router: jax.Array,
    bias: jax.Array | None,
    *,
    top_k: int,
    kind: str,
    scaling: float = 1.0,
    normalise: bool = True,
) -> tuple[jax.Array, jax.Array]:
    """See pallas_kernels.router.route."""
    logits = jnp.matmul(x, router, preferred_element_type=jnp.float32)
    added = 0.0 if bias is None else bias.astype(jnp.float32)
    if kind == "softmax":
        chosen, ids = lax.top_k(logits + added, top_k)
        return ids, jax.nn.softmax(chosen, axis=-1)
    scores = jax.nn.sigmoid(logits)
    _, ids = lax.top_k(scores + added, top_k)
    return ids, weigh(scores, ids, scaling=scaling, normalise=normalise)


def weigh(scores: jax.Array, ids: jax.Array, *, scaling: float, normalise: bool) -> jax.Array:
    """The weights [rows, top_k] of a sigmoid router's choice, from scores [rows, experts]."""
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return weights * scaling
