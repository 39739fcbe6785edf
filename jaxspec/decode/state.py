"""What a batch of requests carries from round to round, on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import drafts
from jaxspec.cache.arrays import KVCache, init_cache
from jaxspec.config import RoundConfig
from jaxspec.drafts.autoregressive import DraftInputs
from jaxspec.sampling.state import SamplingState


@struct.dataclass
class DecodeState:
    """The resident state, with one row per slot.

    Each program consumes its state (donated) and returns its successor.

    seq_lens:       int32 [batch], tokens in the target's cache
    next_token:     int32 [batch], sampled but not yet cached
    active:         bool [batch], prefilled and not finished; the others are idle rows
    num_generated:  int32 [batch]
    max_tokens:     int32 [batch], where a request ends by length
    stop_token_ids: int32 [batch, stops], where it ends by content, padded with -1
    max_drafts:     int32 [batch], drafts of a round that a request is allowed, read where RoundConfig.limits_drafts
    pending_tokens, pending_hidden, num_pending: the target rows that the draft has not consumed (DraftInputs); None
                    without a draft
    target_caches, draft_caches: a FullCache a layer
    """

    seq_lens: jax.Array
    next_token: jax.Array
    active: jax.Array
    num_generated: jax.Array
    max_tokens: jax.Array
    stop_token_ids: jax.Array
    max_drafts: jax.Array
    sampling: SamplingState
    pending_tokens: jax.Array | None
    pending_hidden: jax.Array | None
    num_pending: jax.Array | None
    target_caches: KVCache
    draft_caches: KVCache


def init_state(
    cfg: RoundConfig,
    sampling: SamplingState,
    max_tokens: jax.Array,
    stop_token_ids: jax.Array,
    num_blocks: int | tuple[int, ...],
    dtype: Any,
) -> DecodeState:
    """An idle state for sampling's batch, over caches of num_blocks blocks: of every KV-cache group, or of each of cfg.cache_groups."""
    batch = max_tokens.shape[0]
    pools = num_blocks if isinstance(num_blocks, tuple) else (num_blocks,) * len(cfg.cache_groups)
    zeros = lambda: jnp.zeros(batch, jnp.int32)  # noqa: E731  (a fresh buffer each: the state is donated)
    pending_tokens = pending_hidden = num_pending = None
    draft_caches: KVCache = ()
    if cfg.draft is not None:
        rows = cfg.num_speculative_tokens + 1
        width = drafts.hidden_width(cfg.draft, cfg.target)
        pending_tokens, num_pending = jnp.zeros((batch, rows), jnp.int32), zeros()
        pending_hidden = jnp.zeros((batch, rows, width), dtype)
        draft_caches = init_cache(
            cfg.draft.attention, cfg.draft.num_layers, pools[cfg.draft_pool], cfg.block_size, dtype
        )
    return DecodeState(
        seq_lens=zeros(),
        next_token=zeros(),
        active=jnp.zeros(batch, bool),
        num_generated=zeros(),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        max_drafts=jnp.full(batch, cfg.num_speculative_tokens, jnp.int32),
        sampling=sampling,
        pending_tokens=pending_tokens,
        pending_hidden=pending_hidden,
        num_pending=num_pending,
        target_caches=init_cache(
            cfg.target.attention,
            cfg.target.num_layers,
            [pools[group] for group in cfg.group_of_layer],
            cfg.block_size,
            dtype,
        ),
        draft_caches=draft_caches,
    )


def pending_rows(state: DecodeState) -> tuple[jax.Array, jax.Array, jax.Array]:
    """pending_tokens, pending_hidden, num_pending of a state that has a draft."""
    assert (
        state.pending_tokens is not None
        and state.pending_hidden is not None
        and state.num_pending is not None
    )
    return state.pending_tokens, state.pending_hidden, state.num_pending


def draft_inputs(state: DecodeState, block_table: jax.Array) -> DraftInputs:
    """The state as propose reads it, with the block table of the draft's group; an idle request has nothing pending."""
    pending_tokens, pending_hidden, num_pending = pending_rows(state)
    return DraftInputs(
        seq_lens=state.seq_lens,
        pending_tokens=pending_tokens,
        pending_hidden=pending_hidden,
        num_pending=jnp.where(state.active, num_pending, 0),
        block_table=block_table,
        sampling=state.sampling,
    )
