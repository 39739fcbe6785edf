"""The host's half of sampling: a request's parameters as rows of a SamplingState, for the slots that it is admitted to."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingFeatures
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.state import BadWords, MinTokens, Penalties, SamplingState

NEUTRAL = SamplingParams(temperature=0)


def ends_of(params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """The tokens that min_tokens holds back: as in vLLM, end-of-text among them even where ignore_eos is set."""
    return tuple(sorted({*eos_token_ids, *params.stop_token_ids}))


def words_shape(params: Iterable[SamplingParams]) -> tuple[int, int]:
    """The most bad words that one of these requests has, and the tokens of the longest; at least 1 and 1."""
    words = [p.bad_words_token_ids for p in params]
    return max([1, *map(len, words)]), max([1, *(len(word) for each in words for word in each)])


def sampling_rows(
    features: SamplingFeatures,
    params: Sequence[SamplingParams],
    seeds: Sequence[int],
    prompt_token_ids: Sequence[Sequence[int]],
    generated_token_ids: Sequence[Sequence[int]],
    *,
    vocab_size: int,
    eos_token_ids: Collection[int] = (),
    num_stops: int = 1,
    words: tuple[int, int] | None = None,
    batch: int | None = None,
) -> SamplingState:
    """NumPy rows of these requests, then neutral ones up to `batch`; of a structure that depends on features alone.

    features: the round's, which may hold more than these requests use. seeds: integers, of which the low 64 bits count.
    generated_token_ids: empty for a new request; all that a preempted one has generated, the token that is not cached yet included.
    num_stops: at least the length of ends_of each. words: at least words_shape of them, which None takes. The ids are in range
    (SamplingParams.check_vocabulary).
    """
    idle = (batch or len(params)) - len(params)
    words = words or words_shape(params)
    columns = (
        [*params, *[NEUTRAL] * idle],
        [*seeds, *[0] * idle],
        [*prompt_token_ids, *[()] * idle],
        [*generated_token_ids, *[()] * idle],
    )
    rows = [
        _row(
            features,
            *request,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            num_stops=num_stops,
            words=words,
        )
        for request in zip(*columns, strict=True)
    ]
    return jax.tree.map(lambda *x: np.stack(x), *rows)


def _row(
    features: SamplingFeatures,
    params: SamplingParams,
    seed: int,
    prompt: Sequence[int],
    generated: Sequence[int],
    *,
    vocab_size: int,
    eos_token_ids: Collection[int],
    num_stops: int,
    words: tuple[int, int],
) -> SamplingState:
    """One request's row, without the batch axis."""
    row: dict[str, Any] = {
        "keys": np.array([seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32),
        "temperature": np.float32(params.temperature),
        "top_k": np.int32(0 if params.greedy else max(params.top_k, 0)),
        "top_p": np.float32(1 if params.greedy else params.top_p),
    }
    if features.min_p:
        row["min_p"] = np.float32(0 if params.greedy else params.min_p)
    if features.logit_bias:
        row["logit_bias"] = _dense_bias(params, vocab_size)
    if features.penalties:
        row["penalties"] = Penalties(
            repetition=np.float32(params.repetition_penalty),  # type: ignore[arg-type]
            presence=np.float32(params.presence_penalty),  # type: ignore[arg-type]
            frequency=np.float32(params.frequency_penalty),  # type: ignore[arg-type]
            output_counts=np.bincount(np.asarray(generated, np.int64), minlength=vocab_size).astype(
                np.int32
            ),  # type: ignore[arg-type]
            prompt_seen=np.bincount(np.asarray(prompt, np.int64), minlength=vocab_size) > 0,  # type: ignore[arg-type]
        )
    if features.min_tokens:
        ends = ends_of(params, eos_token_ids)
        stops = np.full(num_stops, -1, np.int32)
        stops[: len(ends)] = ends
        row["min_tokens"] = MinTokens(
            np.int32(len(prompt) + params.min_tokens if params.min_tokens else 0), stops
        )  # type: ignore[arg-type]
    if features.bad_words:
        row["bad_words"] = _words_and_recent(params, generated, *words)
    return SamplingState(**row)


def _words_and_recent(
    params: SamplingParams, generated: Sequence[int], num_words: int, length: int
) -> BadWords:
    token_ids, recent = (
        np.full((num_words, length), -1, np.int32),
        np.full(length - 1, -1, np.int32),
    )
    for row, word in enumerate(params.bad_words_token_ids):
        token_ids[row, length - len(word) :] = word
    known = min(len(generated), length - 1)
    recent[length - 1 - known :] = generated[len(generated) - known :]
    return BadWords(token_ids, recent)  # type: ignore[arg-type]


def _dense_bias(params: SamplingParams, vocab_size: int) -> np.ndarray:
    """float32 [vocab]: what is added to the logits, -inf where a token is forbidden."""
    bias = np.zeros(vocab_size, np.float32)
    if params.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(params.allowed_token_ids)] = 0
    bias[list(params.banned_token_ids)] = -np.inf
    for token, value in params.logit_bias.items():
        bias[token] += value
    return bias


def with_features(
    features: SamplingFeatures,
    sampling: SamplingState,
    *,
    vocab_size: int,
    num_stops: int = 1,
    words: tuple[int, int] = (1, 1),
) -> SamplingState:
    """A device's state in the structure that features ask for: what is new is neutral in every row, what nobody needs any more is dropped.

    The requests that are running keep what they use, so the host need not know what the rounds in flight have generated: where words of
    others are longer, their own need no tokens from before.
    """
    batch = sampling.temperature.shape[0]
    neutral = sampling_rows(
        features,
        [NEUTRAL],
        [0],
        [()],
        [()],
        vocab_size=vocab_size,
        num_stops=num_stops,
        words=words,
    )
    fill = lambda x: jnp.broadcast_to(jnp.asarray(x), (batch, *x.shape[1:]))  # noqa: E731  (one row crosses to the device)
    kept: dict[str, Any] = {}
    for name in ("min_p", "logit_bias", "penalties", "min_tokens", "bad_words"):
        held, wanted = getattr(sampling, name), getattr(neutral, name)
        kept[name] = (
            None if wanted is None else jax.tree.map(fill, wanted) if held is None else held
        )
    if kept["min_tokens"] is not None:
        ids = kept["min_tokens"].stop_token_ids
        padded = jnp.pad(ids, ((0, 0), (0, max(0, num_stops - ids.shape[1]))), constant_values=-1)
        kept["min_tokens"] = replace(kept["min_tokens"], stop_token_ids=padded)
    if kept["bad_words"] is not None:
        held = kept["bad_words"]
        more, longer = (max(0, n - m) for n, m in zip(words, held.token_ids.shape[1:], strict=True))
        token_ids = jnp.pad(held.token_ids, ((0, 0), (0, more), (longer, 0)), constant_values=-1)
        kept["bad_words"] = BadWords(
            token_ids, jnp.pad(held.recent, ((0, 0), (longer, 0)), constant_values=-1)
        )
    return replace(sampling, **kept)
