"""A Markov head's steps in plain jnp: the specification of the ops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gumbel_sample.reference import argmax
from pallas_kernels.markov_head.inputs import Inputs
from pallas_kernels.matmul import Inputs as Factors
from pallas_kernels.matmul import matmul


def markov_argmax(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.markov_head.markov_argmax."""
    logits = _column(inputs)
    return argmax(jnp.where(jnp.isnan(logits), -jnp.inf, logits))


def markov_logits(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.markov_head.markov_logits."""
    column = _column(inputs)[:, None]
    return lax.dynamic_update_slice_in_dim(inputs.base, column, inputs.step, 1)


def _column(inputs: Inputs) -> jax.Array:
    """Return the logits of the step's draft, float32 [rows, vocab]."""
    rows = inputs.table.at[inputs.token].get(mode="clip", wrap_negative_indices=False)
    added = matmul(Factors(x=rows, weights=(inputs.weight,), out_dtype=jnp.float32))
    return lax.dynamic_index_in_dim(inputs.base, inputs.step, 1, keepdims=False) + added
