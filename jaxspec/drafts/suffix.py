"""Suffix matching: drafts voted by the places where the request's text has gone on from its end.

The longest run of last tokens that occurs before is matched, up to a length. All of its occurrences
vote: the most frequent next token is the draft, and those that agree vote on the one after it. The
share of the votes estimates a draft's chance, and drafts end below a threshold. A longer match may
have more drafts, and match and drafts together a depth of tokens at most. (SuffixDecoding,
2411.04975, by a scan of the text instead of a suffix tree; it votes within one request, whose
prompt and output are one text.)
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.config import RoundConfig, SpeculativeConfig
from jaxspec.drafts.drafter import DraftContext, DraftPart
from jaxspec.drafts.ngram import (
    Drafted,
    NgramConfig,
    NgramDrafter,
    NgramState,
    at,
    match_lengths,
    refuse_others_options,
)
from jaxspec.layers.params import Params
from jaxspec.models import TargetConfig


@dataclass(frozen=True)
class SuffixConfig(NgramConfig):
    """Limits of suffix matching; lookup_max is the longest match.

    max_tree_depth:  tokens of a match and its drafts together, at most
    max_spec_factor: drafts for each token of the match, at most
    min_token_prob:  the chance, by the votes, below which drafts end
    """

    max_tree_depth: int = 24
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1
    method: str = "suffix"


def vote(text: jax.Array, length: jax.Array, K: int, cfg: SuffixConfig) -> jax.Array:
    """Return drafts int32 [batch, K] for texts int32 [batch, positions] of length [batch].

    A draft that is not made is -1. Of tokens with as many votes, the smallest id wins.
    """
    batch, positions = text.shape
    index = jnp.arange(positions, dtype=jnp.int32)
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    count = match_lengths(text, length, cfg.lookup_max)
    longest = jnp.max(count, axis=1)
    votes = (count == longest[:, None]) & (longest[:, None] >= cfg.lookup_min)
    most = jnp.floor(cfg.max_spec_factor * longest.astype(jnp.float32))
    most = jnp.minimum(most, (cfg.max_tree_depth - longest).astype(jnp.float32))

    def draft(
        carry: tuple[jax.Array, jax.Array, jax.Array], step: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], jax.Array]:
        votes, chance, goes_on = carry
        position = index + step
        votes &= position < length[:, None]
        tokens = at(text, jnp.broadcast_to(position, (batch, positions)))
        tally = jnp.zeros((batch, cfg.vocab_size), jnp.int32)
        tally = tally.at[row, tokens].add(votes.astype(jnp.int32))
        token, winners = jnp.argmax(tally, axis=1).astype(jnp.int32), jnp.max(tally, axis=1)
        total = jnp.maximum(votes.sum(axis=1, dtype=jnp.int32), 1)
        chance = chance * winners.astype(jnp.float32) / total.astype(jnp.float32)
        goes_on &= (winners > 0) & (chance >= cfg.min_token_prob)
        goes_on &= step.astype(jnp.float32) < most
        return (votes & (tokens == token[:, None]), chance, goes_on), jnp.where(goes_on, token, -1)

    start = votes, jnp.ones(batch, jnp.float32), jnp.ones(batch, bool)
    _, drafts = lax.scan(draft, start, jnp.arange(K, dtype=jnp.int32))
    return drafts.T


def longest_match(K: int, max_tree_depth: int, max_spec_factor: float) -> int:
    """Return the longest match that leaves room for as many drafts as any; 0 if none leaves room.

    A longer one would have fewer, since match and drafts share max_tree_depth.
    """
    numbers = range(1, min(K, max_tree_depth - 1) + 1)
    # A match that leaves room for n drafts has to be long enough for them, too.
    most = bisect_left(numbers, True, key=lambda n: max_spec_factor * (max_tree_depth - n) < n)
    return max_tree_depth - most if most else 0


def vote_step(
    cfg: RoundConfig, params: Params, context: DraftContext, _: object, state: NgramState
) -> Drafted:
    return Drafted(*SuffixDrafter().propose(cfg, params, state, context))


@dataclass(frozen=True)
class SuffixDrafter(NgramDrafter):
    """The drafter of method "suffix"; its state is the text, as prompt lookup's is."""

    def config(self, target: TargetConfig, speculative: SpeculativeConfig) -> SuffixConfig:
        """Read the limits from the speculative config; ConfigError for what it does not read."""
        refuse_others_options(speculative, "suffix")
        return self.settings(target, speculative)

    def settings(self, target: TargetConfig, speculative: SpeculativeConfig) -> SuffixConfig:
        """See NgramDrafter."""
        depth = speculative.suffix_decoding_max_tree_depth
        factor = speculative.suffix_decoding_max_spec_factor
        return SuffixConfig(
            target.vocab_size,
            lookup_max=longest_match(speculative.max_k, depth, factor),
            lookup_min=1,
            max_tree_depth=depth,
            max_spec_factor=factor,
            min_token_prob=speculative.suffix_decoding_min_token_prob,
        )

    def continue_text(self, cfg: RoundConfig, text: jax.Array, length: jax.Array) -> jax.Array:
        """See NgramDrafter."""
        assert isinstance(cfg.draft, SuffixConfig)
        return vote(text, length, cfg.num_speculative_tokens, cfg.draft)

    def parts(self, cfg: RoundConfig) -> tuple[DraftPart, ...]:
        """Return the only part; see Drafter."""
        return (vote_step,)
