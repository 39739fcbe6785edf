"""Drafting with an independent model (draft_model.py): the draft step, and the compiled loop.

The draft reads tokens alone, so its cache entry of a position depends on the tokens up to it. A
round feeds it next_token at position seq_lens, then each of its drafts but the last. So it has read
all that the round accepts, unless all K drafts are accepted. Then the last draft stays unread, and
step 0 of the next round reads it before next_token. Step 0 always has two rows, the first real ones
of which are these, so that the program needs no answer from the host. Rejected rows lie past
seq_lens, are masked, and are overwritten.

Steps 1 .. K-1 run one row a request inside lax.fori_loop, as autoregressive.py's do.
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
from jaxspec.drafts import draft_model
from jaxspec.drafts.columns import proposal_buffers, write_step
from jaxspec.drafts.draft_model import DraftModelConfig
from jaxspec.drafts.drafter import (
    DraftContext,
    DraftPart,
    Observation,
    PromptChunk,
    Proposal,
    no_drafts,
)
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params
from jaxspec.layers.products import pick_row
from jaxspec.models import TargetOutput

ROWS = 2  # of step 0


@struct.dataclass
class IndependentState:
    """The token that the draft has not read, and the draft's caches.

    unread: int32 [batch], the token at position seq_lens - 1 if the draft has not read it, else -1
    caches: one cache per layer of the draft
    """

    LARGE: ClassVar[tuple[str, ...]] = ()

    unread: jax.Array
    caches: KVCache


@struct.dataclass
class IndependentCarry:
    """The carry of the draft loop after a step; also the one between parts of a proposal.

    proposal: the preallocated arrays, written up to this step's column
    token:    int32 [batch], the step's draft, the input of the next step
    state:    the drafter's, whose caches hold the step's rows
    """

    proposal: Proposal
    token: jax.Array
    state: IndependentState


def _config(cfg: RoundConfig) -> DraftModelConfig:
    """Return the draft of a round, which is an independent model."""
    assert isinstance(cfg.draft, DraftModelConfig)
    return cfg.draft


@partial(jax.jit, static_argnames="cfg")
def draft_step(
    params: Params,
    tokens: jax.Array,
    pass_: Pass,
    caches: KVCache,
    last_row: jax.Array,
    *,
    cfg: DraftModelConfig,
) -> tuple[jax.Array, KVCache]:
    """Run the draft once over tokens int32 [batch, rows].

    Returns the float32 logits [batch, draft_vocab] of the row last_row int32 [batch], and the
    caches.
    """
    hidden, caches = draft_model.forward(params, cfg, tokens, pass_, caches)
    head_input = pick_row(hidden, last_row)[:, 0]
    return draft_model.logits(params, cfg, head_input, pass_.ops), caches


def read_unread(
    cfg: RoundConfig, state: IndependentState, context: DraftContext
) -> tuple[jax.Array, jax.Array, Pass]:
    """Return the tokens [batch, 2] of step 0, the last real row [batch] of each request, its pass.

    They are the unread token, if there is one, and next_token.
    """
    has_unread = (state.unread >= 0).astype(jnp.int32)
    tokens = jnp.where(
        has_unread[:, None] > 0,
        jnp.stack([state.unread, context.next_token], axis=1),
        context.next_token[:, None],
    )
    metadata = build_metadata(
        cfg.draft_groups,
        context.block_tables,
        context.seq_lens - has_unread,
        jnp.where(context.active, 1 + has_unread, 0),
        ROWS,
        attention=_config(cfg).attention,
        ops=cfg.ops,
    )
    return tokens, has_unread, Pass(metadata, cfg.draft_ops)


def first_step(
    cfg: RoundConfig,
    params: Params,
    state: IndependentState,
    context: DraftContext,
    buffers: Proposal | None = None,
) -> IndependentCarry:
    """Run step 0, which drafts the first token from next_token's row."""
    tokens, last_row, pass_ = read_unread(cfg, state, context)
    logits, caches = draft_step(params, tokens, pass_, state.caches, last_row, cfg=_config(cfg))
    buffers = buffers or proposal_buffers(cfg, tokens.shape[0])
    proposal, token = write_step(cfg, params, context, 0, logits, buffers)
    return IndependentCarry(proposal, token, replace(state, caches=caches))


