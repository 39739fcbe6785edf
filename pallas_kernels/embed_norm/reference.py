"""Embedding and norm in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.embed_norm.inputs import Inputs
from pallas_kernels.rms_norm.reference import rms_norm


def embed_norm(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.embed_norm.embed_norm."""
    hidden, eps = inputs.hidden, inputs.eps
    embedded = inputs.table.at[inputs.tokens].get(mode="clip", wrap_negative_indices=False)
    if hidden is None or inputs.hidden_weight is None:
        return embedded, rms_norm(embedded, inputs.weight, eps=eps)
    normed = rms_norm(hidden, inputs.hidden_weight, eps=eps)
    embedded = rms_norm(embedded.astype(hidden.dtype), inputs.weight, eps=eps)
    joined = jnp.concatenate([embedded, normed], axis=-1)
    return (normed if inputs.norm_residual else hidden), joined
