"""Autoregressive drafting: the draft step, and the compiled loop that runs it K times.

Step 0 reads the target rows that the draft has not consumed, at most K+1: the pending rows. Steps
1 .. K-1 run one row per request inside lax.fori_loop. Its trip count is static, so that a GPU runs
ahead of the host. The loop carries the step index: each step rebuilds its attention metadata from
it, and writes its token and its logits into column `step` of preallocated arrays.

Row p pairs the target's hidden state of position p with token p+1 (EAGLE, 2401.15077), so a draft
lags one row behind the target: a round's rows are read in the next round, once the token after the
last of them is sampled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.typing import DTypeLike

from jaxspec.cache.arrays import KVCache, init_cache
from jaxspec.cache.metadata import (
    PREFILL_METADATA_OPS,
    BlockTables,
    build_metadata,
    rebuild_draft_metadata,
)
from jaxspec.config import RoundConfig
from jaxspec.drafts import families
from jaxspec.drafts.columns import proposal_buffers, write_step
from jaxspec.drafts.drafter import (
    DraftContext,
    DraftPart,
    Observation,
    PromptChunk,
    Proposal,
    no_drafts,
)
from jaxspec.drafts.family import LayeredConfig, hidden_width
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params
from jaxspec.layers.products import pick_row
from jaxspec.models import TargetOutput
from jaxspec.sampling.state import SamplingState


@struct.dataclass
class AutoregressiveState:
    """The target rows that the draft has not consumed, and the draft's caches.

    pending_tokens: int32 [batch, K+1], the token after each pending row
    pending_hidden: [batch, K+1, width], the target features of these rows
    num_pending:    int32 [batch], how many of them are real
    caches:         one cache per layer of the draft
    """

    LARGE: ClassVar[tuple[str, ...]] = ("pending_hidden",)

    pending_tokens: jax.Array
    pending_hidden: jax.Array
    num_pending: jax.Array
    caches: KVCache


@struct.dataclass
class DraftInputs:
    """The start of a proposal.

    seq_lens:       int32 [batch], tokens in the target's cache; it keys the round's random streams
    pending_tokens: int32 [batch, K+1], the token after each row that the draft has not consumed
    pending_hidden: [batch, K+1, width], the target features of these rows (fused in step 0)
    num_pending:    int32 [batch], how many of them are real; 0 for an idle request
    block_tables:   int32 [batch, pages] of each of the draft's KV-cache groups
    sampling:       the requests' sampling parameters
    """

    seq_lens: jax.Array
    pending_tokens: jax.Array
    pending_hidden: jax.Array
    num_pending: jax.Array
    block_tables: BlockTables
    sampling: SamplingState


@struct.dataclass
class DraftCarry:
    """The carry of the draft loop after a step.

    proposal: the preallocated arrays, written up to this step's column
    token:    int32 [batch], the step's draft, an input of the next step
    hidden:   [batch, 1, D], the draft's feedback, an input of the next step
    caches:   the draft's caches with the step's rows written
    """

    proposal: Proposal
    token: jax.Array
    hidden: jax.Array
    caches: KVCache


def draft_inputs(state: AutoregressiveState, context: DraftContext) -> DraftInputs:
    """Return the inputs of a proposal. An idle request has no pending rows."""
    return DraftInputs(
        seq_lens=context.seq_lens,
        pending_tokens=state.pending_tokens,
        pending_hidden=state.pending_hidden,
        num_pending=jnp.where(context.active, state.num_pending, 0),
        block_tables=context.block_tables,
        sampling=context.sampling,
    )


@partial(jax.jit, static_argnames="cfg")
def draft_step(
    params: Params,
    tokens: jax.Array,
    hidden: jax.Array,
    pass_: Pass,
    caches: KVCache,
    *,
    cfg: LayeredConfig,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Run the draft once over tokens int32 [batch, rows] and hidden [batch, rows, D].

    Returns the float32 logits [batch, draft_vocab] and the feedback [batch, 1, D] of the pass's
    last_row, and the caches.
    """
    family = families.step_family(cfg)
    out = family.forward(params, cfg, tokens, hidden, pass_, caches)
    head_input = pick_row(out.head_input, pass_.last_row)
    feedback = pick_row(out.feedback, pass_.last_row)
    return family.logits(params, cfg, head_input[:, 0], pass_.ops), feedback, out.caches


