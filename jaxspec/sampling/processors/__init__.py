"""The logits processors, in the order in which they apply: that of vLLM's sampler.

processor   LogitsProcessor: the interface, and how to add one
bad_words   words of one or several tokens that a text may not contain
min_tokens  no end of the text before a number of tokens
logit_bias  numbers added to logits; allowed and banned tokens
penalties   repetition, frequency and presence penalties
min_p       tokens less likely than a share of the likeliest
truncation  top-k and top-p
"""

from __future__ import annotations

from typing import Any

from jaxspec.config import SamplingFeatures
from jaxspec.sampling.processors.bad_words import BadWords
from jaxspec.sampling.processors.logit_bias import LogitBias
from jaxspec.sampling.processors.min_p import MinP
from jaxspec.sampling.processors.min_tokens import MinTokens
from jaxspec.sampling.processors.penalties import Penalties
from jaxspec.sampling.processors.processor import LogitsProcessor
from jaxspec.sampling.processors.truncation import Truncation

# They see the model's own logits and may change an argmax, so greedy requests use them too.
BEFORE_TEMPERATURE: tuple[LogitsProcessor[Any], ...] = (
    BadWords(),
    MinTokens(),
    LogitBias(),
    Penalties(),
)
# They see logits divided by temperature and keep the argmax: greedy requests do not need them.
AFTER_TEMPERATURE: tuple[LogitsProcessor[Any], ...] = (
    MinP(),
    Truncation(),
)
PROCESSORS = (*BEFORE_TEMPERATURE, *AFTER_TEMPERATURE)


def active(
    processors: tuple[LogitsProcessor[Any], ...], features: SamplingFeatures
) -> tuple[LogitsProcessor[Any], ...]:
    """Return those of these processors that some request of the batch needs, in their order."""
    return tuple(p for p in processors if p.name in features.processors)
