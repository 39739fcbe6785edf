"""The acceptance that theory expects of each rejection rule along the drafted tokens.

It follows from the target's distributions p and the draft's q. Entry i is the probability that a
round accepts drafts 0..i, given its context and the drafts d_0..d_{i-1}. The last draft and all
verification noise are averaged out where a closed form exists. The mean over rounds is the
per-position acceptance.

probabilistic (Leviathan 2211.17192)
    prod_{j<i} min(1, p_j(d_j) / q_j(d_j)) * sum_x min(p_i(x), q_i(x))
strict
    the same product with a_j(d_j) / q_j(d_j), times sum_x a_i(x). The probability that two
    Gumbel-max draws from p and q with common noise are both x is
    a(x) = 1 / sum_y max(p(y)/p(x), q(y)/q(x)).
block (2403.10444, algorithm 2, which defines h)
    1 - prod_{j>=i} (1 - h_j) over all drafts of the round

Greedy drafts are one-hot: min(p, q) and a become p(d), and the first two rules agree.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax


@struct.dataclass
class Expected:
    """Probabilities that drafts 0..i are all accepted, float32 [batch, K] for each rule.

    They are 0 past a round's last draft. given_drafts is probabilistic's without averaging over the
    last draft. It has the same mean, and block is compared with it draft by draft.
    """

    strict: jax.Array
    probabilistic: jax.Array
    given_drafts: jax.Array
    block: jax.Array


def expected_acceptance(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    draft_to_target: jax.Array | None,
    temperature: jax.Array,
) -> Expected:
    """Return the three rules' expectations of rounds whose drafts were drawn from q.

    target_logits:   float32 [batch, K+1, vocab] along the drafts
    draft_tokens:    int32 [batch, K], target ids, -1 past a round's last draft
    draft_logits:    float32 [batch, K, draft_vocab], or None for greedy drafts, the argmax of q
    draft_to_target: int32 [draft_vocab], None where the ids are the target's
    temperature:     float32 [batch], above 0, by which both logits are divided
    """
    K = draft_tokens.shape[1]
    valid = draft_tokens >= 0
    tokens = jnp.maximum(draft_tokens, 0)
    log_p_all = jax.nn.log_softmax(target_logits[:, :K] / temperature[:, None, None], axis=-1)
    log_p_draft = jnp.take_along_axis(log_p_all, tokens[..., None], axis=-1)[..., 0]
    q_draft = None
    if draft_logits is None:
        p = jnp.where(valid, jnp.exp(log_p_draft), 0.0)
        last = ratio = agreement_ratio = agreement = p
        outside, p_known, q = 1.0 - p, p[..., None], jnp.where(valid, 1.0, 0.0)[..., None]
    else:
        log_q = jax.nn.log_softmax(draft_logits / temperature[:, None, None], axis=-1)
        log_p = log_p_all if draft_to_target is None else log_p_all[..., draft_to_target]
        p_known, q = jnp.exp(log_p), jnp.exp(log_q)
        outside = jnp.maximum(1.0 - p_known.sum(axis=-1), 0.0)
        is_draft = (
            jnp.arange(q.shape[-1]) if draft_to_target is None else draft_to_target
        ) == tokens[..., None]
        q_draft = jnp.where(is_draft, q, 0.0).sum(axis=-1)
        p_draft = jnp.where(valid, jnp.exp(log_p_draft), 0.0)
        ratio = jnp.where(
            q_draft > 0, jnp.minimum(p_draft / jnp.where(q_draft > 0, q_draft, 1.0), 1.0), 0.0
        )
        last = jnp.minimum(p_known, q).sum(axis=-1)
        agreement = gumbel_agreement(p_known, q, outside)
        agreement_ratio = jnp.where(
            valid, _agreement_over_q(log_p, log_q, outside, log_p_draft, q_draft), 0.0
        )
    return Expected(
        strict=jnp.where(valid, _before(agreement_ratio) * agreement, 0.0),
        probabilistic=jnp.where(valid, _before(ratio) * last, 0.0),
        given_drafts=jnp.where(valid, jnp.cumprod(ratio, axis=1), 0.0),
        block=_block(p_known, q, outside, log_p_draft, valid, q_draft),
    )


def gumbel_agreement(p: jax.Array, q: jax.Array, outside: jax.Array) -> jax.Array:
    """Return the probability [...] that Gumbel-max draws from p and q [..., vocab] agree.

    Both draws have common noise. outside [...] is the mass of p on tokens that q cannot draw.

    The sum is sum_x 1 / sum_y max(p(y)/p(x), q(y)/q(x)). With tokens in the order of p/q the
    maximum is its first term for every y from x on, and its second term before x. So one sort and
    two running sums replace the double sum.
    """
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), jnp.inf)
    _, p, q = lax.sort((ratio, p, q), dimension=-1, num_keys=1)
    above = jnp.flip(jnp.cumsum(jnp.flip(p, -1), axis=-1), -1) + outside[..., None]
    below = jnp.cumsum(q, axis=-1) - q
    denominator = above * q + below * p
    return jnp.where(
        denominator > 0, p * q / jnp.where(denominator > 0, denominator, 1.0), 0.0
    ).sum(axis=-1)


def _agreement_over_q(
    log_p: jax.Array,
    log_q: jax.Array,
    outside: jax.Array,
    log_p_draft: jax.Array,
    q_draft: jax.Array,
) -> jax.Array:
    """a(d) / q(d) for the drafts d [batch, K]: 1 / sum_y max(q(d) p(y)/p(d), q(y))."""
    scale = jnp.log(jnp.maximum(q_draft, jnp.finfo(jnp.float32).tiny)) - log_p_draft
    total = (
        jnp.exp(jnp.maximum(log_p + scale[..., None], log_q)).sum(axis=-1)
        + jnp.exp(scale) * outside
    )
    return jnp.where(q_draft > 0, 1.0 / total, 0.0)


def _before(factors: jax.Array) -> jax.Array:
    """prod_{j<i} factors_j of [batch, K]."""
    return jnp.pad(jnp.cumprod(factors, axis=1)[:, :-1], ((0, 0), (1, 0)), constant_values=1.0)


def _block(
    p: jax.Array,
    q: jax.Array,
    outside: jax.Array,
    log_p_draft: jax.Array,
    valid: jax.Array,
    q_draft: jax.Array | None,
) -> jax.Array:
    """Return 1 - prod_{j>=i} (1 - h_j) [batch, K].

    Greedy drafts have q_draft None and a q of 1 on their only token.
    """
    K = valid.shape[1]
    log_q_draft = (
        0.0 if q_draft is None else jnp.log(jnp.maximum(q_draft, jnp.finfo(jnp.float32).tiny))
    )
    log_ratio = jnp.where(valid, log_p_draft - log_q_draft, 0.0)
    P = jnp.zeros_like(log_ratio[:, 0])
    keep = []
    for i in range(K):
        P = jnp.minimum(P + log_ratio[:, i], 0.0)
        joint = jnp.exp(P)
        h = joint
        if i + 1 < K:
            Z = (
                jnp.maximum(joint[:, None] * p[:, i + 1] - q[:, i + 1], 0.0).sum(axis=-1)
                + joint * outside[:, i + 1]
            )
            denominator = Z + 1.0 - joint
            inner = jnp.where(
                denominator > 0, Z / jnp.where(denominator > 0, denominator, 1.0), 1.0
            )
            h = jnp.where(valid[:, i + 1], inner, joint)
        keep.append(jnp.where(valid[:, i], h, 0.0))
    none_longer = jnp.flip(jnp.cumprod(1.0 - jnp.flip(jnp.stack(keep, axis=1), 1), axis=1), 1)
    return jnp.where(valid, 1.0 - none_longer, 0.0)
