"""The jnp specification of rejection sampling: the drafts that survive, and the token after them.

p is the target, q the draft. Every rule reduces to two results for each request: num_accepted
(leading drafts that are kept) and one more token, drawn at target row num_accepted. The output is
those drafts and that token.

Sources: Leviathan et al. 2211.17192 and Chen et al. 2302.01318 (probabilistic), Sun et al.
2403.10444 (block), vLLM (synthetic).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sampling.inputs import Inputs


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


def rejection_sample(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.rejection_sampling.rejection_sample."""
    target_logits, draft_logits = inputs.target_logits, inputs.draft_logits
    draft_tokens, target_to_draft = inputs.draft_tokens, inputs.target_to_draft
    greedy, temperature, sampled = inputs.greedy, inputs.temperature, inputs.sampled
    uniforms, recover_noise = inputs.uniforms, inputs.recover_noise
    if isinstance(uniforms, Stream):
        uniforms = uniforms.uniforms(draft_tokens.shape[1])
    if isinstance(recover_noise, Stream):
        recover_noise = recover_noise.gumbel(target_logits.shape[2])
    if temperature is not None and sampled:
        divisor = jnp.where(greedy, 1.0, temperature)[:, None, None]
        target_logits = target_logits / divisor
        draft_logits = None if draft_logits is None else draft_logits / divisor
    target_logits = _without_nan(target_logits)
    if inputs.rule == "synthetic":
        assert uniforms is not None and inputs.acceptance_rates is not None
        num_accepted = count_leading(
            _in_vocabulary(draft_tokens, target_logits) & (uniforms < inputs.acceptance_rates)
        )
        row = _at_row(target_logits, num_accepted)
        token = _argmax(row)
        if sampled:
            assert recover_noise is not None
            token = _sample(row, recover_noise, greedy)
    else:
        num_accepted, token = _match_target(_argmax(target_logits), draft_tokens)
        if sampled:
            assert uniforms is not None and recover_noise is not None
            draft_logits = None if draft_logits is None else _without_nan(draft_logits)
            scores = _score_drafts(target_logits, draft_tokens, draft_logits, target_to_draft)
            if inputs.rule == "block":
                num_kept, log_joint = _block(
                    target_logits, draft_logits, target_to_draft, uniforms, scores
                )
            else:
                num_kept = count_leading(
                    scores.valid & (scores.log_p > jnp.log(uniforms) + scores.log_q)
                )
                log_joint = jnp.zeros_like(scores.target_lse)
            residual = _residual(
                target_logits,
                draft_tokens,
                draft_logits,
                target_to_draft,
                scores,
                num_kept,
                _at_row(log_joint, num_kept),
            )
            num_accepted = jnp.where(greedy, num_accepted, num_kept)
            token = jnp.where(greedy, token, _argmax(residual + recover_noise))
    return _emit(draft_tokens, num_accepted, token, inputs.active)


