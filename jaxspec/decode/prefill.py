"""Prefill: chunks of prompts through target and draft together, and the first token where a prompt ends."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec import drafts, models
from jaxspec.cache.metadata import BlockTables, build_metadata
from jaxspec.config import RoundConfig
from jaxspec.decode.round import advance
from jaxspec.decode.state import DecodeState, pending_rows
from jaxspec.decode.verify import Verification
from jaxspec.layers.params import Params
from jaxspec.layers.products import pick_row
from jaxspec.sampling.logits import process_target_logits
from jaxspec.sampling.logprobs import score_hidden, score_tokens
from jaxspec.sampling.processors.processor import Window
from jaxspec.sampling.state import gumbel_noise, sample


def prefill(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_tables: BlockTables,
    tokens: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
    next_prompt_token: jax.Array,
) -> tuple[Verification, DecodeState]:
    """One chunk of each request's prompt through target and draft together.

    block_tables: int32 [batch, pages], a tuple of those of cfg.cache_groups where there are several.
    tokens: int32 [batch, chunk] at positions start [batch] and on, of which num_tokens [batch] are real (0: this request is
    not in the chunk and does not change). next_prompt_token: int32 [batch], the prompt's next token after the chunk, or -1
    if the prompt ends here. The draft's row of a position pairs the target's hidden state with the token after it: the
    chunk's own next one, for its last row the next prompt token. Only the prompt's very last row stays pending, until the
    token after it is sampled, here. Returns that first token (num_sampled 1 where a prompt ended) and the state.

    A request that has generated already (num_generated above 0: it was preempted) has all its tokens but the last for a prompt; the
    last is its next_token, and nothing is sampled (num_sampled 0).
    """
    family = models.family(cfg.target)
    chunk = tokens.shape[1]
    ends = (num_tokens > 0) & (next_prompt_token < 0)
    last_row = jnp.maximum(num_tokens - 1, 0)
    seq_lens = jnp.where(num_tokens > 0, start + num_tokens, state.seq_lens)
    out = family.forward(
        params["target"],
        cfg.target,
        tokens,
        build_metadata(cfg.target_group, cfg.target_tables(block_tables), start, num_tokens, chunk),
        state.target_caches,
        aux_layers=cfg.draft.aux_layers if cfg.draft else (),
        kernels=cfg.kernels,
    )
    last_hidden = pick_row(out.hidden, last_row)
    raw = family.logits(params["target"], cfg.target, last_hidden, cfg.kernels)
    logits = process_target_logits(cfg, raw, state.sampling, Window(seq_lens))
    noise = (
        gumbel_noise(state.sampling.keys, "sample", seq_lens, 0, cfg.target.vocab_size)
        if cfg.sampled
        else None
    )
    is_new = state.num_generated == 0
    first = jnp.where(is_new, sample(logits[:, 0], noise, state.sampling.greedy), state.next_token)
    verification = Verification(
        jnp.where(ends & is_new, first, -1)[:, None], (ends & is_new).astype(jnp.int32)
    )
    if cfg.logprobs:
        verification = replace(
            verification,
            logprobs=score_tokens(raw, verification.output_tokens, everything=cfg.all_logprobs),
        )
    if cfg.prompt_logprobs:
        logits_of = lambda hidden: family.logits(params["target"], cfg.target, hidden, cfg.kernels)  # noqa: E731
        scores = score_hidden(
            logits_of,
            cfg.target.vocab_size,
            out.hidden,
            _following(tokens, last_row, next_prompt_token),
        )
        verification = replace(verification, prompt_logprobs=scores)
    state = replace(state, seq_lens=seq_lens, target_caches=out.caches)
    if cfg.draft is not None:
        table = cfg.draft_table(block_tables)
        state = _prefill_draft(
            cfg,
            params["draft"],
            state,
            table,
            tokens,
            start,
            num_tokens,
            next_prompt_token,
            ends,
            first,
            out,
        )
    return verification, advance(cfg, replace(state, active=state.active | ends), verification)


def _prefill_draft(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    block_table: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
    next_prompt_token: jax.Array,
    ends: jax.Array,
    first: jax.Array,
    out: models.TargetOutput,
) -> DecodeState:
    """The draft's part of prefill: its rows of the chunk, and the pending row of the prompts that end in it."""
    assert cfg.draft_group is not None
    pending_tokens, pending_hidden, num_pending = pending_rows(state)
    family = drafts.family(cfg.draft)
    last_row = jnp.maximum(num_tokens - 1, 0)
    shifted = _following(tokens, last_row, next_prompt_token)
    rows = num_tokens - ends.astype(jnp.int32)
    hidden = family.target_hidden(cfg.draft, out.hidden, out.aux)
    drafted = family.forward(
        params,
        cfg.draft,
        shifted,
        family.fuse(params, cfg.draft, hidden, cfg.kernels),
        build_metadata(cfg.draft_group, block_table, start, rows, tokens.shape[1]),
        state.draft_caches,
        kernels=cfg.kernels,
    )
    last_hidden = pick_row(hidden, last_row)
    first_only = jnp.arange(pending_tokens.shape[1]) == 0
    return replace(
        state,
        draft_caches=drafted.caches,
        pending_tokens=jnp.where(ends[:, None] & first_only, first[:, None], pending_tokens),
        pending_hidden=jnp.where(
            ends[:, None, None] & first_only[:, None], last_hidden, pending_hidden
        ),
        num_pending=jnp.where(ends, 1, num_pending),
    )


def _following(tokens: jax.Array, last_row: jax.Array, next_prompt_token: jax.Array) -> jax.Array:
    """The token after each of a chunk's rows, int32 [batch, chunk]; 0 after a prompt's very last."""
    is_last = jnp.arange(tokens.shape[1]) == last_row[:, None]
    return jnp.where(
        is_last, jnp.maximum(next_prompt_token, 0)[:, None], jnp.roll(tokens, -1, axis=1)
    )
