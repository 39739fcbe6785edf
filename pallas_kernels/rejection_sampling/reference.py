"""The jnp specification of rejection sampling: the drafts that survive, and the token after them.

p is the target, q the draft. Every rule reduces to two results for each request: num_accepted
(leading drafts that are kept) and one more token, drawn at target row num_accepted. The output is
those drafts and that token.

Sources: Leviathan et al. 2211.17192 and Chen et al. 2302.01318 (probabilistic), Sun et al.
2403.10444 (block), vLLM (synthetic).

Rows that are cut over devices take 1 exchange if no request samples or the rule is synthetic, else
2: of the rows' scores, and of the token to draw. A draft with a vocabulary of its own takes 1 more,
because its ids lie on other devices than the target's: of the draft's row that the residual reads,
or of K rows for block verification. Block verification with draft logits exchanges its sums, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sampling.draft_scores import (
    DraftScores,
    in_vocabulary,
    score_drafts,
    score_rows_of_pieces,
)
from pallas_kernels.rejection_sampling.inputs import Inputs
from pallas_kernels.vocab_shards import VocabShards, first_highest


def rejection_sample(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.rejection_sampling.rejection_sample."""
    target_logits, draft_logits = inputs.target_logits, inputs.draft_logits
    draft_tokens, target_to_draft = inputs.draft_tokens, inputs.target_to_draft
    greedy, temperature, sampled = inputs.greedy, inputs.temperature, inputs.sampled
    shards, size = inputs.shards, target_logits.shape[2]
    uniforms, recover_noise = inputs.uniforms, inputs.recover_noise
    if isinstance(uniforms, Stream):
        uniforms = uniforms.uniforms(draft_tokens.shape[1])
    if isinstance(recover_noise, Stream):
        recover_noise = recover_noise.gumbel(size, shards=shards)
    if temperature is not None and sampled:
        divisor = jnp.where(greedy, 1.0, temperature)[:, None, None]
        target_logits = target_logits / divisor
        draft_logits = None if draft_logits is None else draft_logits / divisor
    target_logits = _without_nan(target_logits)
    if inputs.rule == "synthetic":
        assert uniforms is not None and inputs.acceptance_rates is not None
        num_accepted = count_leading(
            in_vocabulary(draft_tokens, shards.total(size)) & (uniforms < inputs.acceptance_rates)
        )
        row = _at_row(target_logits, num_accepted)
        if sampled:
            assert recover_noise is not None
            row = jnp.where(greedy[:, None], row, row + recover_noise)
        token = shards.argmax(row)
    elif not sampled:
        num_accepted, token = _match_target(shards.argmax(target_logits), draft_tokens)
    else:
        assert uniforms is not None and recover_noise is not None
        if shards.is_whole:
            num_accepted, token = _match_target(shards.argmax(target_logits), draft_tokens)
            draft_logits = None if draft_logits is None else _without_nan(draft_logits)
            scores = score_drafts(target_logits, draft_tokens, draft_logits, target_to_draft)
        else:
            draft_logits = None if draft_logits is None else _without_nan(draft_logits)
            target_tokens, scores = score_rows_of_pieces(
                target_logits, draft_tokens, draft_logits, target_to_draft, shards
            )
            num_accepted, token = _match_target(target_tokens, draft_tokens)
        draft = None
        if draft_logits is not None:
            draft = DraftRows(draft_logits, target_to_draft, shards)
        if inputs.rule == "block":
            draft = draft and draft.gathered()
            num_kept, log_joint = _block(target_logits, draft, uniforms, scores, shards)
        else:
            num_kept = count_leading(
                scores.valid & (scores.log_p > jnp.log(uniforms) + scores.log_q)
            )
            log_joint = jnp.zeros_like(scores.target_lse)
        residual = _residual(
            target_logits,
            draft_tokens,
            draft,
            scores,
            num_kept,
            _at_row(log_joint, num_kept),
            shards,
        )
        num_accepted = jnp.where(greedy, num_accepted, num_kept)
        drawn = _draw(residual, target_logits, num_kept, recover_noise, shards)
        token = jnp.where(greedy, token, drawn)
    return _emit(draft_tokens, num_accepted, token, inputs.active)


