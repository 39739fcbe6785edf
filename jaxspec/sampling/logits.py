"""From a target's logits to the distribution that a request is sampled from, row by row of the verify window.

The order is that of vLLM's plain sampler: allowed and banned tokens, bad_words, min_tokens, logit_bias, penalties, temperature, min_p,
top-k, top-p. Row i of a window follows the drafts 0 .. i-1, so it is processed as plain decoding would process it had these drafts been
generated: with them in the counts and in the words that a text has begun, and their number in the length. (vLLM refuses min_p and
logit_bias under speculation.) The draft's own logits are not processed, except by temperature: q is what the drafts were sampled from,
whatever that is, so the output is exact either way.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec.config import SamplingFeatures
from jaxspec.sampling.state import (
    BadWords,
    MinTokens,
    Penalties,
    SamplingState,
    scale_by_temperature,
)
from pallas_kernels.truncation import truncate


def process_target_logits(
    features: SamplingFeatures,
    logits: jax.Array,
    sampling: SamplingState,
    positions: jax.Array,
    draft_tokens: jax.Array | None = None,
) -> jax.Array:
    """The whole order. Arguments as adjust_logits takes them; greedy rows come back undivided."""
    return narrow_logits(
        features, adjust_logits(features, logits, sampling, positions, draft_tokens), sampling
    )


def adjust_logits(
    features: SamplingFeatures,
    logits: jax.Array,
    sampling: SamplingState,
    positions: jax.Array,
    draft_tokens: jax.Array | None = None,
) -> jax.Array:
    """What comes before temperature, and changes an argmax: masks, bad words, bias, min_tokens, penalties.

    logits: float32 [batch, rows, vocab], of which row i predicts the token at positions + i, positions int32 [batch], after the drafts
    0 .. i-1 of draft_tokens, int32 [batch, rows - 1], None for one row. A request that does not use a feature keeps its logits bit for
    bit (0 is 0, whatever its sign).
    """
    if features.bad_words:
        assert sampling.bad_words is not None
        logits = _forbid_words(logits, sampling.bad_words, draft_tokens)
    if features.min_tokens:
        assert sampling.min_tokens is not None
        logits = _forbid_ends(logits, sampling.min_tokens, positions)
    if features.logit_bias:
        assert sampling.logit_bias is not None
        logits = logits + sampling.logit_bias[:, None]
    if features.penalties:
        assert sampling.penalties is not None
        logits = _penalise(logits, sampling.penalties, draft_tokens)
    return logits


def narrow_logits(
    features: SamplingFeatures, logits: jax.Array, sampling: SamplingState
) -> jax.Array:
    """Temperature, then min_p, top-k and top-p, float32 [batch, rows, vocab]; dropped tokens are -inf."""
    logits = scale_by_temperature(logits, sampling.temperature)
    if features.min_p:
        assert sampling.min_p is not None
        logits = _drop_unlikely(logits, sampling.min_p)
    return truncate(logits, sampling.top_k, sampling.top_p) if features.truncated else logits


def _forbid_words(logits: jax.Array, words: BadWords, draft_tokens: jax.Array | None) -> jax.Array:
    """Where the generated tokens, the drafts before the row among them, end with a word's other tokens, not its last one."""
    batch, rows, vocab = logits.shape
    tokens = (
        words.recent
        if draft_tokens is None
        else jnp.concatenate([words.recent, draft_tokens], axis=1)
    )
    before = jnp.arange(rows, dtype=jnp.int32)[:, None] + jnp.arange(
        words.recent.shape[1], dtype=jnp.int32
    )
    begun = words.token_ids[
        :, None, :, :-1
    ]  # [batch, 1, words, length - 1] against [batch, rows, 1, length - 1]
    fits = jnp.all((begun < 0) | (begun == tokens[:, before][:, :, None]), axis=-1)
    last = words.token_ids[:, None, :, -1]
    forbidden = jnp.where(fits & (last >= 0), last, vocab)  # -1 would wrap
    request, row = (
        jnp.arange(batch, dtype=jnp.int32)[:, None, None],
        jnp.arange(rows, dtype=jnp.int32)[:, None],
    )
    return logits.at[request, row, forbidden].set(-jnp.inf, mode="drop")


def _forbid_ends(logits: jax.Array, min_tokens: MinTokens, positions: jax.Array) -> jax.Array:
    """No token that ends the text before the text's least length."""
    rows, vocab = logits.shape[1:]
    too_short = positions[:, None] + jnp.arange(rows, dtype=jnp.int32) < min_tokens.min_len[:, None]
    ends = jnp.any(
        min_tokens.stop_token_ids[:, :, None] == jnp.arange(vocab, dtype=jnp.int32), axis=1
    )
    return jnp.where(too_short[:, :, None] & ends[:, None], -jnp.inf, logits)


def _penalise(logits: jax.Array, penalties: Penalties, draft_tokens: jax.Array | None) -> jax.Array:
    """Repetition, frequency and presence penalties, with the window's own drafts counted as the rows that follow them see them."""
    rows, vocab = logits.shape[1:]
    row, token = jnp.arange(rows, dtype=jnp.int32)[:, None], jnp.arange(vocab, dtype=jnp.int32)
    counts = penalties.output_counts[:, None]
    for i in range(rows - 1):
        assert draft_tokens is not None
        counts = counts + ((draft_tokens[:, i, None, None] == token) & (row > i)).astype(jnp.int32)
    generated = counts > 0
    column = lambda x: x[:, None, None]  # noqa: E731
    repetition = column(penalties.repetition)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(generated | penalties.prompt_seen[:, None], repeated, logits)
    logits = logits - column(penalties.frequency) * counts.astype(jnp.float32)
    return logits - column(penalties.presence) * generated.astype(jnp.float32)


def _drop_unlikely(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    """Tokens less likely than min_p times the likeliest; min_p 0 drops none."""
    threshold = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(min_p)[:, None, None]
    return jnp.where((logits < threshold) & (min_p > 0)[:, None, None], -jnp.inf, logits)


def count_tokens(
    features: SamplingFeatures, sampling: SamplingState, tokens: jax.Array
) -> SamplingState:
    """Generated tokens, int32 [batch, n] padded with -1, into what penalties and bad words read of the text."""
    if features.penalties:
        assert sampling.penalties is not None
        sampling = replace(sampling, penalties=_count(sampling.penalties, tokens))
    if features.bad_words:
        assert sampling.bad_words is not None
        sampling = replace(sampling, bad_words=_remember(sampling.bad_words, tokens))
    return sampling


def _count(penalties: Penalties, tokens: jax.Array) -> Penalties:
    counts = penalties.output_counts
    batch, vocab = counts.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    return replace(
        penalties,
        output_counts=counts.at[row, jnp.where(tokens < 0, vocab, tokens)].add(1, mode="drop"),
    )  # -1 would wrap


def _remember(words: BadWords, tokens: jax.Array) -> BadWords:
    """The last tokens of the old ones and these."""
    num_new = (tokens >= 0).sum(axis=1, keepdims=True, dtype=jnp.int32)
    last = num_new + jnp.arange(words.recent.shape[1], dtype=jnp.int32)
    return replace(
        words,
        recent=jnp.take_along_axis(jnp.concatenate([words.recent, tokens], axis=1), last, axis=1),
    )
