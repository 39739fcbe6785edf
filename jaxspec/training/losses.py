"""Losses and acceptance estimates of draft training: pure functions over logits, float32, no model in sight."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp


@jax.custom_vjp
def soft_cross_entropy(logits: jax.Array, target_probs: jax.Array) -> jax.Array:
    """-sum p log softmax(logits): float32 [..., V], [..., V] -> [...]. target_probs gets no gradient.

    The backward pass recomputes softmax - p from the logits and their logsumexp: nothing of size V is kept besides the
    two arguments, which is most of the memory of training over several draft steps.
    """
    return _soft_cross_entropy(logits, target_probs)[0]


def _soft_cross_entropy(logits: jax.Array, target_probs: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    total = jax.nn.logsumexp(logits, axis=-1)
    return total - jnp.sum(target_probs * logits, axis=-1), (logits, target_probs, total)


def _soft_cross_entropy_backward(kept: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, None]:
    logits, target_probs, total = kept
    return (jnp.exp(logits - total[..., None]) - target_probs) * g[..., None], None


soft_cross_entropy.defvjp(_soft_cross_entropy, _soft_cross_entropy_backward)


def entropy(probs: jax.Array) -> jax.Array:
    """-sum p log p over the last axis, 0 log 0 = 0."""
    return -jnp.sum(jax.scipy.special.xlogy(probs, probs), axis=-1)


def kl_divergence(logits: jax.Array, target_probs: jax.Array) -> jax.Array:
    """KL(p || softmax(logits)), speculators' "kl_div": the cross entropy less what no draft can change."""
    return soft_cross_entropy(logits, target_probs) - entropy(target_probs)


def masked_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean of values where mask; 0 where nothing is left."""
    weight = mask.astype(values.dtype)
    return jnp.sum(values * weight) / jnp.maximum(jnp.sum(weight), 1.0)


def decayed_sum(step_losses: Sequence[jax.Array], decay: float) -> jax.Array:
    """sum_i decay^i loss_i: a later draft step counts only where the earlier ones were accepted (EAGLE-3's 0.8^i)."""
    total = jnp.zeros((), jnp.float32)
    for i, loss in enumerate(step_losses):
        total = total + decay**i * loss
    return total


def accepted_prefix(matches: Sequence[jax.Array], counted: jax.Array) -> jax.Array:
    """Share of the counted rows that accept draft i and all before it, float32 [steps].

    matches: one bool array a step, whether that step's greedy draft is the target's; counted: bool, rows whose
    teacher-forced tokens are what the draft would have fed itself had it been right. 1 + the sum of the first K entries
    estimates the mean acceptance length at temperature 0.
    """
    alive = counted
    shares = []
    for match in matches:
        alive = alive & match
        shares.append(jnp.sum(alive) / jnp.maximum(jnp.sum(counted), 1))
    return jnp.stack(shares).astype(jnp.float32)