@dataclass(frozen=True)
class DraftRows:
    """The draft's logits, to be read at the target's ids that the device has.

    logits:          float32 [B, K, Vd], the own piece of each row unless `is_gathered`
    target_to_draft: int32 [V]; None where ids are equal, so that own pieces hold the same ids
    shards:          how the target's rows are cut, and the draft's
    is_gathered:     whether `logits` are whole rows
    """

    logits: jax.Array
    target_to_draft: jax.Array | None
    shards: VocabShards
    is_gathered: bool = False

    def gathered(self) -> DraftRows:
        """Return all rows whole, for a reader of several; as they are where ids are equal."""
        if self.shards.is_whole or self.target_to_draft is None:
            return self
        return replace(self, logits=self.shards.whole_rows(self.logits), is_gathered=True)

    def at_target(self, rows: jax.Array) -> jax.Array:
        """Return some of the logits, [..., Vd], at the target's ids [..., V].

        -inf where the draft has none. A gather: scatters are slow.
        """
        if self.target_to_draft is None:
            return rows
        if not self.is_gathered:
            rows = self.shards.whole_rows(rows)
        ids = self.shards.own(self.target_to_draft)
        gathered = jnp.take(rows, jnp.maximum(ids, 0), axis=-1, mode="clip")
        return jnp.where(ids >= 0, gathered, -jnp.inf)


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
    draft: DraftRows | None,
    uniforms: jax.Array,
    scores: DraftScores,
    shards: VocabShards,
) -> tuple[jax.Array, jax.Array]:
    """Return num_accepted [B] and log P_i [B, K+1] (2403.10444, algorithm 2).

    P_i = min(P_{i-1} p(d_i) / q(d_i), 1). The first i drafts are kept with probability
    h_i = Z_i / (Z_i + 1 - P_i), where Z_i = sum_x max(P_i p(x) - q(x), 0) at row i. h = P for the
    last valid draft, which nothing follows. The longest kept prefix wins.
    """
    K = uniforms.shape[1]
    log_ratio = jnp.where(scores.valid, scores.log_p - scores.log_q, 0.0)
    log_joint = [jnp.zeros_like(scores.target_lse[:, 0])]
    for i in range(K):
        log_joint.append(jnp.minimum(log_joint[-1] + log_ratio[:, i], 0.0))
    log_joint = jnp.stack(log_joint, axis=1)

    inner = log_joint[:, 1:K]  # P_1 .. P_{K-1}: another draft follows
    if draft is None:
        remaining = jnp.exp(inner) * -jnp.expm1(jnp.minimum(scores.log_p[:, 1:], 0.0))
    else:
        assert scores.draft_lse is not None
        log_p = target_logits[:, 1:K] - scores.target_lse[:, 1:K, None]
        log_q = draft.at_target(draft.logits[:, 1:]) - scores.draft_lse[:, 1:, None]
        exceeding = jnp.maximum(jnp.exp(inner[..., None] + log_p) - jnp.exp(log_q), 0.0)
        remaining = exceeding.sum(axis=-1)
        if K > 1:
            remaining = shards.add(remaining)
    denominator = remaining - jnp.expm1(inner)
    keep_inner = jnp.where(
        denominator > 0, remaining / jnp.where(denominator > 0, denominator, 1.0), 1.0
    )

    num_valid = count_leading(scores.valid)[:, None]
    length = jnp.arange(1, K + 1, dtype=jnp.int32)
    joint = jnp.exp(log_joint[:, 1:])
    keep = jnp.where(length == num_valid, joint, jnp.pad(keep_inner, ((0, 0), (0, 1)))[:, :K])
    kept = (length <= num_valid) & (uniforms < keep)  # strict: h = 0 is never kept, u = 0 included
    return jnp.max(jnp.where(kept, length, 0), axis=1, initial=0), log_joint


def _residual(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft: DraftRows | None,
    scores: DraftScores,
    num_accepted: jax.Array,
    log_joint: jax.Array,
    shards: VocabShards,
) -> jax.Array:
    """Return the unnormalised log of max(P p - q, 0) [B, V] at row num_accepted.

    log P = log_joint [B]. The row's plain target logits where no valid draft was rejected there (a
    bonus token or a placeholder), and where rounding leaves no mass (p equals q). A device that has
    a piece of the row does not know the mass, which _draw checks. In log space, because p - q
    cancels in float32.
    """
    row = _at_row(target_logits, num_accepted)
    K = draft_tokens.shape[1]
    if K == 0:
        return row
    # The bonus row verifies no draft; its values are not used.
    verified = jnp.minimum(num_accepted, K - 1)
    if draft is None:
        is_draft = shards.ids(row.shape[1]) == _at_row(draft_tokens, verified)[:, None]
        residual = jnp.where(is_draft, -jnp.inf, row)
    else:
        assert scores.draft_lse is not None
        log_p = row - _at_row(scores.target_lse, num_accepted)[:, None] + log_joint[:, None]
        log_q = (
            draft.at_target(_at_row(draft.logits, verified))
            - _at_row(scores.draft_lse, verified)[:, None]
        )
        exceeds = log_p > log_q
        gap = jnp.where(exceeds, log_q, -jnp.inf) - jnp.where(exceeds, log_p, 0.0)
        # log(1 - e^gap): expm1 keeps its digits where p is close to q, log1p(-exp(gap)) does not.
        residual = jnp.where(exceeds, log_p + jnp.log(-jnp.expm1(gap)), -jnp.inf)
    rejected = (num_accepted < K) & _at_row(scores.valid, verified)
    if shards.is_whole:
        rejected = rejected & (jnp.max(residual, axis=1) > -jnp.inf)
    return jnp.where(rejected[:, None], residual, row)


def _draw(
    residual: jax.Array,
    target_logits: jax.Array,
    num_accepted: jax.Array,
    noise: jax.Array,
    shards: VocabShards,
) -> jax.Array:
    """Draw a token from the residual [B, V]; from the plain row where no device has mass of it."""
    if shards.is_whole:
        return shards.argmax(residual + noise)
    row = _at_row(target_logits, num_accepted)
    drawn, plain = shards.gather((shards.highest(residual + noise), shards.highest(row + noise)))
    best, token = first_highest(*drawn)
    return jnp.where(best > -jnp.inf, token, first_highest(*plain)[1])


def _without_nan(logits: jax.Array) -> jax.Array:
    """Replace NaN by -inf and +inf by the largest float: argmax and log-sum-exp are defined."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, jnp.finfo(logits.dtype).max))


def count_leading(accepted: jax.Array) -> jax.Array:
    """Return the number of leading true entries of [B, K], int32 [B]."""
    return jnp.cumprod(accepted.astype(jnp.int32), axis=1).sum(axis=1, dtype=jnp.int32)


def _at_row(values: jax.Array, row: jax.Array) -> jax.Array:
    """Return values [B, R, ...] at row [B] of each request."""
    index = row.reshape(row.shape + (1,) * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1).squeeze(1)
