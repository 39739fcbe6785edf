"""Columns of a proposal: a step draws a draft token, and writes it and its logits into its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import RoundConfig
from jaxspec.drafts import families
from jaxspec.drafts.drafter import Proposal
from jaxspec.layers.params import Params
from jaxspec.sampling.state import SamplingState, draw, sample, scale_by_temperature


class Batch(Protocol):
    """What a draw reads of the requests; see DraftContext."""

    @property
    def seq_lens(self) -> jax.Array: ...
    @property
    def sampling(self) -> SamplingState: ...


def noise_key(
    cfg: RoundConfig, seq_lens: jax.Array, step: jax.Array | int
) -> tuple[str, jax.Array, jax.Array | int]:
    """Return stream, position int32 [batch] and offset of a step's noise.

    The strict rule shares the target's own "sample" noise, keyed by the drafted token's position
    and its id in the target's vocabulary. This makes a sampled draft match the target's token. The
    other rules draw from the "draft" stream.
    """
    return ("sample", seq_lens + 1 + step, 0) if cfg.rule == "strict" else ("draft", seq_lens, step)


def draw_token(
    cfg: RoundConfig,
    params: Params,
    inputs: Batch,
    step: jax.Array | int,
    logits: jax.Array,
) -> jax.Array:
    """Draw a step's token [batch], an id of the target's vocabulary.

    The token is the same on all devices, of which each has a piece of the logits.

    logits: float32 [batch, draft_vocab]
    """
    sampling, shards = inputs.sampling, cfg.vocab_shards
    if cfg.draft_sampling == "greedy" or not cfg.sampled:
        scaled = scale_by_temperature(logits, sampling.temperature)
        return target_token(cfg, params, sample(scaled, None, sampling.greedy, shards))
    token_ids = (
        params["draft_to_target"]
        if cfg.rule == "strict" and families.layered(cfg.draft).maps_vocabulary
        else None
    )
    key = noise_key(cfg, inputs.seq_lens, step)
    drafted = draw(
        logits,
        sampling.temperature,
        sampling.keys,
        *key,
        token_ids,
        shards=shards,
        implementation=cfg.ops.gumbel_sample,
    )
    return target_token(cfg, params, drafted)


def write_step(
    cfg: RoundConfig,
    params: Params,
    inputs: Batch,
    step: jax.Array | int,
    logits: jax.Array,
    proposal: Proposal,
) -> tuple[Proposal, jax.Array]:
    """Draw the step's draft token from logits [batch, draft_vocab] and write both into its column.

    Returns the proposal and the token [batch], an id of the target's vocabulary.
    """
    token = draw_token(cfg, params, inputs, step, logits)
    return write_column(proposal, step, token, logits), token


def target_token(cfg: RoundConfig, params: Params, drafted: jax.Array) -> jax.Array:
    """Return tokens [batch] of the draft's vocabulary in the target's."""
    if not families.layered(cfg.draft).maps_vocabulary:
        return drafted
    return params["draft_to_target"][drafted]


def write_column(
    proposal: Proposal, step: jax.Array | int, token: jax.Array, logits: jax.Array
) -> Proposal:
    """Write a token [batch] and its logits [batch, draft_vocab], if kept, into column `step`."""
    proposal = write_token(proposal, step, token)
    if proposal.draft_logits is None:
        return proposal
    return replace(proposal, draft_logits=_into_column(proposal.draft_logits, step, logits))


def write_token(proposal: Proposal, step: jax.Array | int, token: jax.Array) -> Proposal:
    """Write a token [batch] into column `step`."""
    return replace(proposal, draft_tokens=_into_column(proposal.draft_tokens, step, token))


def _into_column(columns: jax.Array, step: jax.Array | int, values: jax.Array) -> jax.Array:
    """Write values [batch, ...] into column `step` of columns [batch, K, ...]."""
    values = _by_kernel(columns.shape[1], step, values)[:, None]
    # A step that might be a negative index would be read both before and after the loop increments
    # it, which takes a copy of it.
    start = (0, step, *[0] * (columns.ndim - 2))
    return lax.dynamic_update_slice(columns, values, start, allow_negative_indices=False)


def _by_kernel(num_columns: int, step: jax.Array | int, values: jax.Array) -> jax.Array:
    """Return values [batch, ...] of column `step` such that a kernel writes them.

    The column of a single request is contiguous, and XLA would copy it: see
    jaxspec.sampling.loop_rows. The select makes the write a kernel.
    """
    if values.shape[0] > 1:
        return values
    return jnp.where(step < num_columns, values, 0)


def proposal_buffers(cfg: RoundConfig, batch: int) -> Proposal:
    """Return the preallocated buffers; every column is written by its own step."""
    K, logits = cfg.num_speculative_tokens, None
    if cfg.keeps_draft_logits:
        vocab = cfg.vocab_shards.piece(families.layered(cfg.draft).draft_vocab_size)
        logits = jnp.zeros((batch, K, vocab), jnp.float32)
    return Proposal(empty_tokens(cfg, batch), logits)


def empty_tokens(cfg: RoundConfig, batch: int) -> jax.Array:
    """Return a proposal's tokens int32 [batch, K] before the first step."""
    return jnp.zeros((batch, cfg.num_speculative_tokens), jnp.int32)
