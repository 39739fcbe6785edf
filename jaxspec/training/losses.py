"""Losses and acceptance estimates of draft training: pure functions over logits and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxspec.layers.products import vocab_logits


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def head_logits(x: jax.Array, lm_head: jax.Array, tied: bool) -> jax.Array:
    """layers.vocab_logits for training: float32 logits [..., V] of x [..., D], with lm_head [D, V], or [V, D] if tied.

    The backward pass takes the logits' gradient in x's dtype: left in float32 its two products, the largest of a step, would
    run in float32 too.
    """
    return vocab_logits(x, lm_head, tied=tied)


def _head_logits(
    x: jax.Array, lm_head: jax.Array, tied: bool
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return vocab_logits(x, lm_head, tied=tied), (x, lm_head)


def _head_logits_backward(
    tied: bool, kept: tuple[jax.Array, jax.Array], g: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, lm_head = kept
    g = g.astype(x.dtype)
    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    to_x = product("...v,vd->...d" if tied else "...v,dv->...d", g, lm_head)
    to_head = product("...v,...d->vd" if tied else "...v,...d->dv", g, x)
    return to_x.astype(x.dtype), to_head.astype(lm_head.dtype)


head_logits.defvjp(_head_logits, _head_logits_backward)


@jax.custom_vjp
def soft_cross_entropy(logits: jax.Array, target_probs: jax.Array) -> jax.Array:
    """-sum p log softmax(logits): float32 [..., V], [..., V] -> [...]. target_probs gets no gradient.

    The backward pass recomputes softmax - p from the logits and their logsumexp: nothing of size V is kept besides the
    two arguments, which is most of the memory of training over several draft steps.
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


def decayed_sum(step_losses: Sequence[jax.Array], decay: float) -> jax.Array:
    """sum_i decay^i loss_i: a later draft step counts only where the earlier ones were accepted (EAGLE-3's 0.8^i)."""
    total = jnp.zeros((), jnp.float32)
    for i, loss in enumerate(step_losses):
        total = total + decay**i * loss
    return total


def smooth_l1(features: jax.Array, target: jax.Array, beta: float = 1.0) -> jax.Array:
    """Smooth L1 (Huber of width beta, divided by beta), the mean over the last axis: [..., D], [..., D] -> float32 [...].

    EAGLE-1's regression of the target's hidden state.
    """
    error = jnp.abs(features.astype(jnp.float32) - target.astype(jnp.float32))
    return jnp.mean(
        jnp.where(error < beta, 0.5 * error * error / beta, error - 0.5 * beta), axis=-1
    )


def accepted_prefix(matches: Sequence[jax.Array], counted: jax.Array) -> jax.Array:
    """How many of the counted rows accept draft i and all before it, float32 [steps].

    matches: one bool array a step, whether that step's greedy draft is the target's; counted: bool, rows whose
    teacher-forced tokens are what the draft would have fed itself had it been right. Divided by the counted rows, 1 + the sum
    of the first K entries estimates the mean acceptance length at temperature 0.
    """
    alive = counted
    numbers = []
    for match in matches:
        alive = alive & match
        numbers.append(jnp.sum(alive.astype(jnp.float32)))
    return jnp.stack(numbers)
