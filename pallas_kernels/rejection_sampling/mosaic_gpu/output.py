"""The last launch: the accepted drafts and the token after them, in the op's form."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.pieces import combine_maximum
from pallas_kernels.rejection_sampling.mosaic_gpu import shard_words
from pallas_kernels.rejection_sampling.mosaic_gpu.acceptance import (
    KNOWN,
    RESIDUAL,
    TOKEN,
    decision,
    match_target,
)
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Arrays, Problem, Refs, launch
from pallas_kernels.types import Ref


def match(problem: Problem, inputs: Arrays) -> tuple[jax.Array, jax.Array]:
    """Return the output of greedy requests from every row's partial argmax."""

    def body(refs: Refs, request: jax.Array) -> None:
        _store(problem, refs, request, *match_target(problem, refs, request))

    results = launch("match", body, problem.batch, inputs, _results(problem))
    return results["output"], results["num_sampled"]


def emit(problem: Problem, inputs: Arrays) -> tuple[jax.Array, jax.Array]:
    """Return the output from the pieces' winners.

    The residual's where it has mass, else the plain target's.
    """
    count = problem.draw.count

    def body(refs: Refs, request: jax.Array) -> None:
        def drawn(column: int, best_ref: Ref, index_ref: Ref) -> tuple[jax.Array, jax.Array]:
            if problem.shards.is_whole:
                return combine_maximum(best_ref, index_ref, request, count)
            return shard_words.winner(problem, refs, request, column)

        num_accepted, mode = decision(problem, refs, request)
        _, token = drawn(shard_words.WINNER, refs.best, refs.index)
        if refs.decided is not None:
            highest, residual = drawn(
                shard_words.RESIDUAL_WINNER, refs.residual_best, refs.residual_index
            )
            token = jnp.where((mode == RESIDUAL) & (highest > -jnp.inf), residual, token)
            token = jnp.where(mode == KNOWN, refs.decided[request, TOKEN], token)
        _store(problem, refs, request, num_accepted, token)

    results = launch("emit", body, problem.batch, inputs, _results(problem))
    return results["output"], results["num_sampled"]


def _store(
    problem: Problem, refs: Refs, request: jax.Array, num_accepted: jax.Array, token: jax.Array
) -> None:
    """Store the accepted drafts, then the token, then -1; no tokens for a padding row."""
    active = refs.active[request]
    for i in range(problem.rows):
        value = jnp.where(num_accepted == i, token, -1)
        if i < problem.K:
            value = jnp.where(num_accepted > i, refs.tokens[request * problem.K + i], value)
        refs.output[request, i] = jnp.where(active, value, -1)
    refs.num_sampled[request] = jnp.where(active, num_accepted + 1, 0)


def _results(problem: Problem) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        "output": jax.ShapeDtypeStruct((problem.batch, problem.rows), jnp.int32),
        "num_sampled": jax.ShapeDtypeStruct((problem.batch,), jnp.int32),
    }