def _emit(
    draft_tokens: jax.Array, num_accepted: jax.Array, token: jax.Array, active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return output_tokens [B, K+1] and num_sampled [B].

    The output is the accepted drafts [B, K], then token [B], then -1.
    """
    index = jnp.arange(draft_tokens.shape[1] + 1, dtype=jnp.int32)
    drafts = jnp.pad(draft_tokens, ((0, 0), (0, 1)), constant_values=-1)
    last = num_accepted[:, None]
    tokens = jnp.where(index < last, drafts, jnp.where(index == last, token[:, None], -1))
    return jnp.where(active[:, None], tokens, -1), jnp.where(active, num_accepted + 1, 0)


def _match_target(target_tokens: jax.Array, draft_tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keep the drafts that equal the target's own tokens [B, K+1], then emit the next of those."""
    num_accepted = count_leading(target_tokens[:, :-1] == draft_tokens)
    return num_accepted, _at_row(target_tokens, num_accepted)


def _block(
    target_logits: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
    uniforms: jax.Array,
    scores: DraftScores,
) -> tuple[jax.Array, jax.Array]:
    """Return num_accepted [B] and log P_i [B, K+1] (2403.10444, algorithm 2).

    P_i = min(P_{i-1} p(d_i) / q(d_i), 1). The first i drafts are kept with probability
    h_i = Z_i / (Z_i + 1 - P_i), where Z_i = sum_x max(P_i p(x) - q(x), 0) at row i. h = P for the
    last valid draft, which nothing follows. The longest kept prefix wins.
    """
    num_drafts = uniforms.shape[1]
    log_ratio = jnp.where(scores.valid, scores.log_p - scores.log_q, 0.0)
    log_joint = [jnp.zeros_like(scores.target_lse[:, 0])]
    for i in range(num_drafts):
        log_joint.append(jnp.minimum(log_joint[-1] + log_ratio[:, i], 0.0))
    log_joint = jnp.stack(log_joint, axis=1)

    inner = log_joint[:, 1:num_drafts]  # P_1 .. P_{K-1}: another draft follows
    if draft_logits is None:
        remaining = jnp.exp(inner) * -jnp.expm1(jnp.minimum(scores.log_p[:, 1:], 0.0))
    else:
        assert scores.draft_lse is not None
        log_p = target_logits[:, 1:num_drafts] - scores.target_lse[:, 1:num_drafts, None]
        log_q = (
            _to_target_vocabulary(draft_logits[:, 1:], target_to_draft)
            - scores.draft_lse[:, 1:, None]
        )
        remaining = jnp.maximum(jnp.exp(inner[..., None] + log_p) - jnp.exp(log_q), 0.0).sum(
            axis=-1
        )
    denominator = remaining - jnp.expm1(inner)
    keep_inner = jnp.where(
        denominator > 0, remaining / jnp.where(denominator > 0, denominator, 1.0), 1.0
    )

    num_valid = count_leading(scores.valid)[:, None]
    length = jnp.arange(1, num_drafts + 1, dtype=jnp.int32)
    joint = jnp.exp(log_joint[:, 1:])
    keep = jnp.where(
        length == num_valid, joint, jnp.pad(keep_inner, ((0, 0), (0, 1)))[:, :num_drafts]
    )
    kept = (length <= num_valid) & (uniforms < keep)  # strict: h = 0 is never kept, u = 0 included
    return jnp.max(jnp.where(kept, length, 0), axis=1, initial=0), log_joint


def _residual(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
    scores: DraftScores,
    num_accepted: jax.Array,
    log_joint: jax.Array,
) -> jax.Array:
    """Return the unnormalised log of max(P p - q, 0) [B, V] at row num_accepted.

    log P = log_joint [B]. The row's plain target logits where no valid draft was rejected there (a
    bonus token or a placeholder), and where rounding leaves no mass (p equals q). In log space,
    because p - q cancels in float32.
    """
    row = _at_row(target_logits, num_accepted)
    num_drafts = draft_tokens.shape[1]
    if num_drafts == 0:
        return row
    # The bonus row verifies no draft; its values are not used.
    verified = jnp.minimum(num_accepted, num_drafts - 1)
    if draft_logits is None:
        is_draft = (
            jnp.arange(row.shape[1], dtype=jnp.int32) == _at_row(draft_tokens, verified)[:, None]
        )
        residual = jnp.where(is_draft, -jnp.inf, row)
    else:
        assert scores.draft_lse is not None
        log_p = row - _at_row(scores.target_lse, num_accepted)[:, None] + log_joint[:, None]
        log_q = (
            _to_target_vocabulary(_at_row(draft_logits, verified), target_to_draft)
            - _at_row(scores.draft_lse, verified)[:, None]
        )
        exceeds = log_p > log_q
        gap = jnp.where(exceeds, log_q, -jnp.inf) - jnp.where(exceeds, log_p, 0.0)
        # log(1 - e^gap): expm1 keeps its digits where p is close to q, log1p(-exp(gap)) does not.
        residual = jnp.where(exceeds, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)
    rejected = (num_accepted < num_drafts) & _at_row(scores.valid, verified)
    has_mass = jnp.max(residual, axis=1) > -jnp.inf
    return jnp.where((rejected & has_mass)[:, None], residual, row)


def _score_drafts(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
) -> DraftScores:
    num_drafts = draft_tokens.shape[1]
    target_lse = _log_sum_exp(target_logits)
    valid = _in_vocabulary(draft_tokens, target_logits)
    tokens = jnp.where(valid, draft_tokens, 0)
    log_p = _at_token(target_logits[:, :num_drafts], tokens) - target_lse[:, :num_drafts]
    if draft_logits is None:
        return DraftScores(valid, log_p, jnp.zeros_like(log_p), target_lse, None)
    draft_lse = _log_sum_exp(draft_logits)
    if target_to_draft is not None:
        tokens = jnp.take(target_to_draft, tokens, axis=0, mode="clip")
        valid = valid & (tokens >= 0)
        tokens = jnp.where(valid, tokens, 0)
    log_q = _at_token(draft_logits, tokens) - draft_lse
    # A draft that q cannot have drawn has no ratio: rejecting it and sampling the plain target is
    # unbiased.
    valid = valid & (log_q > -jnp.inf)
    return DraftScores(valid, log_p, jnp.where(valid, log_q, 0.0), target_lse, draft_lse)


def _in_vocabulary(tokens: jax.Array, target_logits: jax.Array) -> jax.Array:
    return (tokens >= 0) & (tokens < target_logits.shape[-1])


def _to_target_vocabulary(draft_logits: jax.Array, target_to_draft: jax.Array | None) -> jax.Array:
    """Return draft logits [..., Vd] at the target's ids [..., V], -inf where the draft has none.

    A gather: scatters are slow.
    """
    if target_to_draft is None:
        return draft_logits
    gathered = jnp.take(draft_logits, jnp.maximum(target_to_draft, 0), axis=-1, mode="clip")
    return jnp.where(target_to_draft >= 0, gathered, -jnp.inf)


def _without_nan(logits: jax.Array) -> jax.Array:
    """Replace NaN by -inf and +inf by the largest float: argmax and log-sum-exp are defined."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, jnp.finfo(logits.dtype).max))


def _log_sum_exp(logits: jax.Array) -> jax.Array:
    """Return the log-sum-exp of the last axis; 0 for a row of -inf, so that -inf - 0 is no NaN."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(lse > -jnp.inf, lse, 0.0)


def _sample(logits: jax.Array, noise: jax.Array, greedy: jax.Array) -> jax.Array:
    """Return the Gumbel-max of the last axis of [B, ..., V]; the argmax for greedy rows [B]."""
    greedy = greedy.reshape(greedy.shape + (1,) * (logits.ndim - 2))
    return jnp.where(greedy, _argmax(logits), _argmax(logits + noise))


def _argmax(scores: jax.Array) -> jax.Array:
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def count_leading(accepted: jax.Array) -> jax.Array:
    """Return the number of leading true entries of [B, K], int32 [B]."""
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _at_row(values: jax.Array, row: jax.Array) -> jax.Array:
    """Return values [B, R, ...] at row [B] of each request."""
    index = row.reshape(row.shape + (1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1).squeeze(1)


def _at_token(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(logits, tokens[..., None], axis=-1).squeeze(-1)
