"""The round: propose, verify, commit. Plain decoding is the round with nothing proposed."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec import drafts
from jaxspec.cache.metadata import BlockTables
from jaxspec.config import RoundConfig
from jaxspec.decode import adaptive, fallback
from jaxspec.decode.row_budget import share_rows
from jaxspec.decode.state import DecodeState, draft_context
from jaxspec.decode.verify import Verification, verify
from jaxspec.drafts.drafter import Observation, Proposal, no_drafts
from jaxspec.layers.params import Params
from jaxspec.sampling.logits import observe_tokens
from pallas_kernels.rejection_sampling.reference import count_leading


def verify_and_commit(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_tables: BlockTables,
    proposal: Proposal,
) -> tuple[Verification, DecodeState]:
    """Verify a proposal, show the drafter the result, and advance the state.

    A rejection needs no rollback: seq_lens does not pass the rejected rows. They are masked, then
    overwritten.
    """
    target_to_draft = params["draft"].get("target_to_draft") if cfg.draft is not None else None
    is_lookup = None
    if cfg.fallback is not None:
        proposal, is_lookup, state = fallback.fall_back(
            cfg, state, block_tables, proposal, target_to_draft
        )
    if cfg.limits_drafts:
        proposal = limit_drafts(allowed_drafts(cfg, state, is_lookup), proposal)
    active, waited, share = state.active, state.waited, None
    if (budget := cfg.flat_rows(active.shape[0])) is not None:
        assert waited is not None
        is_draft = proposal.draft_tokens >= 0  # placeholders come last
        wanted = jnp.where(active, 1 + is_draft.sum(axis=1, dtype=jnp.int32), 0)
        share = share_rows(wanted, waited, cfg.num_speculative_tokens + 1, budget)
        active, waited = share.num_rows > 0, share.waited
    verification, out = verify(
        cfg,
        params["target"],
        state.next_token,
        proposal,
        state.seq_lens,
        active,
        cfg.target_tables(block_tables),
        state.target_caches,
        state.sampling,
        target_to_draft,
        share,
    )
    may_stop = cfg.draft is not None and drafts.drafter(cfg.draft).may_stop(cfg)
    if state.acceptance is not None or may_stop:
        verification = replace(verification, num_proposed=count_leading(proposal.draft_tokens >= 0))
    if state.acceptance is not None:
        assert verification.num_proposed is not None
        acceptance = adaptive.observe(
            state.acceptance, verification.num_proposed, verification.num_sampled, is_lookup
        )
        verification = replace(verification, is_lookup=is_lookup)
        state = replace(state, acceptance=acceptance)
    draft = state.draft
    if cfg.draft is not None:
        seen = Observation(
            seq_lens=state.seq_lens,
            active=active,
            output_tokens=verification.output_tokens,
            num_sampled=verification.num_sampled,
            block_tables=cfg.draft_tables(block_tables),
            target=out,
        )
        draft = drafts.drafter(cfg.draft).observe(cfg, params["draft"], draft, seen)
        if cfg.fallback is not None:
            state = fallback.observe_text(cfg, state, block_tables, seen)
    seq_lens = state.seq_lens + verification.num_sampled
    state = replace(state, seq_lens=seq_lens, target_caches=out.caches, draft=draft, waited=waited)
    return verification, advance(cfg, state, verification)


def advance(cfg: RoundConfig, state: DecodeState, verification: Verification) -> DecodeState:
    """Take over the last sampled token, count, and end requests at a stop token or max_tokens.

    Tokens that a round samples past a request's end are counted too; nothing reads them.
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
        sampling=observe_tokens(cfg, state.sampling, tokens, cfg.vocab_shards),
    )


def allowed_drafts(cfg: RoundConfig, state: DecodeState, is_lookup: jax.Array | None) -> jax.Array:
    """Return the drafts that each request may have in a round, int32 [batch] from 0 to K.

    is_lookup: bool [batch], whether they are looked up, which costs next to nothing; None where
        none are

    The state is that of the round's begin, so the number never depends on the drafts: verification
    stays exact. Draft i of a round comes from a context of seq_lens + i tokens.
    """
    allowed = jnp.minimum(state.draft_limit, cfg.num_speculative_tokens)
    if state.acceptance is not None:
        worth = adaptive.num_worthwhile(state.acceptance.estimate, state.acceptance.thresholds)
        if is_lookup is not None:
            worth = jnp.where(is_lookup, cfg.num_speculative_tokens, worth)
        allowed = jnp.minimum(allowed, worth)
    if cfg.draft_max_model_len is not None:
        allowed = jnp.minimum(allowed, cfg.draft_max_model_len + 1 - state.seq_lens)
    return jnp.maximum(allowed, 0)


def limit_drafts(allowed: jax.Array, proposal: Proposal) -> Proposal:
    """Replace drafts past the first `allowed` [batch] by placeholders (-1).

    Verification rejects placeholders without bias.
    """
    is_allowed = jnp.arange(proposal.draft_tokens.shape[1], dtype=jnp.int32) < allowed[:, None]
    return replace(proposal, draft_tokens=jnp.where(is_allowed, proposal.draft_tokens, -1))


def decode_round(
    cfg: RoundConfig, params: Params, state: DecodeState, block_tables: BlockTables
) -> tuple[Verification, DecodeState]:
    """Run one round: propose, verify, commit.

    Without a draft this is one step of plain decoding, the oracle that greedy speculative decoding
    has to equal.

    params:       {"target": ..., "draft": ...}
    block_tables: as prefill takes them
    """
    proposal = no_drafts(state.active.shape[0])
    if cfg.draft is not None:
        context = draft_context(cfg, state, block_tables)
        drafter = drafts.drafter(cfg.draft)
        proposal, draft = drafter.propose(cfg, params["draft"], state.draft, context)
        state = replace(state, draft=draft)
    return verify_and_commit(cfg, params, state, block_tables, proposal)
