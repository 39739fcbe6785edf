"""The round: propose, verify, commit. Plain decoding is the round with nothing proposed."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp

from jaxspec import drafts
from jaxspec.cache.metadata import BlockTables
from jaxspec.config import RoundConfig
from jaxspec.decode.state import DecodeState, draft_inputs, pending_rows
from jaxspec.decode.verify import Verification, verify
from jaxspec.drafts.autoregressive import Proposal, consume_pending, propose
from jaxspec.layers.params import Params
from jaxspec.sampling.logits import observe_tokens


def verify_and_commit(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_tables: BlockTables,
    proposal: Proposal,
) -> tuple[Verification, DecodeState]:
    """Judge a proposal, then advance: seq_lens by what was accepted plus one, pending rows for the draft, finished requests.

    The state may have more pending rows than this round has drafts (K was chosen by the batch's size).

    A rejection needs no rollback: seq_lens does not pass the rejected rows, so they are masked, then overwritten.
    """
    if cfg.limits_drafts:
        proposal = limit_drafts(cfg, state, proposal)
    verification, out = verify(
        cfg,
        params["target"],
        state.next_token,
        proposal,
        state.seq_lens,
        state.active,
        cfg.target_tables(block_tables),
        state.target_caches,
        state.sampling,
        params["draft"].get("target_to_draft") if cfg.draft is not None else None,
    )
    live = state.active
    state = replace(
        state, seq_lens=state.seq_lens + verification.num_sampled, target_caches=out.caches
    )
    if cfg.draft is not None:
        # Row i of this pass is position seq_lens + i, and output_tokens[i] is the token after it: just the pairs
        # that the draft reads next, rejected rows masked by num_pending.
        hidden = drafts.family(cfg.draft).target_hidden(cfg.draft, out.hidden, out.aux)
        pending_tokens, pending_hidden, num_pending = pending_rows(state)
        unused = pending_tokens.shape[1] - hidden.shape[1]
        tokens = jnp.pad(jnp.maximum(verification.output_tokens, 0), ((0, 0), (0, unused)))
        state = replace(
            state,
            pending_tokens=jnp.where(live[:, None], tokens, pending_tokens),
            pending_hidden=jnp.where(
                live[:, None, None], jnp.pad(hidden, ((0, 0), (0, unused), (0, 0))), pending_hidden
            ),
            num_pending=jnp.where(live, verification.num_sampled, num_pending),
        )
    return verification, advance(cfg, state, verification)


def advance(cfg: RoundConfig, state: DecodeState, verification: Verification) -> DecodeState:
    """Take over the last sampled token, count, and end requests at a stop token or max_tokens.

    What a round sampled past a request's end is counted too; nothing reads it.
    """
    tokens, num_sampled = verification.output_tokens, verification.num_sampled
    sampled = num_sampled > 0
    last = jnp.take_along_axis(tokens, jnp.maximum(num_sampled - 1, 0)[:, None], axis=1)[:, 0]
    num_generated = state.num_generated + num_sampled
    stopped = jnp.any(
        (tokens[:, :, None] == state.stop_token_ids[:, None, :]) & (tokens[:, :, None] >= 0),
        axis=(1, 2),
    )
    return replace(
        state,
        next_token=jnp.where(sampled, last, state.next_token),
        num_generated=num_generated,
        active=state.active & ~stopped & (num_generated < state.max_tokens),
        sampling=observe_tokens(cfg, state.sampling, tokens),
    )


def limit_drafts(cfg: RoundConfig, state: DecodeState, proposal: Proposal) -> Proposal:
    """Placeholders (-1), which verification rejects without bias, for the drafts past max_drafts and past the draft's own context.

    Draft i of a round comes from a context of seq_lens + i tokens.
    """
    most = state.max_drafts
    if cfg.draft_max_model_len is not None:
        most = jnp.minimum(most, cfg.draft_max_model_len + 1 - state.seq_lens)
    allowed = jnp.arange(proposal.draft_tokens.shape[1], dtype=jnp.int32) < most[:, None]
    return replace(proposal, draft_tokens=jnp.where(allowed, proposal.draft_tokens, -1))


def no_proposal(batch: int) -> Proposal:
    """What plain decoding verifies: K = 0."""
    return Proposal(jnp.zeros((batch, 0), jnp.int32), None)


def decode_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Verification, DecodeState]:
    """propose, verify, commit. params: {"target": ..., "draft": ...}; block_tables as prefill takes them. Without a draft this is one step
    of plain decoding, the oracle that greedy speculative decoding has to equal."""
    if cfg.num_speculative_tokens == 0:
        if (
            cfg.draft is not None
        ):  # it reads its pending rows, to be up to date when it drafts again
            inputs = draft_inputs(state, cfg.draft_table(block_tables))
            state = replace(
                state,
                draft_caches=consume_pending(cfg, params["draft"], inputs, state.draft_caches),
            )
        return verify_and_commit(
            cfg, params, state, block_tables, no_proposal(state.active.shape[0])
        )
    carry = propose(
        cfg, params["draft"], draft_inputs(state, cfg.draft_table(block_tables)), state.draft_caches
    )
    return verify_and_commit(
        cfg, params, replace(state, draft_caches=carry.caches), block_tables, carry.proposal
    )
