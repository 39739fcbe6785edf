"""Embedding and norm in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm.reference import rms_norm


def embed_norm(
    tokens: jax.Array,
    table: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    hidden: jax.Array | None = None,
    hidden_weight: jax.Array | None = None,
    norm_residual: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See pallas_kernels.embed_norm.embed_norm."""
    embedded = table.at[tokens].get(mode="clip", wrap_negative_indices=False)
    if hidden is None or hidden_weight is None:
        return embedded, rms_norm(embedded, weight, eps=eps)
    normed = rms_norm(hidden, hidden_weight, eps=eps)
    joined = jnp.concatenate(
        [rms_norm(embedded.astype(hidden.dtype), weight, eps=eps), normed], axis=-1
    )
    return (normed if norm_residual else hidden), joined
