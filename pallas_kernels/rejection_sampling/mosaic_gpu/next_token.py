"""The token after the accepted drafts, recovered or bonus: the argmax of a row plus its noise."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.pieces import store_maximum
from pallas_kernels.rejection_sampling.mosaic_gpu.acceptance import PLAIN, RESIDUAL, decision
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import (
    Arrays,
    Problem,
    Refs,
    launch,
    partials,
)
from pallas_kernels.rejection_sampling.mosaic_gpu.residual import log_residual
from pallas_kernels.rejection_sampling.mosaic_gpu.streams import recover_noise
from pallas_kernels.rejection_sampling.mosaic_gpu.temperature import divisor_of, scaled


def draw(problem: Problem, inputs: Arrays) -> dict[str, jax.Array]:
    """Return best, index [B, LANES]: the argmax of each piece of row num_accepted plus noise.

    And residual_best, residual_index: likewise of the residual.
    """
    pieces = problem.draw
    # A greedy request that was judged has its token already.
    judged = inputs.get("decided") is not None

    def body(refs: Refs, block: jax.Array) -> None:
        request, piece = block // pieces.count, block % pieces.count
        num_accepted, mode = decision(problem, refs, request)
        row = request * problem.rows + num_accepted
        noisy, bare = mode == PLAIN, mode == PLAIN
        if problem.sampled and not judged:
            noisy, bare = noisy & jnp.logical_not(refs.greedy[request]), bare & refs.greedy[request]
        store = partial(store_maximum, indices=pieces.indices(piece), row=request, piece=piece)
        store_plain = partial(store, best_ref=refs.best, index_ref=refs.index)

        def both() -> tuple[jax.Array, jax.Array]:
            logits = pieces.load(refs.target.at[row], piece)
            return scaled(logits, divisor_of(refs, request)), recover_noise(
                problem, refs, request, piece
            )

        if not judged:

            @pl.when(bare)
            def _() -> None:
                store_plain(pieces.load(refs.target.at[row], piece))

        if problem.sampled:

            @pl.when(noisy)
            def _() -> None:
                logits, noise = both()
                store_plain(logits + noise)

        if judged:

            @pl.when(mode == RESIDUAL)
            def _() -> None:
                logits, noise = both()
                residual = log_residual(problem, refs, request, num_accepted, piece, logits)
                store_plain(logits + noise)
                store(residual + noise, best_ref=refs.residual_best, index_ref=refs.residual_index)

    names = ["best", "index", "residual_best", "residual_index"]
    outputs = dict(zip(names, 2 * partials(problem.batch, jnp.float32, jnp.int32), strict=True))
    if not judged:
        outputs = {name: outputs[name] for name in names[:2]}
    return launch("draw", body, problem.batch * pieces.count, inputs, outputs, approximate=True)
