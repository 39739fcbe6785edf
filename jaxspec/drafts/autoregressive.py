"""Propose: the draft step, and the compiled loop that drives it K times.

Step 0 runs over the K+1 target rows that the draft may not have seen; steps 1 .. K-1 run one row a request inside
lax.fori_loop, whose trip count is known, so that a GPU runs ahead of the host. The carried step index says where each
step's token and logits are written, and from it each of these steps rebuilds the attention metadata before it runs.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec import drafts
from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import AttentionMetadata, build_metadata, rebuild_draft_metadata
from jaxspec.config import REFERENCE_KERNELS, Kernels, RoundConfig
from jaxspec.layers.params import Params
from jaxspec.layers.products import pick_row
from jaxspec.sampling.state import SamplingState, draw, sample, scale_by_temperature


@struct.dataclass
class DraftInputs:
    """What a proposal starts from.

    seq_lens:       int32 [batch], tokens in the target's cache; the streams of the round are keyed by it
    pending_tokens: int32 [batch, K+1], the token after each row that the draft has not consumed
    pending_hidden: [batch, K+1, hidden], the target's hidden states of these rows (fused in step 0)
    num_pending:    int32 [batch], how many of them are real; 0 for an idle request
    block_table:    int32 [batch, pages]
    """

    seq_lens: jax.Array
    pending_tokens: jax.Array
    pending_hidden: jax.Array
    num_pending: jax.Array
    block_table: jax.Array
    sampling: SamplingState


@struct.dataclass
class Proposal:
    """draft_tokens: int32 [batch, K], ids of the target's vocabulary. draft_logits: float32 [batch, K, draft_vocab],
    before temperature; None where drafts are one-hot or the rule does not read q."""

    draft_tokens: jax.Array
    draft_logits: jax.Array | None


@struct.dataclass
class DraftCarry:
    """The draft loop's state after a step. The next one reads the step's token int32 [batch] and hidden [batch, 1, hidden]; the last
    step's are read by none."""

    proposal: Proposal
    token: jax.Array
    hidden: jax.Array
    caches: KVCache


