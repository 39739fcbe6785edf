"""Prompt lookup: drafts copied from the request's own text, without a model.

The last n tokens of a request's text are looked up in the text before them. The tokens that
followed their latest occurrence are the drafts. The longest n from prompt_lookup_max down to
prompt_lookup_min that occurs wins; without one there are no drafts. (vLLM's "ngram" method;
2304.04487 copies text in the same way.)

The text lies in a paged cache of token ids, addressed by position like keys and values. So a shared
prefix, a preemption and a rejected draft need no special case.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxspec.cache.arrays import TokenCache, init_cache, write_tokens
from jaxspec.cache.metadata import BlockTables, cache_slots
from jaxspec.config import (
    CacheGroup,
    ConfigError,
    RoundConfig,
    SpeculativeConfig,
    TokenHistoryConfig,
    check_options,
)
from jaxspec.drafts.drafter import (
    DraftContext,
    DraftPart,
    Observation,
    PromptChunk,
    Proposal,
    no_drafts,
)
from jaxspec.layers.params import Params
from jaxspec.models import TargetConfig, TargetOutput


@dataclass(frozen=True)
class NgramConfig:
    """Lengths of the token runs that are looked up, longest and shortest."""

    vocab_size: int
    lookup_max: int
    lookup_min: int
    method: str = "ngram"
    num_layers: int = 1  # the text's cache
    group_of_layer: tuple[int, ...] = (0,)
    aux_layers: tuple[int, ...] = ()
    attention: TokenHistoryConfig = field(default_factory=TokenHistoryConfig)

    def cache_groups(self, block_size: int, max_model_len: int) -> tuple[CacheGroup, ...]:
        """Return one group, which keeps the whole text."""
        return (CacheGroup(block_size, max_model_len),)


@struct.dataclass
class NgramState:
    """The text of every request: caches is one TokenCache."""

    LARGE: ClassVar[tuple[str, ...]] = ()

    caches: tuple[TokenCache, ...]


@struct.dataclass
class Drafted:
    proposal: Proposal
    state: NgramState


def _config(cfg: RoundConfig) -> NgramConfig:
    """Return the draft of a round, which is this file's."""
    assert isinstance(cfg.draft, NgramConfig)
    return cfg.draft


def _write(
    cfg: RoundConfig,
    state: NgramState,
    block_tables: BlockTables,
    tokens: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
) -> NgramState:
    """Write the first num_tokens [batch] of tokens [batch, n] at positions start [batch] and on."""
    (group,), (table,) = cfg.draft_groups, block_tables
    slots = cache_slots(group, table, start, num_tokens, tokens.shape[1])
    return NgramState((write_tokens(state.caches[0], tokens, slots),))


def match_lengths(text: jax.Array, length: jax.Array, longest: int) -> jax.Array:
    """Return how many of a text's last tokens, at most longest, occur right before each position.

    text: int32 [batch, positions], of length [batch]. The result is int32 [batch, positions]; 0
    for positions at which no token of the text follows.
    """
    batch, positions = text.shape
    index = jnp.arange(positions, dtype=jnp.int32)
    matches = jnp.broadcast_to(index < length[:, None], (batch, positions))
    count = jnp.zeros((batch, positions), jnp.int32)
    for back in range(1, min(longest, positions) + 1):
        before = jnp.pad(text[:, : positions - back], ((0, 0), (back, 0)), constant_values=-1)
        matches &= (before == at(text, length[:, None] - back)) & (length[:, None] >= back)
        count += matches.astype(jnp.int32)
    return count


def look_up(text: jax.Array, length: jax.Array, K: int, sizes: range) -> jax.Array:
    """Return drafts int32 [batch, K] for texts int32 [batch, positions] of length [batch].

    The first of sizes, which fall, whose run of last tokens occurs before decides. A draft that the
    text does not hold is -1.
    """
    positions = text.shape[1]
    index = jnp.arange(positions, dtype=jnp.int32)
    found = jnp.zeros(text.shape[0], jnp.int32)  # the position after the occurrence; 0 for none
    if sizes:
        count = match_lengths(text, length, sizes[0])
        most = jnp.max(count, axis=1, keepdims=True)
        is_best = (count == most) & (most >= sizes[-1])
        found = jnp.max(jnp.where(is_best, index, 0), axis=1)
    position = found[:, None] + jnp.arange(K, dtype=jnp.int32)
    exists = (found[:, None] > 0) & (position < length[:, None])
    return jnp.where(exists, at(text, position), -1)


