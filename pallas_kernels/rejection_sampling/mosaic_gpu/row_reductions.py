"""The pass over all logits: each row's argmax, or its log-sum-exp, piece by piece.

The log-sum-exp is of logits over the request's temperature. This pass takes most of the time: the
others read one row for each request (block verification with draft logits: its inner rows too).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.pieces import Pieces, load_lanes, store_maximum, used_lanes
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import (
    Arrays,
    Problem,
    Refs,
    launch,
    partials,
)
from pallas_kernels.rejection_sampling.mosaic_gpu.temperature import LARGEST, divisor_of
from pallas_kernels.types import Ref

LOG2_E = 1.4426950408889634


def row_maxima(problem: Problem, inputs: Arrays) -> dict[str, jax.Array]:
    """Return best, index [B (K+1), LANES]: the argmax of each piece of every target row."""
    pieces = problem.sweep

    def body(refs: Refs, block: jax.Array) -> None:
        row, piece = block // pieces.count, block % pieces.count
        request = row // problem.rows

        @pl.when(refs.active[request])
        def _reduce() -> None:
            logits = pieces.load(refs.target.at[row], piece)
            store_maximum(logits, pieces.indices(piece), refs.best, refs.index, row, piece)

    rows = problem.batch * problem.rows
    best, index = partials(rows, jnp.float32, jnp.int32)
    return launch("row_maxima", body, rows * pieces.count, inputs, {"best": best, "index": index})


def row_sums(problem: Problem, inputs: Arrays) -> dict[str, jax.Array]:
    """Return the pieces' log-sum-exp: maximum, and sum of exponentials less the maximum.

    best, sum: [B (K+1), LANES] of the target's rows. draft_best, draft_sum: [B K, LANES] of the
    draft's. index: as row_maxima's, for greedy requests.
    """
    rows, draft_rows = problem.batch * problem.rows, problem.batch * problem.K
    target_blocks = rows * problem.sweep.count

    def target(refs: Refs, block: jax.Array) -> None:
        pieces = problem.sweep
        row, piece = block // pieces.count, block % pieces.count
        request = row // problem.rows

        @pl.when(refs.active[request])
        def _() -> None:
            logits = pieces.load(refs.target.at[row], piece)
            greedy = refs.greedy[request]

            @pl.when(greedy)
            def _() -> None:
                store_maximum(logits, pieces.indices(piece), refs.best, refs.index, row, piece)

            @pl.when(jnp.logical_not(greedy))
            def _() -> None:
                _store_sum(
                    logits, divisor_of(refs, request), pieces, refs.best, refs.sum, row, piece
                )

    def draft(pieces: Pieces, refs: Refs, block: jax.Array) -> None:
        row, piece = block // pieces.count, block % pieces.count
        request = row // problem.K

        @pl.when(refs.active[request] & jnp.logical_not(refs.greedy[request]))
        def _() -> None:
            logits = pieces.load(refs.draft.at[row], piece)
            _store_sum(
                logits,
                divisor_of(refs, request),
                pieces,
                refs.draft_best,
                refs.draft_sum,
                row,
                piece,
            )

    def body(refs: Refs, block: jax.Array) -> None:
        if problem.draft_sweep is None:
            target(refs, block)
        else:
            pl.when(block < target_blocks)(partial(target, refs, block))
            pl.when(block >= target_blocks)(
                partial(draft, problem.draft_sweep, refs, block - target_blocks)
            )

    best, total, index = partials(rows, jnp.float32, jnp.float32, jnp.int32)
    outputs = {"best": best, "sum": total, "index": index}
    blocks = target_blocks
    if problem.draft_sweep is not None:
        outputs["draft_best"], outputs["draft_sum"] = partials(draft_rows, jnp.float32, jnp.float32)
        blocks += draft_rows * problem.draft_sweep.count
    return launch("row_sums", body, blocks, inputs, outputs, approximate=True)


def _store_sum(
    logits: jax.Array,
    divisor: jax.Array | None,
    pieces: Pieces,
    best_ref: Ref,
    sum_ref: Ref,
    row: jax.Array,
    piece: jax.Array,
) -> None:
    """Store the maximum m of the plain logits, and the sum of exp((x - m) / temperature).

    Entries that the piece before holds too are left out.
    """
    fresh = pieces.indices(piece) >= piece * pieces.size
    logits = jnp.where(fresh & (logits == logits), jnp.minimum(logits, LARGEST), -jnp.inf)
    best = jnp.max(logits)
    scale = LOG2_E if divisor is None else LOG2_E / divisor
    best_ref[row, piece] = best
    sum_ref[row, piece] = jnp.sum(
        lax.exp2((logits - jnp.where(best > -jnp.inf, best, 0.0)) * scale)
    )


def load_sums(
    best_ref: Ref, sum_ref: Ref, first_row: jax.Array, rows: int
) -> list[tuple[jax.Array, jax.Array]]:
    """Load the pieces' results of several rows, before a reduction waits for the first of them."""
    return [
        (load_lanes(best_ref, first_row + i), load_lanes(sum_ref, first_row + i))
        for i in range(rows)
    ]


def combine_sum(
    best: jax.Array, total: jax.Array, count: int, divisor: jax.Array | None
) -> jax.Array:
    """Return the log-sum-exp of a row over its temperature, from its `count` pieces' results.

    0 for a row that is all -inf, so that subtracting it leaves -inf and not NaN.
    """
    used = used_lanes(count)
    best = jnp.where(used, best, -jnp.inf)
    highest = jnp.max(best)
    shift = jnp.where(highest > -jnp.inf, highest, 0.0)
    exponent, top = best - shift, shift
    if divisor is not None:
        exponent, top = exponent / divisor, jnp.minimum(shift / divisor, LARGEST)
    total = jnp.sum(jnp.where(used, total, 0.0) * jnp.exp(exponent))
    return jnp.where(highest > -jnp.inf, top + jnp.log(total), 0.0)
