"""Losses and acceptance estimates of training: pure functions of logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.config import REFERENCE_OPS
from jaxspec.layers.params import Weight
from jaxspec.layers.products import vocab_logits


@jax.custom_vjp
def head_logits(x: jax.Array, lm_head: Weight) -> jax.Array:
    """Return float32 logits [..., V] of x [..., D].

    The same as layers.vocab_logits, but the backward pass takes the logits' gradient in x's dtype.
    In float32 its two products, the largest of a step, would run in float32 too.
    """
    return vocab_logits(x, lm_head, REFERENCE_OPS)


def _head_logits(x: jax.Array, lm_head: Weight) -> tuple[jax.Array, tuple[jax.Array, Weight]]:
    return head_logits(x, lm_head), (x, lm_head)


def _head_logits_backward(kept: tuple[jax.Array, Weight], g: jax.Array) -> tuple[jax.Array, Weight]:
    x, lm_head = kept
    g = g.astype(x.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    stored = "vd" if lm_head.transposed else "dv"
    to_x = product(f"...v,{stored}->...d", g, lm_head.values)
    to_head = product(f"...v,...d->{stored}", g, x).astype(lm_head.values.dtype)
    return to_x.astype(x.dtype), Weight(to_head, lm_head.transposed)


head_logits.defvjp(_head_logits, _head_logits_backward)


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
    total = jax.nn.logsumexp(logits, axis=-1)
    q = jnp.exp(logits - total[..., None])
    scores = DraftScores(
        -jnp.sum(target_probs * (logits - total[..., None]), axis=-1),
        jnp.sum(jnp.minimum(target_probs, q), axis=-1),
        jnp.argmax(logits, axis=-1).astype(jnp.int32),
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
