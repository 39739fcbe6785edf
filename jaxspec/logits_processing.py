"""From a target's logits to the distribution that a request is sampled from, row by row of the verify window.

The order is that of vLLM's plain sampler: allowed and banned tokens, min_tokens, logit_bias, penalties, temperature, min_p, top-k, top-p.
Row i of a window follows the drafts 0 .. i-1, so it is processed as plain decoding would process it had these drafts been generated: with
them in the counts and their number in the length. (vLLM refuses min_p and logit_bias under speculation.) The draft's own logits are not
processed, except by temperature: q is what the drafts were sampled from, whatever that is, so the output is exact either way.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxspec.config import SamplingFeatures
from jaxspec.sampling import MinTokens, Penalties, SamplingState, scale_by_temperature
from pallas_kernels.truncation import truncate


def process_target_logits(
    features: SamplingFeatures, logits: jax.Array, sampling: SamplingState, positions: jax.Array, draft_tokens: jax.Array | None = None
) -> jax.Array:
    """The whole order. Arguments as adjust_logits takes them; greedy rows come back undivided."""
    return narrow_logits(features, adjust_logits(features, logits, sampling, positions, draft_tokens), sampling)


def adjust_logits(
    features: SamplingFeatures, logits: jax.Array, sampling: SamplingState, positions: jax.Array, draft_tokens: jax.Array | None = None
) -> jax.Array:
    """What comes before temperature, and changes an argmax: masks, bias, min_tokens, penalties.

    logits: float32 [batch, rows, vocab], of which row i predicts the token at positions + i, positions int32 [batch], after the drafts
    0 .. i-1 of draft_tokens, int32 [batch, rows - 1], None for one row. A request that does not use a feature keeps its logits bit for
    bit (0 is 0, whatever its sign).
    """
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


def narrow_logits(features: SamplingFeatures, logits: jax.Array, sampling: SamplingState) -> jax.Array:
    """Temperature, then min_p, top-k and top-p, float32 [batch, rows, vocab]; dropped tokens are -inf."""
    logits = scale_by_temperature(logits, sampling.temperature)
    if features.min_p:
        assert sampling.min_p is not None
        logits = _drop_unlikely(logits, sampling.min_p)
    return truncate(logits, sampling.top_k, sampling.top_p) if features.truncated else logits


def _forbid_ends(logits: jax.Array, min_tokens: MinTokens, positions: jax.Array) -> jax.Array:
    """No token that ends the text before the text's least length."""
    rows, vocab = logits.shape[1:]
    too_short = positions[:, None] + jnp.arange(rows, dtype=jnp.int32) < min_tokens.min_len[:, None]
    ends = jnp.any(min_tokens.stop_token_ids[:, :, None] == jnp.arange(vocab, dtype=jnp.int32), axis=1)
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


def count_tokens(features: SamplingFeatures, sampling: SamplingState, tokens: jax.Array) -> SamplingState:
    """Generated tokens, int32 [batch, n] padded with -1, into the counts that penalties read."""
    if not features.penalties:
        return sampling
    assert sampling.penalties is not None
    counts = sampling.penalties.output_counts
    batch, vocab = counts.shape
    row = jnp.arange(batch, dtype=jnp.int32)[:, None]
    counts = counts.at[row, jnp.where(tokens < 0, vocab, tokens)].add(1, mode="drop")  # -1 would wrap
    return replace(sampling, penalties=replace(sampling.penalties, output_counts=counts))
