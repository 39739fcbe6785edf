"""A Markov head's steps in plain jnp: the specification of the ops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise
from pallas_kernels.gumbel_sample.reference import argmax, scores
from pallas_kernels.markov_head.inputs import Inputs, Step
from pallas_kernels.matmul import Inputs as Factors
from pallas_kernels.matmul import matmul


def markov_argmax(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.markov_head.markov_argmax."""
    logits = _column(inputs)
    return argmax(jnp.where(jnp.isnan(logits), -jnp.inf, logits))


def markov_draw(inputs: Inputs) -> Step:
    """Run the op; see pallas_kernels.markov_head.markov_draw."""
    logits, draw = _column(inputs), inputs.draw
    assert draw is not None  # the op has checked it
    key = noise.fold_in((draw.keys[0], draw.keys[1]), inputs.step)
    high, low = (word[: inputs.rows, None] for word in key)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)
    token = argmax(scores(logits, draw.temperature[: inputs.rows], (high, low), ids))
    base = lax.dynamic_update_slice_in_dim(inputs.base, logits[:, None], inputs.step, 1)
    return Step(base, token)


def _column(inputs: Inputs) -> jax.Array:
    """Return the logits of the step's draft, float32 [rows, vocab]."""
    rows = inputs.table.at[inputs.token].get(mode="clip", wrap_negative_indices=False)
    added = matmul(Factors(x=rows, weights=(inputs.weight,), out_dtype=jnp.float32))
    return lax.dynamic_index_in_dim(inputs.base, inputs.step, 1, keepdims=False) + added
