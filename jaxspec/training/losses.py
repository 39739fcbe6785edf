"""Losses and acceptance estimates of training: pure functions of logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import REFERENCE_OPS
from jaxspec.layers.params import Weight
from jaxspec.layers.products import vocab_logits
from jaxspec.training.target import choice_and_total


def head_logits(x: jax.Array, lm_head: Weight) -> jax.Array:
    """Return float32 logits [..., V] of x [..., D]; see summed_logits."""
    return summed_logits((x,), (lm_head,))


@jax.custom_vjp
def summed_logits(inputs: tuple[jax.Array, ...], heads: tuple[Weight, ...]) -> jax.Array:
    """Return the sum of the logits of each input [..., D] by its head, float32 [..., V].

    Inputs and heads are of one dtype.

    It is one product, of inputs and heads side by side: no array of V columns is added to another.
    The backward pass takes the logits' gradient in the inputs' dtype. In float32 its products, the
    largest of a step, would run in float32 too.
    """
    return vocab_logits(jnp.concatenate(inputs, axis=-1), _side_by_side(heads), REFERENCE_OPS)


def _side_by_side(heads: tuple[Weight, ...]) -> Weight:
    """Return the heads as one, laid out like the first."""
    stored = heads[0].transposed
    values = [h.values if h.transposed == stored else h.values.T for h in heads]
    return Weight(jnp.concatenate(values, axis=-1 if stored else -2), stored)


# What the backward pass reads, and the shape of what it returns.
Kept = tuple[tuple[jax.Array, ...], tuple[Weight, ...]]


def _summed_logits(
    inputs: tuple[jax.Array, ...], heads: tuple[Weight, ...]
) -> tuple[jax.Array, Kept]:
    return summed_logits(inputs, heads), (inputs, heads)


def _summed_logits_backward(kept: Kept, g: jax.Array) -> Kept:
    inputs, heads = kept
    g = g.astype(inputs[0].dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)

    def to_head(x: jax.Array, head: Weight) -> Weight:
        stored = "vd" if head.transposed else "dv"
        gradient = product(f"...v,...d->{stored}", g, x)
        return Weight(gradient.astype(head.values.dtype), head.transposed)

    whole = _side_by_side(heads)
    to_whole = product(f"...v,{'vd' if whole.transposed else 'dv'}->...d", g, whole.values)
    ends = np.cumsum([x.shape[-1] for x in inputs[:-1]]).tolist()
    parts = jnp.split(to_whole, ends, axis=-1)
    to_inputs = tuple(part.astype(x.dtype) for part, x in zip(parts, inputs, strict=True))
    return to_inputs, tuple(map(to_head, inputs, heads))


summed_logits.defvjp(_summed_logits, _summed_logits_backward)


@jax.custom_vjp
def soft_cross_entropy(logits: jax.Array, target_probs: jax.Array) -> jax.Array:
    """Return -sum p log softmax(logits), float32 [..., V], [..., V] -> [...].

    target_probs gets no gradient. The backward pass recomputes softmax - p from the logits and
    their logsumexp. So nothing of size V is kept besides the two arguments, which are most of the
    memory of training over several draft steps.
    """
    return _soft_cross_entropy(logits, target_probs)[0]


def _soft_cross_entropy(
    logits: jax.Array, target_probs: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jnp.sum(target_probs * logits, axis=-1), (logits, target_probs, total)


def _soft_cross_entropy_backward(
    kept: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, None]:
    logits, target_probs, total = kept
    return (jnp.exp(logits - total[..., None]) - target_probs) * g[..., None], None


soft_cross_entropy.defvjp(_soft_cross_entropy, _soft_cross_entropy_backward)


class DraftScores(NamedTuple):
    """How well distributions q of drafts fit the target's p, one row each.

    cross_entropy: float32 [...], -sum p log q
    overlap:       float32 [...], sum min(p, q)
    choice:        int32 [...], the likeliest draft
    """

    cross_entropy: jax.Array
    overlap: jax.Array
    choice: jax.Array


@jax.custom_vjp
def draft_scores(logits: jax.Array, target_probs: jax.Array) -> DraftScores:
    """Score q = softmax(logits) against p, both float32 [..., V]; p may sum to less than 1.

    target_probs gets no gradient. As in soft_cross_entropy, nothing of size V is kept besides the
    two arguments.
    """
    return _draft_scores(logits, target_probs)[0]


def _draft_scores(
    logits: jax.Array, target_probs: jax.Array
) -> tuple[DraftScores, tuple[jax.Array, ...]]:
    choice, total = choice_and_total(logits)
    q = jnp.exp(logits - total[..., None])
    scores = DraftScores(
        -jnp.sum(target_probs * (logits - total[..., None]), axis=-1),
        jnp.sum(jnp.minimum(target_probs, q), axis=-1),
        choice,
    )
    mass = jnp.sum(target_probs, axis=-1)
    below = jnp.sum(jnp.where(q < target_probs, q, 0.0), axis=-1)  # where more q is more overlap
    return scores, (logits, target_probs, total, mass, below)


def _draft_scores_backward(kept: tuple[jax.Array, ...], g: DraftScores) -> tuple[jax.Array, None]:
    logits, target_probs, total, mass, below = kept
    q = jnp.exp(logits - total[..., None])
    of_cross_entropy = mass[..., None] * q - target_probs
    of_overlap = jnp.where(q < target_probs, q, 0.0) - below[..., None] * q
    to_logits = g.cross_entropy[..., None] * of_cross_entropy
    return to_logits + g.overlap[..., None] * of_overlap, None


draft_scores.defvjp(_draft_scores, _draft_scores_backward)


def decayed_sum(step_losses: Sequence[jax.Array], decay: float) -> jax.Array:
    """Return sum_i decay^i loss_i (EAGLE-3's 0.8^i).

    A later draft step counts only where the earlier ones were accepted.
    """
    total = jnp.zeros((), jnp.float32)
    for i, loss in enumerate(step_losses):
        total = total + decay**i * loss
    return total


def smooth_l1(features: jax.Array, target: jax.Array, beta: float = 1.0) -> jax.Array:
    """Return the mean smooth L1 over the last axis: [..., D], [..., D] -> float32 [...].

    It is a Huber loss of width beta, divided by beta: EAGLE-1's regression of hidden states.
    """
    error = jnp.abs(features.astype(jnp.float32) - target.astype(jnp.float32))
    return jnp.mean(
        jnp.where(error < beta, 0.5 * error * error / beta, error - 0.5 * beta), axis=-1
    )


def binary_cross_entropy(logit: jax.Array, chance: jax.Array) -> jax.Array:
    """Return the cross entropy float32 [...] of sigmoid(logit) with a chance, both [...].

    chance gets no gradient from callers that stop it.
    """
    logit = logit.astype(jnp.float32)
    return jax.nn.softplus(logit) - chance * logit


def accepted_prefix(matches: Sequence[jax.Array], counted: jax.Array) -> jax.Array:
    """Count the counted rows that accept draft i and all before it, float32 [steps].

    matches: one bool array a step, whether that step's greedy draft is the target's
    counted: bool, rows whose teacher-forced tokens are what a draft that is right feeds itself

    Divided by the counted rows, 1 + the sum of the first K entries estimates the mean acceptance
    length at temperature 0.
    """
    alive = counted
    numbers = []
    for match in matches:
        alive = alive & match
        numbers.append(jnp.sum(alive.astype(jnp.float32)))
    return jnp.stack(numbers)
