"""Log-probabilities of tokens and of the likeliest alternatives.

They are those of the model's own logits before any processing, as in vLLM. The device scores rows
that a prefill or a round has computed anyway. The host makes dictionaries of a request's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jaxspec.sampling.loop_rows import map_rows, scan_rows
from jaxspec.sampling.params import MAX_LOGPROBS
from jaxspec.sampling.state import argmax
from pallas_kernels.vocab_shards import (
    WHOLE,
    VocabShards,
    add_in_order,
    exponential_sum,
    log_sum_exp,
)

# float32 logits that score_hidden holds at a time: a chunk of a prompt has more rows than a round.
PIECE_BYTES = 256 << 20


@struct.dataclass
class Scores:
    """Scores of the tokens of each row.

    logprob:      float32 [batch, rows], of the row's token
    rank:         int32 [batch, rows], how many tokens are as likely or likelier
    top_ids:      int32 [batch, rows, MAX_LOGPROBS or vocab], the likeliest tokens in their order
    top_logprobs: float32, as top_ids, their log-probabilities
    """

    logprob: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


@dataclass(slots=True)
class Logprob:
    """The score of one token.

    logprob: natural logarithm of its probability
    rank: 1 for the likeliest token
    decoded_token: the tokenizer's text of the token by itself: a part of a character is U+FFFD,
        and a SentencePiece token has no leading blank. None without a tokenizer, and for a token
        that it does not decode
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


def score_tokens(
    logits: jax.Array,
    tokens: jax.Array,
    shards: VocabShards = WHOLE,
    *,
    everything: bool = False,
) -> Scores:
    """Score tokens int32 [batch, rows] under raw float32 logits [batch, rows, vocab].

    The scores of rows with token -1 have no meaning. everything: list the whole vocabulary, not
    just MAX_LOGPROBS tokens.

    Rows that are cut over devices take 2 exchanges. With `everything` it is 1, of whole rows: the
    result is as large.
    """
    if everything:
        logits, shards = shards.whole_rows(logits), WHOLE
    if not shards.is_whole:
        return _score_pieces(logits, tokens, shards)
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, jnp.maximum(tokens, 0)[..., None], axis=-1)
    top, top_ids = top_of(logits, logits.shape[-1] if everything else MAX_LOGPROBS)
    return Scores(
        logprob=(chosen - normaliser)[..., 0],
        rank=jnp.sum(logits >= chosen, axis=-1, dtype=jnp.int32),
        top_ids=top_ids,
        top_logprobs=top - normaliser,
    )


def _score_pieces(logits: jax.Array, tokens: jax.Array, shards: VocabShards) -> Scores:
    """Score tokens under the own piece of each row, [batch, rows, size].

    The likeliest tokens are among the likeliest of each piece. The pieces' candidates lie in the
    order of their ids, so lax.top_k takes equal ones in that order, too.
    """
    top, index = top_of(logits, MAX_LOGPROBS)
    tops, ids, chosen, best, total = shards.gather(
        (
            top,
            index + shards.first_id(logits.shape[-1]),
            shards.at_token(logits, jnp.maximum(tokens, 0)),
            *exponential_sum(logits),
        )
    )
    chosen, normaliser = jnp.max(chosen, axis=0), log_sum_exp(best, total)[..., None]
    tops, ids = (jnp.concatenate(list(x), axis=-1) for x in (tops, ids))
    top, place = lax.top_k(tops, min(MAX_LOGPROBS, tops.shape[-1]))
    likelier = jnp.sum(logits >= chosen[..., None], axis=-1, dtype=jnp.int32)
    return Scores(
        logprob=chosen - normaliser[..., 0],
        rank=add_in_order(shards.gather(likelier)),
        top_ids=jnp.take_along_axis(ids, place, axis=-1),
        top_logprobs=top - normaliser,
    )


def top_of(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return the largest logits and their indices, [batch, rows, count or vocab]; see lax.top_k."""
    vocab = logits.shape[-1]
    if count >= vocab:
        values, index = lax.top_k(logits, vocab)
    else:
        values, index = lax.platform_dependent(
            cpu=lambda: tuple(lax.top_k(logits, count)), default=lambda: likeliest(logits, count)
        )
    return values, index


def likeliest(logits: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return lax.top_k of [batch, rows, vocab] in `count` passes that only read the logits.

    On a GPU lax.top_k sorts the vocabulary.
    """
    flat = logits.reshape(-1, logits.shape[-1])
    index = jnp.arange(logits.shape[-1], dtype=jnp.int32)

    def step(
        _: jax.Array, last: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        value, at = last
        left = (flat < value) | ((flat == value) & (index > at))
        at = argmax(jnp.where(left, flat, -jnp.inf))[:, None]
        found = (jnp.take_along_axis(flat, at, axis=-1), at)
        return found, found

    start = (
        jnp.full((flat.shape[0], 1), jnp.inf, flat.dtype),
        jnp.full((flat.shape[0], 1), -1, jnp.int32),
    )
    values, ids = scan_rows(step, start, count)[0]
    values, ids = (x[..., 0].T.reshape(*logits.shape[:-1], count) for x in (values, ids))
    return values, ids


def score_hidden(
    logits_of: Callable[[jax.Array], jax.Array],
    num_logits: int,
    hidden: jax.Array,
    tokens: jax.Array,
    shards: VocabShards = WHOLE,
) -> Scores:
    """Score tokens by the logits of hidden [batch, rows, D], a piece of the rows at a time.

    num_logits: the tokens of a row that a device holds
    """
    batch, rows = tokens.shape
    size = max(1, min(rows, PIECE_BYTES // (4 * batch * num_logits)))

    def split(x: jax.Array) -> jax.Array:
        """Reshape [batch, rows, ...] to [pieces, batch, size, ...]."""
        padded = jnp.pad(x, [(0, 0), (0, -rows % size), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(batch, -1, size, *x.shape[2:]), 1, 0)

    pieces = map_rows(
        lambda piece: score_tokens(logits_of(piece[0]), piece[1], shards),
        (split(hidden), split(tokens)),
    )
    return jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, -1, *x.shape[3:])[:, :rows], pieces
    )


def logprobs_of(
    scores: Scores, row: int, tokens: Sequence[int], num_logprobs: int
) -> list[dict[int, Logprob]]:
    """Return a dictionary for each of these tokens, which the first columns of a row score.

    scores holds NumPy arrays. A dictionary has the token itself, then the num_logprobs likeliest
    tokens (-1: all).
    """
    found, listed = [], None if num_logprobs < 0 else num_logprobs
    for i, token in enumerate(tokens):
        place = {token: Logprob(float(scores.logprob[row, i]), int(scores.rank[row, i]))}
        top = zip(scores.top_ids[row, i, :listed], scores.top_logprobs[row, i], strict=False)
        for rank, (other, logprob) in enumerate(top, start=1):
            place.setdefault(int(other), Logprob(float(logprob), rank))
        found.append(place)
    return found
