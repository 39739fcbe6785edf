"""Block verification (Sun et al., arXiv:2403.10444, algorithm 2): the prefix of drafts to keep.

The first i drafts are kept with a probability that depends on P_i, their joint ratio of target and
draft, and on the residual mass of the row after them. With one-hot drafts that mass has a closed
form; with draft logits it takes two launches: `prefixes`, then `mass`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.pieces import load_lanes, used_lanes
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import (
    Arrays,
    Problem,
    Refs,
    launch,
    partials,
)
from pallas_kernels.rejection_sampling.mosaic_gpu.residual import draft_at_target, expm1
from pallas_kernels.rejection_sampling.mosaic_gpu.scores import Scores, count_leading, score_drafts
from pallas_kernels.rejection_sampling.mosaic_gpu.temperature import divisor_of, scaled


def prefixes(problem: Problem, inputs: Arrays) -> dict[str, jax.Array]:
    """Return target_lse, draft_lse, log_joint float32 [B (K-1)] of the inner rows 1 .. K-1.

    Their residual mass is made from these.
    """
    inner = problem.K - 1

    def body(refs: Refs, request: jax.Array) -> None:
        @pl.when(refs.active[request] & jnp.logical_not(refs.greedy[request]))
        def _() -> None:
            scores = score_drafts(problem, refs, request)
            for i in range(inner):
                refs.target_lse[request * inner + i] = scores.target_lse[i + 1]
                refs.draft_lse[request * inner + i] = scores.draft_lse[i + 1]
                refs.log_joint[request * inner + i] = scores.log_joint[i + 1]

    scalar = jax.ShapeDtypeStruct((problem.batch * inner,), jnp.float32)
    return launch(
        "prefixes",
        body,
        problem.batch,
        inputs,
        {"target_lse": scalar, "draft_lse": scalar, "log_joint": scalar},
    )


def mass(problem: Problem, inputs: Arrays) -> dict[str, jax.Array]:
    """Return mass [B (K-1), LANES]: sum over a piece of max(P_i p - q, 0) at the inner rows."""
    pieces, inner = problem.draw, problem.K - 1

    def body(refs: Refs, block: jax.Array) -> None:
        row, piece = block // pieces.count, block % pieces.count
        request, i = row // inner, row % inner + 1

        @pl.when(refs.active[request] & jnp.logical_not(refs.greedy[request]))
        def _() -> None:
            divisor = divisor_of(refs, request)
            log_p = (
                scaled(pieces.load(refs.target.at[request * problem.rows + i], piece), divisor)
                - refs.target_lse[row]
            )
            log_q = (
                draft_at_target(problem, refs, request * problem.K + i, piece, divisor)
                - refs.draft_lse[row]
            )
            exceeding = jnp.maximum(jnp.exp(refs.log_joint[row] + log_p) - jnp.exp(log_q), 0.0)
            fresh = pieces.indices(piece) >= piece * pieces.size
            refs.mass[row, piece] = jnp.sum(jnp.where(fresh, exceeding, 0.0))

    rows = problem.batch * inner
    return launch(
        "mass",
        body,
        rows * pieces.count,
        inputs,
        {"mass": partials(rows, jnp.float32)[0]},
        approximate=True,
    )


def exchange_mass(problem: Problem, inputs: Arrays) -> Arrays:
    """Return the inputs with the `mass` of all devices, float32 [B (K-1)]; unchanged if whole."""
    mass = inputs["mass"]
    if problem.shards.is_whole or mass is None:
        return inputs
    own = jnp.sum(mass[:, : problem.draw.count], axis=1)
    return inputs | {"mass": problem.shards.add(own)}


def longest_kept(
    problem: Problem, refs: Refs, request: jax.Array, scores: Scores, uniforms: list[jax.Array]
) -> jax.Array:
    """Return the number of drafts that block verification keeps; see reference._block."""
    K = problem.K
    num_valid = count_leading(scores.valid)
    num_kept = jnp.int32(0)
    for length in range(1, K + 1):
        log_joint = scores.log_joint[length]
        keep = jnp.exp(log_joint)
        if length < K:
            if refs.mass is None:
                remaining = keep * -expm1(jnp.minimum(scores.log_p[length], 0.0))
            elif not problem.shards.is_whole:
                remaining = refs.mass[request * (K - 1) + length - 1]
            else:
                remaining = jnp.sum(
                    jnp.where(
                        used_lanes(problem.draw.count),
                        load_lanes(refs.mass, request * (K - 1) + length - 1),
                        0.0,
                    )
                )
            denominator = remaining - expm1(log_joint)
            inner = jnp.where(
                denominator > 0, remaining / jnp.where(denominator > 0, denominator, 1.0), 1.0
            )
            keep = jnp.where(num_valid == length, keep, inner)
        num_kept = jnp.where(
            (length <= num_valid) & (uniforms[length - 1] < keep), length, num_kept
        )
    return num_kept
