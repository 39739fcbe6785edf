"""Rejection sampling on Hopper: the logits stream once, in pieces of the vocabulary.

The size of a piece never depends on the batch. One warpgroup reduces one piece of one row in
registers and writes a partial result; a block for each request combines the partials. Launches:

  greedy                    row_maxima, match
  probabilistic, block      row_sums, judge, draw, emit
  block with draft logits   row_sums, prefixes, mass, judge, draw, emit (K = 1: as without)
  synthetic, K = 0          draw, emit

  row_maxima, row_sums   row_reductions.py       argmax, or log-sum-exp, of every row
  prefixes, mass         block_verification.py   the drafts' joint probabilities, then the residual
                                                 mass of the inner rows
  judge                  acceptance.py           number of accepted drafts, and what is left to draw
                         streams.py              random numbers of judge and draw: given, or made
                                                 in registers
  draw                   next_token.py           argmax of the one row that is drawn from
  match, emit            output.py               the output; of greedy batches from the rows' argmax
  fold_scores,           shard_words.py          the own words of each request, before an all-gather
  fold_winners                                   takes them to the other devices

Rows that are cut over devices (shard_words.py) take a launch more before each all-gather:
fold_scores after the pass over all rows, fold_winners after draw. A draft with a vocabulary of its
own takes one more all-gather, of the rejected draft's row of each request; block verification of
several drafts takes it of all rows, and one of the residual mass.

No array of size [B, K, V] is written. Every kernel launches the next one early and waits for the
one before it (programmatic dependent launch, PDL). reference.py names the sources of the rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.noise import Stream
from pallas_kernels.pieces import LANES, cut
from pallas_kernels.rejection_sampling.inputs import Inputs
from pallas_kernels.rejection_sampling.mosaic_gpu.acceptance import ACCEPTED, judge
from pallas_kernels.rejection_sampling.mosaic_gpu.block_verification import (
    exchange_mass,
    mass,
    prefixes,
)
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Arrays, Problem
from pallas_kernels.rejection_sampling.mosaic_gpu.next_token import draw
from pallas_kernels.rejection_sampling.mosaic_gpu.output import emit, match
from pallas_kernels.rejection_sampling.mosaic_gpu.row_reductions import row_maxima, row_sums
from pallas_kernels.rejection_sampling.mosaic_gpu.shard_words import (
    exchange_scores,
    exchange_winners,
)
from pallas_kernels.types import Shaped


@dataclass(frozen=True)
class Tuning:
    """Sizes of pieces in tokens, multiples of 512.

    sweep: in the pass over all rows. draw: in the passes that also read noise or q. A piece's size
    decides the order of a row's sums, so it may depend on the vocabulary but never on the batch.
    """

    sweep: int = 4096
    draw: int = 2048


DEFAULT = Tuning()


def unsupported(
    target_logits: Shaped, draft_logits: Shaped | None = None, tuning: Tuning = DEFAULT
) -> str | None:
    """Return why the kernels cannot take these logits, None if they can."""
    vocabs = {"target": target_logits.shape[-1]} | (
        {} if draft_logits is None else {"draft": draft_logits.shape[-1]}
    )
    size = min(tuning.sweep, tuning.draw)
    for name, vocab in vocabs.items():
        if vocab < LANES or cut(vocab, size).count > LANES:
            return f"expected a {name} vocabulary of {LANES} to {LANES * size} tokens, got {vocab}"
    return None


# Compiled as a function of its own, so that programs share the kernels.
@lowered_once(static_argnames="tuning")
def rejection_sample(inputs: Inputs, *, tuning: Tuning = DEFAULT) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.rejection_sampling.rejection_sample."""
    rule, sampled, draft_logits = inputs.rule, inputs.sampled, inputs.draft_logits
    uniforms, recover_noise = inputs.uniforms, inputs.recover_noise
    batch, rows, vocab = inputs.target_logits.shape
    K = rows - 1
    if batch == 0:
        return jnp.zeros((0, rows), jnp.int32), jnp.zeros(0, jnp.int32)
    shards = inputs.shards
    problem = Problem(
        batch,
        K,
        rule,
        sampled,
        cut(vocab, tuning.sweep),
        cut(vocab, tuning.draw),
        shards=shards,
    )
    arrays: Arrays = {
        "target": inputs.target_logits.reshape(batch * rows, vocab),
        "active": inputs.active,
    }
    if not shards.is_whole:
        sizes = (vocab, 0 if draft_logits is None else draft_logits.shape[-1])
        arrays |= {"first_ids": jnp.stack([shards.first_id(size) for size in sizes])}
    if K:
        arrays |= {"tokens": inputs.draft_tokens.reshape(-1)}
    if sampled:
        arrays |= {"greedy": inputs.greedy, "temperature": inputs.temperature}
    if not sampled and rule != "synthetic":
        return match(problem, exchange_scores(problem, arrays | row_maxima(problem, arrays)))
    if K:
        arrays |= {"rates": inputs.acceptance_rates}
        if isinstance(uniforms, Stream):
            problem = replace(problem, accept_stream=uniforms.stream)
            arrays |= {"accept_keys": uniforms.keys, "accept_position": uniforms.position}
        elif uniforms is not None:
            arrays |= {"uniforms": uniforms.reshape(-1)}
    if sampled:
        if isinstance(recover_noise, Stream):
            problem = replace(problem, recover_stream=recover_noise.stream)
            arrays |= {
                "recover_keys": recover_noise.keys,
                "recover_position": recover_noise.position,
            }
        else:
            arrays |= {"noise": recover_noise}
    if K and rule != "synthetic":
        if draft_logits is not None:
            width = draft_logits.shape[-1]
            problem = replace(
                problem,
                draft_sweep=cut(width, tuning.sweep),
                gathers_draft=inputs.target_to_draft is not None and not shards.is_whole,
            )
            arrays |= {
                "draft": draft_logits.reshape(batch * K, width),
                "to_draft": inputs.target_to_draft,
            }
        judged = exchange_scores(problem, arrays | row_sums(problem, arrays))
        reads_all = rule == "block" and K > 1  # rows of the draft's logits
        if reads_all and draft_logits is not None:
            if problem.gathers_draft:
                every = draft_logits.reshape(batch * K, -1)
                arrays |= {"draft": shards.whole_rows(every)}
            inner = mass(problem, arrays | prefixes(problem, judged))
            judged = exchange_mass(problem, judged | inner)
        decided = judge(problem, judged)
        if problem.gathers_draft and not reads_all:
            problem = replace(problem, one_draft_row=True)
            arrays |= {"draft": _rejected_rows(inputs, decided["decided"])}
        arrays |= decided
    return emit(problem, exchange_winners(problem, arrays | draw(problem, arrays)))


def _rejected_rows(inputs: Inputs, decided: jax.Array) -> jax.Array:
    """Return the draft's row that each request rejected, whole: float32 [B, Vd]."""
    assert inputs.draft_logits is not None
    rejected = jnp.minimum(decided[:, ACCEPTED], inputs.draft_logits.shape[1] - 1)
    rows = jnp.take_along_axis(inputs.draft_logits, rejected[:, None, None], axis=1)
    return inputs.shards.whole_rows(rows.squeeze(1))