def next_step(
    cfg: RoundConfig,
    params: Params,
    context: DraftContext,
    step: jax.Array | int,
    carry: IndependentCarry,
) -> IndependentCarry:
    """Run step 1 .. K-1: rebuild the metadata, read the last draft, write column `step`."""
    metadata = rebuild_draft_metadata(
        cfg.draft_groups,
        context.block_tables,
        context.seq_lens + 1,  # step 0 has read next_token
        context.active.astype(jnp.int32),
        step,
        attention=_config(cfg).attention,
        ops=cfg.ops,
    )
    logits, caches = draft_step(
        params,
        carry.token[:, None],
        Pass(metadata, cfg.draft_ops),
        carry.state.caches,
        jnp.zeros_like(carry.token),
        cfg=_config(cfg),
    )
    proposal, token = write_step(cfg, params, context, step, logits, carry.proposal)
    return IndependentCarry(proposal, token, replace(carry.state, caches=caches))


def first_part(
    cfg: RoundConfig, params: Params, context: DraftContext, _: Any, state: IndependentState
) -> IndependentCarry:
    return first_step(cfg, params, state, context)


@dataclass(frozen=True)
class Independent:
    """The drafter of method "draft_model"."""

    lookahead: int = 0  # a position's entry is made of the tokens up to it
    one_hot: bool = False

    def may_stop(self, cfg: RoundConfig) -> bool:
        """Return False: every step drafts; see Drafter."""
        return False

    def lag(self, cfg: RoundConfig) -> int:
        """Return 1: the last draft of a round that accepts all of them; see Drafter."""
        return 1

    def init(
        self,
        cfg: RoundConfig,
        batch: int,
        num_blocks: tuple[int, ...],
        *,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
    ) -> IndependentState:
        """See Drafter."""
        draft = _config(cfg)
        blocks = [num_blocks[cfg.draft_pools[group]] for group in draft.group_of_layer]
        return IndependentState(
            unread=jnp.full(batch, -1, jnp.int32),
            caches=init_cache(draft.attention, blocks, cfg.block_size, cache_dtype),
        )

    def prefill(
        self,
        cfg: RoundConfig,
        params: Params,
        state: IndependentState,
        block_tables: BlockTables,
        chunk: PromptChunk,
        first_token: jax.Array,
        target: TargetOutput,
    ) -> IndependentState:
        """Run the draft over the chunk's tokens; see Drafter. Nothing stays unread."""
        draft = _config(cfg)
        metadata = build_metadata(
            cfg.draft_groups,
            block_tables,
            chunk.start,
            chunk.num_tokens,
            chunk.tokens.shape[1],
            attention=draft.attention,
            ops=PREFILL_METADATA_OPS,
        )
        pass_ = Pass(metadata, cfg.draft_ops)
        _, caches = draft_model.forward(params, draft, chunk.tokens, pass_, state.caches)
        return IndependentState(jnp.where(chunk.num_tokens > 0, -1, state.unread), caches)

    def propose(
        self,
        cfg: RoundConfig,
        params: Params,
        state: IndependentState,
        context: DraftContext,
        buffers: Proposal | None = None,
    ) -> tuple[Proposal, IndependentState]:
        """See Drafter. buffers replaces the preallocated arrays (tests poison them)."""
        K = cfg.num_speculative_tokens
        if K == 0:
            tokens, _, pass_ = read_unread(cfg, state, context)
            _, caches = draft_model.forward(params, _config(cfg), tokens, pass_, state.caches)
            return no_drafts(tokens.shape[0]), replace(state, caches=caches)
        carry = first_step(cfg, params, state, context, buffers)
        if K > 1:
            carry = lax.fori_loop(1, K, partial(next_step, cfg, params, context), carry)
        return carry.proposal, carry.state

    def parts(self, cfg: RoundConfig) -> tuple[DraftPart, ...]:
        """Return step 0, then steps 1 .. K-1; see Drafter."""
        return (first_part, *(next_step,) * (cfg.num_speculative_tokens - 1))

    def observe(
        self, cfg: RoundConfig, params: Params, state: IndependentState, seen: Observation
    ) -> IndependentState:
        """Keep the last draft of a round that accepted all of them; see Drafter.

        A round without drafts has read next_token, the only token that it adds to the cache.
        """
        K = cfg.num_speculative_tokens
        unread = jnp.full_like(state.unread, -1)
        if K > 0:
            unread = jnp.where(seen.num_sampled == K + 1, seen.output_tokens[:, K - 1], unread)
        return replace(state, unread=jnp.where(seen.active, unread, state.unread))
