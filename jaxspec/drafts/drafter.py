"""Drafter: how a method drafts, and what it keeps of each request between rounds.

The round calls `propose`, verifies the proposal, then calls `observe` with the result. Prefill
calls `prefill`. A drafter owns its state; the rest of the engine moves it between slots and hands
it back.

To add a method: one file with a config, a state and a Drafter, and a line in drafts/__init__.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import DTypeLike

from jaxspec.cache.arrays import KVCache
from jaxspec.cache.metadata import BlockTables
from jaxspec.config import DraftConfig, RoundConfig, SpeculativeConfig, TargetConfig
from jaxspec.layers.params import Params
from jaxspec.models import TargetOutput
from jaxspec.sampling.state import SamplingState


@struct.dataclass
class Proposal:
    """The drafts of a round.

    draft_tokens: int32 [batch, K], target ids; -1 where there is no draft
    draft_logits: float32 [batch, K, draft_vocab] before temperature, the own piece of each row
                  (RoundConfig.vocab_shards); None where drafts are one-hot or the rejection rule
                  does not read q
    """

    draft_tokens: jax.Array
    draft_logits: jax.Array | None


@struct.dataclass
class DraftContext:
    """The state of the batch when a round begins.

    seq_lens:     int32 [batch], tokens in the target's cache; it keys the round's random streams
    next_token:   int32 [batch], sampled but not cached: the token at position seq_lens
    active:       bool [batch], False for an idle slot
    block_tables: int32 [batch, pages] of each of the draft's KV-cache groups
    sampling:     the requests' sampling parameters
    """

    seq_lens: jax.Array
    next_token: jax.Array
    active: jax.Array
    block_tables: BlockTables
    sampling: SamplingState


@struct.dataclass
class PromptChunk:
    """One chunk of each request's prompt.

    tokens:     int32 [batch, chunk]
    start:      int32 [batch], position of the chunk's first token
    num_tokens: int32 [batch], real tokens; 0 for a request that is not in the chunk
    next_token: int32 [batch], the prompt's token after the chunk; -1 where the prompt ends here
    """

    tokens: jax.Array
    start: jax.Array
    num_tokens: jax.Array
    next_token: jax.Array

    @property
    def ends(self) -> jax.Array:
        """bool [batch], whether the prompt ends in this chunk."""
        return (self.num_tokens > 0) & (self.next_token < 0)

    @property
    def last_row(self) -> jax.Array:
        """int32 [batch], index of the last real token."""
        return jnp.maximum(self.num_tokens - 1, 0)

    @property
    def following(self) -> jax.Array:
        """int32 [batch, chunk], the token after each of the chunk's; 0 after a prompt's last."""
        is_last = jnp.arange(self.tokens.shape[1]) == self.last_row[:, None]
        after_chunk = jnp.maximum(self.next_token, 0)[:, None]
        return jnp.where(is_last, after_chunk, jnp.roll(self.tokens, -1, axis=1))


@struct.dataclass
class Observation:
    """The result of a verified round.

    seq_lens:      int32 [batch], tokens in the target's cache before the round
    active:        bool [batch], the requests that took part
    output_tokens: int32 [batch, K+1], padded with -1; token i is at position seq_lens + 1 + i
    num_sampled:   int32 [batch], real output tokens
    block_tables:  int32 [batch, pages] of each of the draft's KV-cache groups
    target:        the target's pass, whose row i is position seq_lens + i
    """

    seq_lens: jax.Array
    active: jax.Array
    output_tokens: jax.Array
    num_sampled: jax.Array
    block_tables: BlockTables
    target: TargetOutput


class DraftState(Protocol):
    """A drafter's state: a flax struct whose arrays have one row per slot, but for `caches`.

    caches: one cache per layer of the draft, shared by all slots
    LARGE:  names of the fields that a round writes in place; their memory is donated

    Without its caches, its pytree must differ from every other drafter's; see BlockState.kind.
    """

    LARGE: ClassVar[tuple[str, ...]]

    @property
    def caches(self) -> KVCache: ...


class Drafted(Protocol):
    """The carry of the last draft part."""

    @property
    def proposal(self) -> Proposal: ...
    @property
    def state(self) -> Any: ...


# (cfg, draft params, context, index of the part, carry) -> carry. The first part's carry is the
# drafter's state; the last part returns a Drafted.
DraftPart = Callable[[RoundConfig, Params, DraftContext, Any, Any], Any]


class Drafter(Protocol):
    """One way to draft. All methods but `parts` are traced into the programs of prefill and round.

    lookahead: tokens after its own that the cache entry of a position depends on (EAGLE reads the
    next token: 1). A prefix block is shared only where these tokens are equal too.
    one_hot: whether drafts are certain (q is 1 for the draft), so that no logits are kept.
    """

    @property
    def lookahead(self) -> int: ...
    @property
    def one_hot(self) -> bool: ...

    def may_stop(self, cfg: RoundConfig) -> bool:
        """Return whether a request may get fewer than K drafts, with -1 for the others."""
        ...

    def lag(self, cfg: RoundConfig) -> int:
        """Return the most tokens of the target's cache that lack an entry here after a round.

        The next round writes their entries. So their blocks are neither freed nor shared.
        """
        ...

    def init(
        self,
        cfg: RoundConfig,
        batch: int,
        num_blocks: tuple[int, ...],
        *,
        dtype: DTypeLike,
        cache_dtype: DTypeLike,
    ) -> DraftState:
        """Return an empty state.

        num_blocks:  its caches' blocks, for each of cfg.cache_groups
        dtype:       of the weights and hidden states
        cache_dtype: of keys and values in its caches
        """
        ...

    def prefill(
        self,
        cfg: RoundConfig,
        params: Params,
        state: Any,
        block_tables: BlockTables,
        chunk: PromptChunk,
        first_token: jax.Array,
        target: TargetOutput,
    ) -> Any:
        """Take in a chunk of prompts.

        first_token: int32 [batch], for the requests whose prompt ends in the chunk
        target:      the target's pass over the chunk
        """
        ...

    def propose(
        self, cfg: RoundConfig, params: Params, state: Any, context: DraftContext
    ) -> tuple[Proposal, Any]:
        """Draft cfg.num_speculative_tokens tokens per request.

        With 0, only bring the state up to date.
        """
        ...

    def parts(self, cfg: RoundConfig) -> tuple[DraftPart, ...]:
        """Return `propose` in parts, which compilation mode "step" compiles one by one."""
        ...

    def observe(self, cfg: RoundConfig, params: Params, state: Any, seen: Observation) -> Any:
        """Take in the result of a round."""
        ...


class ModelFreeDrafter(Drafter, Protocol):
    """A drafter without weights, which needs no checkpoint."""

    def config(self, target: TargetConfig, speculative: SpeculativeConfig) -> DraftConfig:
        """Return the config that drafts for this target."""
        ...

    def settings(self, target: TargetConfig, speculative: SpeculativeConfig) -> DraftConfig:
        """Return the same config for a fallback, beside the options of a head."""
        ...


def no_drafts(batch: int) -> Proposal:
    """Return a proposal without drafts: K = 0."""
    return Proposal(jnp.zeros((batch, 0), jnp.int32), None)
