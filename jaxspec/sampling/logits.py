"""From a target's logits to the distribution that a request is sampled from.

The order is that of vLLM's plain sampler: allowed and banned tokens, bad_words, min_tokens,
logit_bias, penalties, temperature, min_p, top-k, top-p (jaxspec.sampling.processors). Row i of a
verify window follows the drafts 0 .. i-1. It is processed as plain decoding would process it after
these drafts: they count as generated tokens. (vLLM refuses min_p and logit_bias under speculation.)

The draft's own logits are divided by temperature and not processed otherwise. q is the distribution
that the drafts were sampled from, whatever it is, so the output is exact either way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax

from jaxspec.config import SamplingFeatures
from jaxspec.sampling.processors import (
    AFTER_TEMPERATURE,
    BEFORE_TEMPERATURE,
    PROCESSORS,
    active,
)
from jaxspec.sampling.processors.processor import LogitsProcessor, Window, unsplit
from jaxspec.sampling.state import SamplingState, scale_by_temperature
from pallas_kernels.traced_once import traced_once
from pallas_kernels.vocab_shards import WHOLE, VocabShards


def process_target_logits(
    features: SamplingFeatures, logits: jax.Array, sampling: SamplingState, window: Window
) -> jax.Array:
    """Apply all processors and temperature to logits float32 [batch, rows, vocab].

    Greedy rows are not divided.
    """
    logits = adjust_logits(features, logits, sampling, window)
    return truncate_logits(features, logits, sampling, window)


def adjust_logits(
    features: SamplingFeatures, logits: jax.Array, sampling: SamplingState, window: Window
) -> jax.Array:
    """Apply what precedes temperature and may change an argmax.

    logits: float32 [batch, rows, vocab]. A request keeps its logits bit for bit through a processor
    that only its neighbours use.
    """
    for processor in active(BEFORE_TEMPERATURE, features):
        logits = _apply(processor, sampling.processors[processor.name], logits, window)
    return logits


def truncates(features: SamplingFeatures) -> bool:
    """Return whether some processor needs logits that are already divided by temperature."""
    return bool(active(AFTER_TEMPERATURE, features))


def truncate_logits(
    features: SamplingFeatures, logits: jax.Array, sampling: SamplingState, window: Window
) -> jax.Array:
    """Divide by temperature, then apply what follows it; dropped tokens are -inf."""
    logits = scale_by_temperature(logits, sampling.temperature)
    for processor in active(AFTER_TEMPERATURE, features):
        logits = _apply(processor, sampling.processors[processor.name], logits, window)
    return logits


@traced_once("processor")
def _apply(
    processor: LogitsProcessor[Any], state: Any, logits: jax.Array, window: Window
) -> jax.Array:
    return processor.apply(state, logits, window)


def observe_tokens(
    features: SamplingFeatures,
    sampling: SamplingState,
    tokens: jax.Array,
    shards: VocabShards = WHOLE,
) -> SamplingState:
    """Return the state after these committed tokens, int32 [batch, n] padded with -1.

    shards: how the states' axes "vocab" are cut over devices (LogitsProcessor.axes).
    """
    changed = {
        p.name: p.observe(sampling.processors[p.name], tokens, shards)
        for p in active(PROCESSORS, features)
    }
    return replace(sampling, processors=sampling.processors | changed) if changed else sampling


def state_axes(sampling: SamplingState) -> SamplingState:
    """Return the logical axes of each array (jaxspec.parallel.axes) in the state's structure."""
    axes = {p.name: p.axes(sampling.processors[p.name]) for p in _held(sampling)}
    return replace(jax.tree.map(unsplit, replace(sampling, processors={})), processors=axes)


def has_large_state(sampling: SamplingState) -> bool:
    """Return whether a round writes arrays [batch, vocab] of the state."""
    return any(p.large_state for p in _held(sampling))


def _held(sampling: SamplingState) -> list[LogitsProcessor[Any]]:
    """Return the processors that have a state here."""
    return [p for p in PROCESSORS if p.name in sampling.processors]
