"""Rejection sampling on Hopper: the logits stream once, in pieces of the vocabulary whose size never depends on the batch.

One warpgroup reduces one piece of one row in registers and writes a partial result; a block per request combines the partials. Launches:

  greedy, strict            row_maxima, match
  probabilistic, block      row_sums, judge, draw, emit
  block with draft logits   row_sums, prefixes, mass, judge, draw, emit (K = 1: as without)
  synthetic, K = 0          draw, emit

  row_maxima, row_sums   row_reductions.py       argmax, or log-sum-exp, of every row
  prefixes, mass         block_verification.py   the drafts' joint probabilities, then the residual mass of the inner rows
  judge                  acceptance.py           how many drafts are accepted, and what is left to draw
                         streams.py              the random numbers of judge and draw: given, or made in registers
  draw                   next_token.py           argmax of the one row that is drawn from
  match, emit            output.py               the output, of greedy and strict calls straight from the rows' argmax

Nothing of size [B, K, V] is written. Every kernel lets the next one launch early and waits for the one before it (programmatic dependent
launch). Sources of the rules: ``reference.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.noise import Stream
from pallas_kernels.pieces import LANES, cut
from pallas_kernels.rejection_sampling.mosaic_gpu.acceptance import judge
from pallas_kernels.rejection_sampling.mosaic_gpu.block_verification import mass, prefixes
from pallas_kernels.rejection_sampling.mosaic_gpu.launch import Problem
from pallas_kernels.rejection_sampling.mosaic_gpu.next_token import draw
from pallas_kernels.rejection_sampling.mosaic_gpu.output import emit, match
from pallas_kernels.rejection_sampling.mosaic_gpu.row_reductions import row_maxima, row_sums


@dataclass(frozen=True)
class Tuning:
    """Piece sizes in tokens, multiples of 512: of the pass over all rows, and of the passes that also read noise or q.

    A piece's size decides the order of a row's sums, so it may follow the vocabulary but never the batch.
    """

    sweep: int = 4096
    draw: int = 2048


DEFAULT = Tuning()


def unsupported(
    target_logits: jax.Array, draft_logits: jax.Array | None = None, tuning: Tuning = DEFAULT
) -> str | None:
    """Why the kernels cannot take these arguments of the op, None if they can. Values are not read: ShapeDtypeStructs will do."""
    vocabs = {"target": target_logits.shape[-1]} | (
        {} if draft_logits is None else {"draft": draft_logits.shape[-1]}
    )
    size = min(tuning.sweep, tuning.draw)
    for name, vocab in vocabs.items():
        if vocab < LANES or cut(vocab, size).count > LANES:
            return f"expected a {name} vocabulary of {LANES} to {LANES * size} tokens, got {vocab}"
    return None


def rejection_sample(
    target_logits: jax.Array,
    draft_tokens: jax.Array,
    draft_logits: jax.Array | None,
    target_to_draft: jax.Array | None,
    greedy: jax.Array,
    uniforms: jax.Array | Stream | None,
    recover_noise: jax.Array | Stream | None,
    sample_noise: jax.Array | None,
    acceptance_rates: jax.Array | None,
    active: jax.Array,
    temperature: jax.Array | None = None,
    *,
    rule: str,
    sampled: bool,
    tuning: Tuning = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """The public op's arguments and results; see ``pallas_kernels.rejection_sampling.rejection_sample``."""
    batch, rows, vocab = target_logits.shape
    num_drafts = rows - 1
    if batch == 0:
        return jnp.zeros((0, rows), jnp.int32), jnp.zeros(0, jnp.int32)
    problem = Problem(
        batch, num_drafts, rule, sampled, cut(vocab, tuning.sweep), cut(vocab, tuning.draw)
    )
    arrays: dict[str, jax.Array | None] = {
        "target": target_logits.reshape(batch * rows, vocab),
        "active": active,
    }
    if num_drafts:
        arrays |= {"tokens": draft_tokens.reshape(-1)}
    if sampled:
        arrays |= {"greedy": greedy, "temperature": temperature}
    if rule == "strict" or (not sampled and rule != "synthetic"):
        noise = (
            None
            if sample_noise is None or not sampled
            else sample_noise.reshape(batch * rows, vocab)
        )
        return match(problem, arrays | row_maxima(problem, arrays | {"noise": noise}))
    if num_drafts:
        arrays |= {"rates": acceptance_rates}
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
    if num_drafts and rule != "synthetic":
        if draft_logits is not None:
            width = draft_logits.shape[-1]
            problem = replace(problem, draft_sweep=cut(width, tuning.sweep))
            arrays |= {
                "draft": draft_logits.reshape(batch * num_drafts, width),
                "to_draft": target_to_draft,
            }
        judged = arrays | row_sums(problem, arrays)
        if rule == "block" and draft_logits is not None and num_drafts > 1:
            judged |= mass(problem, arrays | prefixes(problem, judged))
        arrays |= judge(problem, judged)
    return emit(problem, arrays | draw(problem, arrays))
