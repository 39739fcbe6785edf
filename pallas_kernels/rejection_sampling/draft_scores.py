"""How target and draft score the draft tokens: log-probabilities and normalisers of every row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import vocab_shards
from pallas_kernels.vocab_shards import VocabShards, at_index, exponential_sum, first_highest


class DraftScores(NamedTuple):
    """Scores of each draft token d, and the normalisers of p and q at any row.

    valid:      bool [B, K]; q can have drawn d. False for a placeholder, an id outside the
                vocabulary, and q(d) = 0
    log_p:      float32 [B, K], log p(d)
    log_q:      float32 [B, K], log q(d); 0 where not valid
    target_lse: float32 [B, K+1], log-sum-exp, finite even where a row is all -inf
    draft_lse:  float32 [B, K], likewise, or None
    """

    valid: jax.Array
    log_p: jax.Array
    log_q: jax.Array
    target_lse: jax.Array
    draft_lse: jax.Array | None


def score_drafts(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
) -> DraftScores:
    """Score the drafts [B, K] by whole rows of logits without NaN."""
    K = draft_tokens.shape[1]
    target_lse = _log_sum_exp(target_logits)
    valid = in_vocabulary(draft_tokens, target_logits.shape[-1])
    tokens = jnp.where(valid, draft_tokens, 0)
    log_p = at_index(target_logits[:, :K], tokens) - target_lse[:, :K]
    if draft_logits is None:
        return DraftScores(valid, log_p, jnp.zeros_like(log_p), target_lse, None)
    draft_lse = _log_sum_exp(draft_logits)
    if target_to_draft is not None:
        valid, tokens = _to_draft(valid, tokens, target_to_draft)
    return _with_q(valid, log_p, at_index(draft_logits, tokens), target_lse, draft_lse)


def score_rows_of_pieces(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
    shards: VocabShards,
) -> tuple[jax.Array, DraftScores]:
    """Return each target row's argmax, int32 [B, K+1], and the drafts' scores, in one exchange.

    target_logits, draft_logits: the own piece of each row.
    """
    K = draft_tokens.shape[1]
    valid = in_vocabulary(draft_tokens, shards.total(target_logits.shape[-1]))
    tokens = jnp.where(valid, draft_tokens, 0)
    target_at = shards.at_token(target_logits[:, :K], tokens)
    best, total = exponential_sum(target_logits)
    _, argmax = shards.highest(target_logits)
    draft = None
    if draft_logits is not None:
        if target_to_draft is not None:
            valid, tokens = _to_draft(valid, tokens, target_to_draft)
        draft = (shards.at_token(draft_logits, tokens), *exponential_sum(draft_logits))
    (best, total, argmax, target_at), draft = shards.gather(
        ((best, total, argmax, target_at), draft)
    )
    target_lse = _not_below(vocab_shards.log_sum_exp(best, total))
    log_p = jnp.max(target_at, axis=0) - target_lse[:, :K]
    if draft is None:
        scores = DraftScores(valid, log_p, jnp.zeros_like(log_p), target_lse, None)
    else:
        draft_at, draft_best, draft_total = draft
        draft_lse = _not_below(vocab_shards.log_sum_exp(draft_best, draft_total))
        scores = _with_q(valid, log_p, jnp.max(draft_at, axis=0), target_lse, draft_lse)
    return first_highest(best, argmax)[1], scores


def _to_draft(
    valid: jax.Array, tokens: jax.Array, target_to_draft: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return which of the target's tokens the draft has, and their ids there, 0 for the others."""
    tokens = jnp.take(target_to_draft, tokens, axis=0, mode="clip")
    valid = valid & (tokens >= 0)
    return valid, jnp.where(valid, tokens, 0)


def _with_q(
    valid: jax.Array,
    log_p: jax.Array,
    draft_at: jax.Array,
    target_lse: jax.Array,
    draft_lse: jax.Array,
) -> DraftScores:
    """Return the scores of drafts with these draft logits [B, K].

    A draft that q cannot have drawn has no ratio: rejecting it and sampling the plain target is
    unbiased.
    """
    log_q = draft_at - draft_lse
    valid = valid & (log_q > -jnp.inf)
    return DraftScores(valid, log_p, jnp.where(valid, log_q, 0.0), target_lse, draft_lse)


def in_vocabulary(tokens: jax.Array, vocab: int) -> jax.Array:
    """Return which tokens are ids of a vocabulary of this size."""
    return (tokens >= 0) & (tokens < vocab)


def _log_sum_exp(logits: jax.Array) -> jax.Array:
    return _not_below(jax.nn.logsumexp(logits, axis=-1))


def _not_below(lse: jax.Array) -> jax.Array:
    """Return 0 for the log-sum-exp of a row of -inf, so that -inf - 0 is no NaN."""
    return jnp.where(lse > -jnp.inf, lse, 0.0)
