"""DecodeState: what a batch of requests carries from round to round, on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxspec import drafts
from jaxspec.cache.arrays import KVCache, init_cache
from jaxspec.cache.metadata import BlockTables
from jaxspec.config import RoundConfig
from jaxspec.decode.adaptive import Acceptance, initial
from jaxspec.drafts.drafter import DraftContext
from jaxspec.drafts.ngram import NgramState
from jaxspec.sampling.state import SamplingState


@struct.dataclass
class DecodeState:
    """The running requests, one per slot. A program consumes its state and returns the successor.

    seq_lens:       int32 [batch], tokens in the target's cache
    next_token:     int32 [batch], sampled but not yet cached
    active:         bool [batch], prefilled and not finished; other slots are idle
    num_generated:  int32 [batch]
    max_tokens:     int32 [batch], where a request ends by length
    stop_token_ids: int32 [batch, stops], where it ends by content, padded with -1
    draft_limit:    int32 [batch], drafts that a request may have in any round; read where
                    RoundConfig.limits_drafts
    sampling:       the requests' sampling parameters
    draft:          the drafter's state (DraftState); None without a draft
    target_caches:  one cache per layer of the target
    text:           the text of every request, for RoundConfig.fallback; None without one
    acceptance:     estimates that choose the number of drafts; None unless RoundConfig.adaptive
    waited:         int32 [batch], rounds in a row that a request has waited for rows of the verify
                    pass; None without RoundConfig.max_num_verify_tokens
    """

    seq_lens: jax.Array
    next_token: jax.Array
    active: jax.Array
    num_generated: jax.Array
    max_tokens: jax.Array
    stop_token_ids: jax.Array
    draft_limit: jax.Array
    sampling: SamplingState
    draft: Any
    target_caches: KVCache
    text: NgramState | None = None
    acceptance: Acceptance | None = None
    waited: jax.Array | None = None


def init_state(
    cfg: RoundConfig,
    sampling: SamplingState,
    max_tokens: jax.Array,
    stop_token_ids: jax.Array,
    num_blocks: tuple[int, ...],
    *,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
) -> DecodeState:
    """Return an idle state for sampling's batch.

    num_blocks:  blocks of the caches, for each of cfg.cache_groups
    dtype:       of the weights and hidden states
    cache_dtype: of keys and values in the target's caches
    """
    batch = max_tokens.shape[0]

    def zeros() -> jax.Array:  # a fresh buffer each, since the state is donated
        return jnp.zeros(batch, jnp.int32)

    draft = None
    if cfg.draft is not None:
        draft = drafts.drafter(cfg.draft).init(
            cfg, batch, num_blocks, dtype=dtype, cache_dtype=cfg.cache_dtype_of_draft(cache_dtype)
        )
    return DecodeState(
        seq_lens=zeros(),
        next_token=zeros(),
        active=jnp.zeros(batch, bool),
        num_generated=zeros(),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        draft_limit=jnp.full(batch, cfg.num_speculative_tokens, jnp.int32),
        sampling=sampling,
        draft=draft,
        target_caches=init_cache(
            cfg.target.attention,
            [num_blocks[group] for group in cfg.target.group_of_layer],
            cfg.block_size,
            cache_dtype,
        ),
        text=None if cfg.fallback is None else _empty_text(cfg, num_blocks, cache_dtype),
        acceptance=initial(batch, cfg.num_speculative_tokens, has_fallback=cfg.fallback is not None)
        if cfg.adaptive
        else None,
        waited=zeros() if cfg.max_num_verify_tokens is not None else None,
    )


def _empty_text(
    cfg: RoundConfig, num_blocks: tuple[int, ...], cache_dtype: DTypeLike
) -> NgramState:
    assert cfg.fallback is not None
    blocks = [num_blocks[pool] for pool in cfg.fallback_pools]
    return NgramState(init_cache(cfg.fallback.attention, blocks, cfg.block_size, cache_dtype))


def draft_context(cfg: RoundConfig, state: DecodeState, block_tables: BlockTables) -> DraftContext:
    """Return the state as a drafter reads it when a round begins."""
    return DraftContext(
        seq_lens=state.seq_lens,
        next_token=state.next_token,
        active=state.active,
        block_tables=cfg.draft_tables(block_tables),
        sampling=state.sampling,
    )