def read_pending(
    cfg: RoundConfig, params: Params, inputs: DraftInputs, last_row: jax.Array | None
) -> tuple[jax.Array, Pass]:
    """Return the fused hidden states [batch, K+1, D] of the pending rows, and step 0's pass."""
    draft = families.layered(cfg.draft)
    metadata = build_metadata(
        cfg.draft_groups,
        inputs.block_tables,
        inputs.seq_lens - inputs.num_pending,
        inputs.num_pending,
        inputs.pending_tokens.shape[1],
        attention=draft.attention,
        ops=cfg.ops,
    )
    hidden = families.step_family(draft).fuse(params, draft, inputs.pending_hidden, cfg.draft_ops)
    return hidden, Pass(metadata, cfg.draft_ops, last_row=last_row)


def consume_pending(
    cfg: RoundConfig, params: Params, inputs: DraftInputs, caches: KVCache
) -> KVCache:
    """Run step 0 over the pending rows without drafting: the caches of a round with K = 0."""
    draft = families.layered(cfg.draft)
    hidden, pass_ = read_pending(cfg, params, inputs, None)
    forward = families.step_family(draft).forward
    return forward(params, draft, inputs.pending_tokens, hidden, pass_, caches).caches


def first_step(
    cfg: RoundConfig,
    params: Params,
    inputs: DraftInputs,
    caches: KVCache,
    buffers: Proposal | None = None,
) -> DraftCarry:
    """Run step 0: consume the pending rows and draft the first token from the last real row.

    Rejected rows are masked.
    """
    hidden, pass_ = read_pending(cfg, params, inputs, jnp.maximum(inputs.num_pending - 1, 0))
    logits, feedback, caches = draft_step(
        params, inputs.pending_tokens, hidden, pass_, caches, cfg=families.layered(cfg.draft)
    )
    proposal, token = write_step(
        cfg,
        params,
        inputs,
        0,
        logits,
        buffers or proposal_buffers(cfg, inputs.pending_tokens.shape[0]),
    )
    return DraftCarry(proposal, token, feedback, caches)


