"""Scores of a sampled request: p and q of each of its drafts, as scalars in registers."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.rejection_sampling.mosaic_gpu import shard_words
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Problem, Refs
from pallas_kernels.rejection_sampling.mosaic_gpu.row_reductions import combine_sum, load_sums
from pallas_kernels.rejection_sampling.mosaic_gpu.temperature import divisor_of, scaled


@dataclass(frozen=True)
class Scores:
    """Scalars for each draft of a request; see reference.DraftScores.

    log_joint: log P_i of K+1 prefixes (block), else zeros.
    """

    valid: list[jax.Array]
    log_p: list[jax.Array]
    log_q: list[jax.Array]
    target_lse: list[jax.Array]
    draft_lse: list[jax.Array]
    log_joint: list[jax.Array]


def score_drafts(problem: Problem, refs: Refs, request: jax.Array) -> Scores:
    K, vocab, whole = problem.K, problem.vocab, problem.shards.is_whole
    divisor = divisor_of(refs, request)
    valid, logits, draft_logits = [], [], []
    for i in range(K):  # dependent reads first, of all drafts at once: each waits for memory
        draft = refs.tokens[request * K + i]
        inside = (draft >= 0) & (draft < vocab)
        draft = jnp.where(inside, draft, 0)
        logits.append(
            scaled(refs.target[request * problem.rows + i, draft], divisor)
            if whole
            else shard_words.target_at_draft(problem, refs, request, i)
        )
        if problem.draft_sweep is not None:
            own = draft if refs.to_draft is None else refs.to_draft[draft]
            inside = inside & (own >= 0)
            if whole:
                own = jnp.minimum(jnp.maximum(own, 0), problem.draft_sweep.vocab - 1)
                draft_logits.append(scaled(refs.draft[request * K + i, own], divisor))
            else:
                draft_logits.append(shard_words.draft_at_draft(problem, refs, request, i))
        valid.append(inside)
    target_sums, draft_sums = [], []
    if whole:
        target_sums = load_sums(refs.best, refs.sum, request * problem.rows, problem.rows)
        if problem.draft_sweep is not None:
            draft_sums = load_sums(refs.draft_best, refs.draft_sum, request * K, K)
        count = problem.sweep.count
        target_lse = [combine_sum(best, total, count, divisor) for best, total in target_sums]
    else:
        target_lse = [
            shard_words.target_log_sum_exp(problem, refs, request, i, divisor) for i in range(K + 1)
        ]
    log_p = [x - lse for x, lse in zip(logits, target_lse, strict=False)]
    log_q, draft_lse = [jnp.float32(0.0)] * K, [jnp.float32(0.0)] * K
    if problem.draft_sweep is not None:
        if whole:
            count = problem.draft_sweep.count
            draft_lse = [combine_sum(best, total, count, divisor) for best, total in draft_sums]
        else:
            draft_lse = [
                shard_words.draft_log_sum_exp(problem, refs, request, i, divisor) for i in range(K)
            ]
        log_q = [x - lse for x, lse in zip(draft_logits, draft_lse, strict=True)]
        valid = [v & (q > -jnp.inf) for v, q in zip(valid, log_q, strict=True)]
        log_q = [jnp.where(v, q, 0.0) for v, q in zip(valid, log_q, strict=True)]
    log_joint = [jnp.float32(0.0)] * (K + 1)
    if problem.rule == "block":
        for i in range(K):
            log_joint[i + 1] = jnp.minimum(
                log_joint[i] + jnp.where(valid[i], log_p[i] - log_q[i], 0.0), 0.0
            )
    return Scores(valid, log_p, log_q, target_lse, draft_lse, log_joint)


def count_leading(accepted: list[jax.Array]) -> jax.Array:
    """Return the number of leading flags that are set."""
    count, running = jnp.int32(0), jnp.bool_(True)
    for flag in accepted:
        running = running & flag
        count = count + running.astype(jnp.int32)
    return count


def pick(values: list[jax.Array], index: jax.Array) -> jax.Array:
    """Return values[index] of scalars in registers."""
    picked = values[0]
    for i, value in enumerate(values[1:], 1):
        picked = jnp.where(index == i, value, picked)
    return picked
