"""The fallback: drafts looked up in a request's own text while its head's drafts do not pay.

Both proposals are made, and each slot takes one of them, by its text and its acceptance before the
round. So the drafts that are judged do not choose where they come from. If the text holds no
continuation, the head's drafts stay, since they are made already. A drafter without a model keeps
the text (jaxspec.drafts.ngram). Its drafts are certain: q is 1 for each.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec import drafts
from jaxspec.cache.metadata import BlockTables
from jaxspec.config import RoundConfig
from jaxspec.decode.adaptive import falls_back
from jaxspec.decode.state import DecodeState, draft_context
from jaxspec.drafts.drafter import Drafter, Observation, PromptChunk, Proposal
from jaxspec.models import TargetOutput

NO_CHANCE = -1e30  # the logit of a token that is not drafted; finite at every usual temperature


def lookup(cfg: RoundConfig) -> tuple[RoundConfig, Drafter]:
    """Return the round with the fallback for its draft, and its drafter."""
    assert cfg.fallback is not None
    own = replace(
        cfg, draft=cfg.fallback, draft_groups=cfg.fallback_groups, fallback=None, fallback_groups=()
    )
    return own, drafts.drafter(cfg.fallback)


def prefill_text(
    cfg: RoundConfig,
    state: DecodeState,
    block_tables: BlockTables,
    chunk: PromptChunk,
    first_token: jax.Array,
    target: TargetOutput,
) -> DecodeState:
    """Write a chunk of prompts into the text."""
    own, drafter = lookup(cfg)
    tables = cfg.fallback_tables(block_tables)
    text = drafter.prefill(own, {}, state.text, tables, chunk, first_token, target)
    return replace(state, text=text)


def observe_text(
    cfg: RoundConfig, state: DecodeState, block_tables: BlockTables, seen: Observation
) -> DecodeState:
    """Write a round's tokens into the text."""
    own, drafter = lookup(cfg)
    seen = replace(seen, block_tables=cfg.fallback_tables(block_tables))
    return replace(state, text=drafter.observe(own, {}, state.text, seen))


def fall_back(
    cfg: RoundConfig,
    state: DecodeState,
    block_tables: BlockTables,
    proposal: Proposal,
    target_to_draft: jax.Array | None,
) -> tuple[Proposal, jax.Array, DecodeState]:
    """Give the slots whose head does not pay looked-up drafts instead of the head's.

    If q is read and the head has a vocabulary of its own, their drafts end before a token that
    it lacks: its logits have no place for it. Returns the slots too, bool [batch].
    """
    own, drafter = lookup(cfg)
    context = replace(
        draft_context(cfg, state, block_tables), block_tables=cfg.fallback_tables(block_tables)
    )
    found, text = drafter.propose(own, {}, state.text, context)
    tokens, logits, ids = found.draft_tokens, proposal.draft_logits, found.draft_tokens
    if logits is not None and target_to_draft is not None:
        ids = jnp.where(tokens >= 0, target_to_draft[jnp.maximum(tokens, 0)], -1)
        goes_on = jnp.cumprod((ids >= 0).astype(jnp.int32), axis=1) > 0
        tokens = jnp.where(goes_on, tokens, -1)
    assert state.acceptance is not None and state.acceptance.break_even is not None
    is_lookup = falls_back(state.acceptance.estimate, state.acceptance.break_even)
    is_lookup &= (tokens >= 0).any(axis=1)
    if logits is not None:
        is_token = cfg.vocab_shards.ids(logits.shape[2]) == ids[:, :, None]
        certain = jnp.where(is_token, 0.0, NO_CHANCE)
        logits = jnp.where(is_lookup[:, None, None], certain, logits)
    tokens = jnp.where(is_lookup[:, None], tokens, proposal.draft_tokens)
    return Proposal(tokens, logits), is_lookup, replace(state, text=text)
