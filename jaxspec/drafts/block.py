"""Block drafting: one pass makes the hidden states of all drafts, then each token is drawn in turn.

The draft's keys and values of the context come from the target's hidden states, when prefill and
verification have made them. So nothing is pending, and a position's cache entry depends on the
tokens up to it alone. A round runs one pass over the block [next token, mask, mask, ...], at
positions seq_lens and on. Its rows see the context and each other. Their keys lie past seq_lens:
the context of accepted tokens and the next block overwrite them, as happens to rejected rows.

Then lax.fori_loop draws a token after the other. Step i may correct the logits of row i by the
draft before it, so q is exact: each column holds the logits that its token was drawn from. The
corrected logits take the place of the head's, in the same array, if the proposal keeps them. One
kernel may run a step of a vanilla Markov head (BlockFamily.markov_step). It writes the corrected
logits and draws the token or, in greedy rounds, which keep no logits, finds the largest.

A confidence head may end a request's drafts. Its chance of draft i depends on row i and the drafts
before i, so the decision falls before draft i is drawn. Given these drafts, the presence of an i-th
one is independent of its token. Rejection sampling then emits a token by its rule or, for a
placeholder, one of the target's own distribution: the output keeps the target's distribution. A
decision that looked at draft i (its probability, say) would bias it. Block verification recurses
over prefixes, each of which is the end or is not, so the same argument holds for it.
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
    block_metadata,
    build_metadata,
)
from jaxspec.config import Ops, RoundConfig
from jaxspec.drafts import families
from jaxspec.drafts.columns import (
    draw_token,
    empty_tokens,
    noise_key,
    target_token,
    write_column,
    write_token,
)
from jaxspec.drafts.drafter import (
    DraftContext,
    DraftPart,
    Observation,
    PromptChunk,
    Proposal,
    no_drafts,
)
from jaxspec.layers.context import Pass
from jaxspec.layers.markov import Draw
from jaxspec.layers.params import Params
from jaxspec.layers.products import idle_rows
from jaxspec.models import TargetOutput
from jaxspec.sampling.state import STREAMS


@struct.dataclass
class BlockState:
    """The keys and values of every request's context.

    caches: one cache per layer of the draft
    kind:   tells its pytree from NgramState's. PyTreeDefs of different classes are equal if their
            children are, and jit's tables may then give one for the other.
    """

    LARGE: ClassVar[tuple[str, ...]] = ()

    caches: KVCache
    kind: str = struct.field(pytree_node=False, default="block")


@struct.dataclass
class BlockCarry:
    """The carry of the loop over a block's drafts.

    proposal:     the tokens up to this step's column, and where steps correct the logits the array
                  of these, corrected up to it
    token:        int32 [batch], the last draft, or the token before the block
    head_state:   what the head carries from one row to the next (BlockFamily.first_head_state)
    chance:       float32 [batch], of all drafts so far to be accepted; None without a threshold
    num_proposed: int32 [batch], drafts before the chance fell below the threshold; None without one
    """

    proposal: Proposal
    token: jax.Array
    head_state: jax.Array | None
    chance: jax.Array | None
    num_proposed: jax.Array | None


@struct.dataclass
class _Drafted:
    proposal: Proposal
    state: BlockState


def run_block(
    cfg: RoundConfig, params: Params, context: DraftContext, caches: KVCache
) -> tuple[jax.Array, KVCache]:
    """Run the draft over the block; returns the head's inputs [batch, rows, D] and the caches.

    The rows are the round's K that draft, after the anchor's if that one drafts nothing. The block
    may have rows for more drafts (RoundConfig.num_block_drafts).
    """
    draft, K = families.block(cfg.draft), cfg.num_speculative_tokens
    batch = context.next_token.shape[0]
    first = 0 if draft.sample_from_anchor else 1  # row that drafts
    rows = first + (cfg.num_block_drafts or K)
    padding = idle_rows(batch, rows, cfg.draft_ops)
    masks = jnp.full((batch, rows + padding - 1), draft.mask_token_id, jnp.int32)
    tokens = jnp.concatenate([context.next_token[:, None], masks], axis=1)
    metadata = block_metadata(
        cfg.draft_groups,
        context.block_tables,
        context.seq_lens,
        context.active,
        rows,
        padding=padding,
        seen=draft.visibility,
        attention=draft.attention,
        ops=cfg.ops,
    )
    pass_ = Pass(metadata, cfg.draft_ops)
    hidden, caches = families.block_family(draft).forward(params, draft, tokens, pass_, caches)
    return hidden[:, : first + K], caches


def draw_block(
    cfg: RoundConfig,
    params: Params,
    context: DraftContext,
    hidden: jax.Array,
    buffers: Proposal | None = None,
) -> Proposal:
    """Draw K drafts, one after the other, from the head's inputs hidden [batch, rows, D].

    hidden is run_block's. buffers replaces the preallocated tokens (tests poison them).
    """
    draft, K = families.block(cfg.draft), cfg.num_speculative_tokens
    family, batch = families.block_family(draft), hidden.shape[0]
    anchor, hidden = hidden[:, 0], hidden[:, -K:]
    base = family.logits(params, draft, hidden, cfg.draft_ops)
    head_state = family.first_head_state(draft, hidden)
    if head_state is not None and not draft.sample_from_anchor:
        # The head is trained to step over every row. The anchor's row moves the state and drafts
        # nothing, so any logits serve.
        _, head_state = family.step_logits(
            params, draft, base[:, 0], anchor, context.next_token, head_state, cfg.draft_ops
        )
    tokens = empty_tokens(cfg, batch) if buffers is None else buffers.draft_tokens
    has_threshold = draft.confidence_threshold > 0
    # The steps carry the logits that they correct in place. Others are the proposal's as they are.
    in_place = draft.corrects_logits and cfg.keeps_draft_logits
    carry = BlockCarry(
        Proposal(tokens, base if in_place else None),
        context.next_token,
        head_state,
        jnp.ones(batch, jnp.float32) if has_threshold else None,
        jnp.zeros(batch, jnp.int32) if has_threshold else None,
    )
    # The kernel writes into logits that the proposal keeps, and takes the place of gumbel_sample's.
    has_kernel = in_place and cfg.ops.gumbel_sample != "reference"
    draw = draw_of_steps(cfg, context) if has_kernel else None
    step = partial(draw_step, cfg, params, context, hidden, None if in_place else base, draw)
    carry = step(0, carry) if K == 1 else lax.fori_loop(0, K, step, carry)
    proposal = carry.proposal
    if cfg.keeps_draft_logits and not in_place:
        proposal = replace(proposal, draft_logits=base)
    if carry.num_proposed is None:
        return proposal
    is_draft = jnp.arange(K, dtype=jnp.int32) < carry.num_proposed[:, None]
    return replace(proposal, draft_tokens=jnp.where(is_draft, proposal.draft_tokens, -1))


def draw_step(
    cfg: RoundConfig,
    params: Params,
    context: DraftContext,
    hidden: jax.Array,
    base: jax.Array | None,
    draw: Draw | None,
    step: jax.Array | int,
    carry: BlockCarry,
) -> BlockCarry:
    """Draw draft `step` from its row of hidden [batch, K, D] and base [batch, K, draft_vocab].

    base: None if the carried proposal holds it
    draw: for the kernel of a Markov head, where one runs; None: gumbel_sample draws
    """
    draft = families.block(cfg.draft)
    family = families.block_family(draft)
    column = partial(
        lax.dynamic_index_in_dim, index=step, axis=1, keepdims=False, allow_negative_indices=False
    )
    base = carry.proposal.draft_logits if base is None else base
    assert base is not None
    row = column(hidden)
    chance, num_proposed = carry.chance, carry.num_proposed
    if chance is not None and num_proposed is not None:  # before the draft exists: see the module
        confidence = families.confident_family(draft).confidence
        chance = chance * confidence(params, draft, row, carry.token)
        num_proposed = num_proposed + (chance >= draft.confidence_threshold).astype(jnp.int32)
    proposal, head_state, markov = carry.proposal, carry.head_state, None
    if cfg.vocab_shards.is_whole and (draw is not None or not cfg.sampled):
        markov = family.markov_step(params, draft, base, step, carry.token, cfg.draft_ops)
    if markov is None:
        logits, head_state = family.step_logits(
            params, draft, column(base), row, carry.token, head_state, cfg.draft_ops
        )
        token = draw_token(cfg, params, context, step, logits)
        proposal = write_column(proposal, step, token, logits)
    elif draw is not None:
        logits, drafted = markov.drawn(draw)
        token = target_token(cfg, params, drafted)
        proposal = replace(write_token(proposal, step, token), draft_logits=logits)
    else:  # nothing but the largest of the logits is read
        token = target_token(cfg, params, markov.largest())
        proposal = write_token(proposal, step, token)
    return BlockCarry(proposal, token, head_state, chance, num_proposed)


def draw_of_steps(cfg: RoundConfig, context: DraftContext) -> Draw:
    """Return what the kernel of a Markov head draws all tokens of a block with."""
    sampling = context.sampling
    assert cfg.rule != "strict"  # whose position moves with the step, not the offset
    stream, position, _ = noise_key(cfg, context.seq_lens, 0)
    return Draw.of(sampling.temperature, sampling.keys, position, STREAMS[stream])


def propose_part(
    cfg: RoundConfig, params: Params, context: DraftContext, _: Any, state: BlockState
) -> _Drafted:
    return _Drafted(*BlockDrafter().propose(cfg, params, state, context))


@dataclass(frozen=True)
class BlockDrafter:
    """The drafter of methods that draft a block a pass: DFlash and DSpark."""

    lookahead: int = 0  # a position's entry is made of the target's hidden state there
    one_hot: bool = False

    def may_stop(self, cfg: RoundConfig) -> bool:
        """See Drafter."""
        return families.block(cfg.draft).confidence_threshold > 0

    def lag(self, cfg: RoundConfig) -> int:
        """Return 0: observe writes the context of all accepted rows; see Drafter."""
        return 0

    def init(
        self,
        cfg: RoundConfig,
        batch: int,
        num_blocks: tuple[int, ...],
        *,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
    ) -> BlockState:
        """See Drafter."""
        draft = families.block(cfg.draft)
        blocks = [num_blocks[cfg.draft_pools[group]] for group in draft.group_of_layer]
        return BlockState(init_cache(draft.attention, blocks, cfg.block_size, cache_dtype))

    def prefill(
        self,
        cfg: RoundConfig,
        params: Params,
        state: BlockState,
        block_tables: BlockTables,
        chunk: PromptChunk,
        first_token: jax.Array,
        target: TargetOutput,
    ) -> BlockState:
        """Write the context of the chunk's rows; see Drafter."""
        return self._write(
            cfg,
            params,
            state,
            block_tables,
            chunk.start,
            chunk.num_tokens,
            target,
            ops=PREFILL_METADATA_OPS,
        )

    def propose(
        self,
        cfg: RoundConfig,
        params: Params,
        state: BlockState,
        context: DraftContext,
        buffers: Proposal | None = None,
    ) -> tuple[Proposal, BlockState]:
        """See Drafter, and draw_block for the buffers."""
        if cfg.num_speculative_tokens == 0:
            return no_drafts(context.seq_lens.shape[0]), state
        hidden, caches = run_block(cfg, params, context, state.caches)
        return draw_block(cfg, params, context, hidden, buffers), BlockState(caches)

    def parts(self, cfg: RoundConfig) -> tuple[DraftPart, ...]:
        """Return the only part: one pass, and a loop of a few launches; see Drafter."""
        return (propose_part,)

    def observe(
        self, cfg: RoundConfig, params: Params, state: BlockState, seen: Observation
    ) -> BlockState:
        """Write the context of the accepted rows; see Drafter."""
        accepted = jnp.where(seen.active, seen.num_sampled, 0)
        return self._write(
            cfg,
            params,
            state,
            seen.block_tables,
            seen.seq_lens,
            accepted,
            seen.target,
            ops=cfg.ops,
        )

    def _write(
        self,
        cfg: RoundConfig,
        params: Params,
        state: BlockState,
        block_tables: BlockTables,
        start: jax.Array,
        num_rows: jax.Array,
        target: TargetOutput,
        *,
        ops: Ops,
    ) -> BlockState:
        """Write the context of the target's first num_rows [batch] rows, from position start on.

        ops: of the metadata
        """
        draft = families.block(cfg.draft)
        family = families.block_family(draft)
        metadata = build_metadata(
            cfg.draft_groups,
            block_tables,
            start,
            num_rows,
            target.hidden.shape[1],
            attention=draft.attention,
            ops=ops,
        )
        hidden = family.target_hidden(draft, target.hidden, target.aux)
        fused = family.fuse(params, draft, hidden, cfg.draft_ops)
        pass_ = Pass(metadata, cfg.draft_ops)
        return BlockState(family.write_context(params, draft, fused, pass_, state.caches))