def next_step(
    cfg: RoundConfig, params: Params, inputs: DraftInputs, step: jax.Array | int, carry: DraftCarry
) -> DraftCarry:
    """Run step 1 .. K-1: rebuild the metadata, feed back the last draft, write column `step`."""
    draft = families.layered(cfg.draft)
    metadata = rebuild_draft_metadata(
        cfg.draft_groups,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.num_pending,
        step,
        attention=draft.attention,
        ops=cfg.ops,
    )
    pass_ = Pass(metadata, cfg.draft_ops, last_row=jnp.zeros_like(carry.token))
    logits, feedback, caches = draft_step(
        params, carry.token[:, None], carry.hidden, pass_, carry.caches, cfg=draft
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
    """Draft K tokens per request, with their logits where the rejection rule reads them.

    params are the draft's, with the arrays that it shares with the target (loading.binding).
    buffers replaces the preallocated arrays (tests poison them). K = 1 traces no loop.
    """
    carry = first_step(cfg, params, inputs, caches, buffers)
    if cfg.num_speculative_tokens == 1:
        return carry
    return lax.fori_loop(
        1, cfg.num_speculative_tokens, partial(next_step, cfg, params, inputs), carry
    )


@struct.dataclass
class _Drafting:
    """The carry between parts of a proposal that are compiled one by one."""

    carry: DraftCarry
    rest: AutoregressiveState  # without the caches, which the carry holds

    @property
    def proposal(self) -> Proposal:
        return self.carry.proposal

    @property
    def state(self) -> AutoregressiveState:
        return replace(self.rest, caches=self.carry.caches)


def first_draft_step(
    cfg: RoundConfig, params: Params, context: DraftContext, _: Any, state: AutoregressiveState
) -> _Drafting:
    carry = first_step(cfg, params, draft_inputs(state, context), state.caches)
    return _Drafting(carry, replace(state, caches=()))


def next_draft_step(
    cfg: RoundConfig, params: Params, context: DraftContext, step: Any, drafting: _Drafting
) -> _Drafting:
    inputs = draft_inputs(drafting.rest, context)
    carry = next_step(cfg, params, inputs, step, drafting.carry)
    return _Drafting(carry, drafting.rest)


@dataclass(frozen=True)
class Autoregressive:
    """The drafter of every family with layers: EAGLE-1, EAGLE-3, EAGLE for Llama 4, MTP."""

    lookahead: int = 1  # row p reads token p+1
    one_hot: bool = False

    def may_stop(self, cfg: RoundConfig) -> bool:
        """Return False: every step drafts; see Drafter."""
        return False

    def lag(self, cfg: RoundConfig) -> int:
        """Return the pending rows of a round that accepts all its drafts; see Drafter."""
        return cfg.num_speculative_tokens + 1

    def init(
        self,
        cfg: RoundConfig,
        batch: int,
        num_blocks: tuple[int, ...],
        *,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
    ) -> AutoregressiveState:
        """See Drafter."""
        draft = families.layered(cfg.draft)
        rows, width = cfg.num_speculative_tokens + 1, hidden_width(draft, cfg.target)
        return AutoregressiveState(
            pending_tokens=jnp.zeros((batch, rows), jnp.int32),
            pending_hidden=jnp.zeros((batch, rows, width), dtype),
            num_pending=jnp.zeros(batch, jnp.int32),
            caches=init_cache(
                draft.attention,
                [num_blocks[cfg.draft_pools[group]] for group in draft.group_of_layer],
                cfg.block_size,
                cache_dtype,
            ),
        )

    def prefill(
        self,
        cfg: RoundConfig,
        params: Params,
        state: AutoregressiveState,
        block_tables: BlockTables,
        chunk: PromptChunk,
        first_token: jax.Array,
        target: TargetOutput,
    ) -> AutoregressiveState:
        """Run the draft over the chunk's rows; see Drafter.

        The row of a prompt's last token stays pending, until the token after it is sampled.
        """
        draft = families.layered(cfg.draft)
        family, ends = families.step_family(draft), chunk.ends
        hidden = family.target_hidden(draft, target.hidden, target.aux)
        metadata = build_metadata(
            cfg.draft_groups,
            block_tables,
            chunk.start,
            chunk.num_tokens - ends.astype(jnp.int32),
            chunk.tokens.shape[1],
            attention=draft.attention,
            ops=PREFILL_METADATA_OPS,
        )
        fused = family.fuse(params, draft, hidden, cfg.draft_ops)
        pass_ = Pass(metadata, cfg.draft_ops)
        out = family.forward(params, draft, chunk.following, fused, pass_, state.caches)
        first_only = jnp.arange(state.pending_tokens.shape[1]) == 0
        return AutoregressiveState(
            pending_tokens=jnp.where(
                ends[:, None] & first_only, first_token[:, None], state.pending_tokens
            ),
            pending_hidden=jnp.where(
                ends[:, None, None] & first_only[:, None],
                pick_row(hidden, chunk.last_row),
                state.pending_hidden,
            ),
            num_pending=jnp.where(ends, 1, state.num_pending),
            caches=out.caches,
        )

    def propose(
        self,
        cfg: RoundConfig,
        params: Params,
        state: AutoregressiveState,
        context: DraftContext,
        buffers: Proposal | None = None,
    ) -> tuple[Proposal, AutoregressiveState]:
        """See Drafter, and propose for the buffers."""
        inputs = draft_inputs(state, context)
        if cfg.num_speculative_tokens == 0:
            caches = consume_pending(cfg, params, inputs, state.caches)
            return no_drafts(context.seq_lens.shape[0]), replace(state, caches=caches)
        carry = propose(cfg, params, inputs, state.caches, buffers)
        return carry.proposal, replace(state, caches=carry.caches)

    def parts(self, cfg: RoundConfig) -> tuple[DraftPart, ...]:
        """Return step 0, then steps 1 .. K-1; see Drafter."""
        return (first_draft_step, *(next_draft_step,) * (cfg.num_speculative_tokens - 1))

    def observe(
        self, cfg: RoundConfig, params: Params, state: AutoregressiveState, seen: Observation
    ) -> AutoregressiveState:
        """Make the rows of the target's pass the pending rows; see Drafter.

        Row i of the pass is position seq_lens + i, and output_tokens[i] is the token after it. The
        draft reads these pairs. num_pending masks the rejected rows. The state may have
        more pending rows than the round has drafts (K was chosen by the batch's size).
        """
        draft = families.layered(cfg.draft)
        family, live = families.step_family(draft), seen.active
        hidden = family.target_hidden(draft, seen.target.hidden, seen.target.aux)
        unused = ((0, 0), (0, state.pending_tokens.shape[1] - hidden.shape[1]))
        tokens = jnp.pad(jnp.maximum(seen.output_tokens, 0), unused)
        return replace(
            state,
            pending_tokens=jnp.where(live[:, None], tokens, state.pending_tokens),
            pending_hidden=jnp.where(
                live[:, None, None], jnp.pad(hidden, (*unused, (0, 0))), state.pending_hidden
            ),
            num_pending=jnp.where(live, seen.num_sampled, state.num_pending),
        )