@partial(jax.jit, static_argnames=("cfg", "kernels"))
def draft_step(
    params: Params,
    tokens: jax.Array,
    hidden: jax.Array,
    last_row: jax.Array,
    metadata: AttentionMetadata,
    caches: KVCache,
    *,
    cfg: drafts.DraftConfig,
    kernels: Kernels = REFERENCE_KERNELS,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """One pass of the draft: tokens int32 [batch, rows] and hidden [batch, rows, D] at the metadata's positions.

    Returns the float32 logits [batch, draft_vocab] and the feedback [batch, 1, D] of row last_row [batch], and the caches.
    """
    family = drafts.family(cfg)
    out = family.forward(
        params, cfg, tokens, hidden, metadata, caches, kernels=kernels, last_row=last_row
    )
    head_input, feedback = pick_row(out.head_input, last_row), pick_row(out.feedback, last_row)
    return family.logits(params, cfg, head_input[:, 0], kernels), feedback, out.caches


def noise_key(
    cfg: RoundConfig, seq_lens: jax.Array, step: jax.Array | int
) -> tuple[str, jax.Array, jax.Array | int]:
    """Stream, position int32 [batch] and offset of a step's noise.

    The strict rule shares the target's own "sample" noise, keyed by the drafted token's position and its id in the
    target's vocabulary; that is what makes a sampled draft match there. The others draw from the "draft" stream.
    """
    return ("sample", seq_lens + 1 + step, 0) if cfg.rule == "strict" else ("draft", seq_lens, step)


def draw_draft(
    cfg: RoundConfig, params: Params, inputs: DraftInputs, step: jax.Array | int, logits: jax.Array
) -> jax.Array:
    """A step's token [batch], an id of the draft's vocabulary, from logits [batch, draft_vocab]."""
    sampling = inputs.sampling
    if cfg.draft_sampling == "greedy" or not cfg.sampled:
        return sample(scale_by_temperature(logits, sampling.temperature), None, sampling.greedy)
    token_ids = (
        params["draft_to_target"] if cfg.rule == "strict" and cfg.draft.maps_vocabulary else None
    )
    key = noise_key(cfg, inputs.seq_lens, step)
    return draw(
        logits,
        sampling.temperature,
        sampling.keys,
        *key,
        token_ids,
        implementation=cfg.kernels.gumbel_sample,
    )


def write_step(
    cfg: RoundConfig,
    params: Params,
    inputs: DraftInputs,
    step: jax.Array | int,
    logits: jax.Array,
    proposal: Proposal,
) -> tuple[Proposal, jax.Array]:
    """Draw step's draft token from logits [batch, draft_vocab] and write both into column step. Returns the token [batch] too."""
    drafted = draw_draft(cfg, params, inputs, step, logits)
    token = params["draft_to_target"][drafted] if cfg.draft.maps_vocabulary else drafted
    # A step that might count from the end would be read twice, before and after the loop counts on, and that takes a copy of it.
    into_column = partial(lax.dynamic_update_slice, allow_negative_indices=False)
    tokens = into_column(proposal.draft_tokens, token[:, None], (0, step))
    draft_logits = proposal.draft_logits
    if draft_logits is not None:
        draft_logits = into_column(draft_logits, logits[:, None], (0, step, 0))
    return Proposal(tokens, draft_logits), token


def empty_proposal(cfg: RoundConfig, batch: int) -> Proposal:
    """The preallocated buffers; every column is written by its own step."""
    K = cfg.num_speculative_tokens
    logits = (
        jnp.zeros((batch, K, cfg.draft.draft_vocab_size), jnp.float32)
        if cfg.keeps_draft_logits
        else None
    )
    return Proposal(jnp.zeros((batch, K), jnp.int32), logits)


def read_pending(
    cfg: RoundConfig, params: Params, inputs: DraftInputs
) -> tuple[jax.Array, AttentionMetadata]:
    """What step 0 reads of the pending rows: their hidden states, fused, [batch, K+1, D], and their metadata."""
    assert cfg.draft_group is not None
    metadata = build_metadata(
        cfg.draft_group,
        inputs.block_table,
        inputs.seq_lens - inputs.num_pending,
        inputs.num_pending,
        inputs.pending_tokens.shape[1],
        attention=cfg.draft.attention,
        kernels=cfg.kernels,
    )
    return drafts.family(cfg.draft).fuse(
        params, cfg.draft, inputs.pending_hidden, cfg.kernels
    ), metadata


def consume_pending(
    cfg: RoundConfig, params: Params, inputs: DraftInputs, caches: KVCache
) -> KVCache:
    """Step 0's pass over the pending rows without its draft: the caches of a round with K = 0."""
    hidden, metadata = read_pending(cfg, params, inputs)
    forward = drafts.family(cfg.draft).forward
    return forward(
        params, cfg.draft, inputs.pending_tokens, hidden, metadata, caches, kernels=cfg.kernels
    ).caches


def first_step(
    cfg: RoundConfig,
    params: Params,
    inputs: DraftInputs,
    caches: KVCache,
    buffers: Proposal | None = None,
) -> DraftCarry:
    """Step 0: consume the pending rows (rejected ones are masked), draft the first token from the last real row."""
    hidden, metadata = read_pending(cfg, params, inputs)
    last_row = jnp.maximum(inputs.num_pending - 1, 0)
    logits, feedback, caches = draft_step(
        params,
        inputs.pending_tokens,
        hidden,
        last_row,
        metadata,
        caches,
        cfg=cfg.draft,
        kernels=cfg.kernels,
    )
    proposal, token = write_step(
        cfg,
        params,
        inputs,
        0,
        logits,
        buffers or empty_proposal(cfg, inputs.pending_tokens.shape[0]),
    )
    return DraftCarry(proposal, token, feedback, caches)


def next_step(
    cfg: RoundConfig, params: Params, inputs: DraftInputs, step: jax.Array | int, carry: DraftCarry
) -> DraftCarry:
    """Step 1 .. K-1: rebuild the metadata, feed the last drafted token back, write column `step`."""
    assert cfg.draft_group is not None
    metadata = rebuild_draft_metadata(
        cfg.draft_group,
        inputs.block_table,
        inputs.seq_lens,
        inputs.num_pending,
        step,
        attention=cfg.draft.attention,
        kernels=cfg.kernels,
    )
    logits, feedback, caches = draft_step(
        params,
        carry.token[:, None],
        carry.hidden,
        jnp.zeros_like(carry.token),
        metadata,
        carry.caches,
        cfg=cfg.draft,
        kernels=cfg.kernels,
    )
    proposal, token = write_step(cfg, params, inputs, step, logits, carry.proposal)
    return DraftCarry(proposal, token, feedback, caches)


def propose(
    cfg: RoundConfig,
    params: Params,
    inputs: DraftInputs,
    caches: KVCache,
    buffers: Proposal | None = None,
) -> DraftCarry:
    """K draft tokens a request, and their logits where the rejection rule reads them; see DraftInputs for what goes in.

    params are the draft's, with the arrays that it shares with the target (loading.bind_draft). buffers may replace the
    preallocated arrays (tests poison them). K = 1 traces no loop.
    """
    carry = first_step(cfg, params, inputs, caches, buffers)
    if cfg.num_speculative_tokens == 1:
        return carry
    return lax.fori_loop(
        1, cfg.num_speculative_tokens, partial(next_step, cfg, params, inputs), carry
    )
