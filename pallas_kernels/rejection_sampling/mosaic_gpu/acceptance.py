"""The number of leading drafts that are accepted, and what is left to draw after them.

`judge` writes `decided` int32 [B, DECIDED]: the number of accepted drafts, the mode in which the
next token is drawn, and that token if it is known.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.pieces import combine_maxima
from pallas_kernels.rejection_sampling.mosaic_gpu import shard_words
from pallas_kernels.rejection_sampling.mosaic_gpu.block_verification import longest_kept
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Arrays, Problem, Refs, launch
from pallas_kernels.rejection_sampling.mosaic_gpu.scores import count_leading, pick, score_drafts
from pallas_kernels.rejection_sampling.mosaic_gpu.streams import recover_key, uniform

ACCEPTED, MODE, TOKEN, DECIDED = 0, 1, 2, 4  # columns of `decided`, and how many it has
# Modes: nothing to draw, draw from the target's row, draw from the residual.
KNOWN, PLAIN, RESIDUAL = 0, 1, 2


def judge(problem: Problem, inputs: Arrays) -> dict[str, jax.Array]:
    """Return `decided`, and values at the row to draw from.

    target_lse, draft_lse, log_joint: float32 [B]. recover_key: uint32 [B, 2], the key of the
    token's noise, where that is a stream. All but `decided` are not written for greedy requests.
    """
    K = problem.K

    def body(refs: Refs, request: jax.Array) -> None:
        greedy = refs.greedy[request]

        def decide(num_accepted: jax.Array, mode: jax.Array, token: jax.Array) -> None:
            for column, value in ((ACCEPTED, num_accepted), (MODE, mode), (TOKEN, token)):
                refs.decided[request, column] = value

        @pl.when(greedy)
        def _() -> None:
            num_accepted, token = match_target(problem, refs, request)
            decide(num_accepted, jnp.int32(KNOWN), token)

        @pl.when(jnp.logical_not(greedy))
        def _() -> None:
            uniforms = [uniform(problem, refs, request, i) for i in range(K)]
            scores = score_drafts(problem, refs, request)
            if problem.rule == "block":
                num_kept = longest_kept(problem, refs, request, scores, uniforms)
            else:
                kept = [
                    scores.valid[i] & (scores.log_p[i] > jnp.log(uniforms[i]) + scores.log_q[i])
                    for i in range(K)
                ]
                num_kept = count_leading(kept)
            rejected = (num_kept < K) & pick(scores.valid, jnp.minimum(num_kept, K - 1))
            decide(num_kept, jnp.where(rejected, RESIDUAL, PLAIN), jnp.int32(0))
            refs.target_lse[request] = pick(scores.target_lse, num_kept)
            refs.draft_lse[request] = pick(scores.draft_lse, num_kept)  # unused for the bonus row
            refs.log_joint[request] = pick(scores.log_joint, num_kept)
            if problem.recover_stream is not None:
                refs.recover_key[request, 0], refs.recover_key[request, 1] = recover_key(
                    problem, refs, request
                )

    scalar = jax.ShapeDtypeStruct((problem.batch,), jnp.float32)
    decided = jax.ShapeDtypeStruct((problem.batch, DECIDED), jnp.int32)
    outputs = {"decided": decided, "target_lse": scalar, "draft_lse": scalar, "log_joint": scalar}
    if problem.recover_stream is not None:
        outputs["recover_key"] = jax.ShapeDtypeStruct((problem.batch, 2), jnp.uint32)
    return launch("judge", body, problem.batch, inputs, outputs)


def match_target(problem: Problem, refs: Refs, request: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return num_accepted and the token after: drafts are kept while they equal a row's argmax."""
    if problem.shards.is_whole:
        rows, count = problem.rows, problem.sweep.count
        found = combine_maxima(refs.best, refs.index, request * rows, rows, count)
        maxima = [index for _, index in found]
    else:
        maxima = [shard_words.row_argmax(problem, refs, request, i) for i in range(problem.rows)]
    drafts = [refs.tokens[request * problem.K + i] for i in range(problem.K)]
    num_accepted = count_leading(
        [draft == token for draft, token in zip(drafts, maxima, strict=False)]
    )
    return num_accepted, pick(maxima, num_accepted)


def decision(problem: Problem, refs: Refs, request: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return num_accepted and the mode of the draw.

    As judged, or by rate alone (synthetic), or 0 where nothing was drafted.
    """
    if refs.decided is not None:
        num_accepted, mode = refs.decided[request, ACCEPTED], refs.decided[request, MODE]
        return num_accepted, jnp.where(refs.active[request], mode, KNOWN)
    kept = []
    for i in range(problem.K):
        draft = refs.tokens[request * problem.K + i]
        inside = (draft >= 0) & (draft < problem.vocab)
        kept.append(inside & (uniform(problem, refs, request, i) < refs.rates[i]))
    return count_leading(kept), jnp.where(refs.active[request], PLAIN, KNOWN)