def at(text: jax.Array, position: jax.Array) -> jax.Array:
    """Return text [batch, positions] at position [batch, n], or the nearest one in range."""
    return jnp.take_along_axis(text, jnp.clip(position, 0, text.shape[1] - 1), axis=1)


def refuse_others_options(speculative: SpeculativeConfig, method: str) -> None:
    """Raise ConfigError for a draft model, and for options of other methods."""
    if speculative.model is not None:
        raise ConfigError(f"model: expected none with method {method!r}, got {speculative.model!r}")
    check_options(speculative, method)


def look_up_step(
    cfg: RoundConfig, params: Params, context: DraftContext, _: Any, state: NgramState
) -> Drafted:
    return Drafted(*NgramDrafter().propose(cfg, params, state, context))


@dataclass(frozen=True)
class NgramDrafter:
    """The drafter of method "ngram"."""

    lookahead: int = 0  # a position's entry is its own token
    one_hot: bool = True

    def may_stop(self, cfg: RoundConfig) -> bool:
        """Return True: a text may hold fewer drafts, or none; see Drafter."""
        return True

    def lag(self, cfg: RoundConfig) -> int:
        """Return 0: a round writes the text up to next_token; see Drafter."""
        return 0

    def config(self, target: TargetConfig, speculative: SpeculativeConfig) -> NgramConfig:
        """Read the lengths from the speculative config; ConfigError for what it does not read."""
        refuse_others_options(speculative, "ngram")
        return self.settings(target, speculative)

    def settings(self, target: TargetConfig, speculative: SpeculativeConfig) -> NgramConfig:
        """Return the config of this method as a fallback; see ModelFreeDrafter."""
        longest, shortest = speculative.prompt_lookup_max, speculative.prompt_lookup_min
        return NgramConfig(target.vocab_size, longest, shortest)

    def init(
        self,
        cfg: RoundConfig,
        batch: int,
        num_blocks: tuple[int, ...],
        *,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
    ) -> NgramState:
        """See Drafter."""
        blocks = [num_blocks[pool] for pool in cfg.draft_pools]
        return NgramState(init_cache(_config(cfg).attention, blocks, cfg.block_size, cache_dtype))

    def prefill(
        self,
        cfg: RoundConfig,
        params: Params,
        state: NgramState,
        block_tables: BlockTables,
        chunk: PromptChunk,
        first_token: jax.Array,
        target: TargetOutput,
    ) -> NgramState:
        """Write the chunk into the text; see Drafter. propose writes the first token."""
        return _write(cfg, state, block_tables, chunk.tokens, chunk.start, chunk.num_tokens)

    def propose(
        self, cfg: RoundConfig, params: Params, state: NgramState, context: DraftContext
    ) -> tuple[Proposal, NgramState]:
        """See Drafter."""
        batch, K = context.seq_lens.shape[0], cfg.num_speculative_tokens
        is_live = context.active.astype(jnp.int32)
        state = _write(
            cfg, state, context.block_tables, context.next_token[:, None], context.seq_lens, is_live
        )
        if K == 0:
            return no_drafts(batch), state
        text = state.caches[0].tokens[context.block_tables[0]].reshape(batch, -1)
        return Proposal(self.continue_text(cfg, text, context.seq_lens + is_live), None), state

    def continue_text(self, cfg: RoundConfig, text: jax.Array, length: jax.Array) -> jax.Array:
        """Return drafts int32 [batch, K] for texts int32 [batch, positions] of length [batch]."""
        draft = _config(cfg)
        longest = min(draft.lookup_max, text.shape[1])
        sizes = range(longest, draft.lookup_min - 1, -1)
        return look_up(text, length, cfg.num_speculative_tokens, sizes)

    def parts(self, cfg: RoundConfig) -> tuple[DraftPart, ...]:
        """Return the only part; see Drafter."""
        return (look_up_step,)

    def observe(
        self, cfg: RoundConfig, params: Params, state: NgramState, seen: Observation
    ) -> NgramState:
        """Write the round's tokens into the text, after the token that began it; see Drafter.

        The last of them is the next round's first token. propose writes that one, because its
        position may have no block yet.
        """
        tokens = jnp.maximum(seen.output_tokens, 0)
        count = jnp.maximum(seen.num_sampled - 1, 0)
        return _write(cfg, state, seen.block_tables, tokens, seen.seq_lens + 1, count)
