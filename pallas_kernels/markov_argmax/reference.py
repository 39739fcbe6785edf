"""The draft of a Markov head in plain jnp: the specification of the op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gumbel_sample.reference import argmax
from pallas_kernels.markov_argmax.inputs import Inputs
from pallas_kernels.matmul import Inputs as Factors
from pallas_kernels.matmul import matmul


def markov_argmax(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.markov_argmax.markov_argmax."""
    rows = inputs.table.at[inputs.token].get(mode="clip", wrap_negative_indices=False)
    added = matmul(Factors(x=rows, weights=(inputs.weight,), out_dtype=jnp.float32))
    logits = lax.dynamic_index_in_dim(inputs.base, inputs.step, 1, keepdims=False) + added
    return argmax(jnp.where(jnp.isnan(logits), -jnp.inf, logits))
