"""vLLM's plain sampler up to the draw, in float64, one token at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxspec.sampling.params import SamplingParams


def specification(
    params: SamplingParams,
    logits: np.ndarray,
    prompt: Sequence[int],
    text: Sequence[int],
    eos_token_ids: Sequence[int] = (),
) -> np.ndarray:
    """The logits that the token after prompt + text is sampled from, float64 [vocab]; dropped
    tokens are -inf."""
    x = logits.astype(np.float64)
    vocab = len(x)
    if params.allowed_token_ids is not None:
        x[[t for t in range(vocab) if t not in params.allowed_token_ids]] = -np.inf
    x[list(params.banned_token_ids)] = -np.inf
    for *begun, last in params.bad_words_token_ids:
        if [*text][len(text) - len(begun) :] == begun and len(begun) <= len(text):
            x[last] = -np.inf
    if len(text) < params.min_tokens:
        x[[*eos_token_ids, *params.stop_token_ids]] = -np.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in {*prompt, *text}:
        x[token] = (
            x[token] / params.repetition_penalty
            if x[token] > 0
            else x[token] * params.repetition_penalty
        )
    for token in text:
        x[token] -= params.frequency_penalty
    for token in set(text):
        x[token] -= params.presence_penalty
    if params.greedy:
        return x
    x = x / params.temperature
    p = softmax(x)
    x[p < params.min_p * p.max()] = -np.inf
    if params.top_k > 0:
        x[x < np.sort(x)[-params.top_k]] = -np.inf
    order = np.argsort(-x, kind="stable")
    kept = (
        order[: int(np.searchsorted(np.cumsum(softmax(x)[order]), params.top_p)) + 1]
        if params.top_p < 1
        else order
    )
    return np.where(np.isin(np.arange(vocab), kept), x, -np.inf)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
