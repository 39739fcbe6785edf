"""The synthetic schedule: how often the "synthetic" rejection rule accepts each draft token.

What the draft proposes has no influence. A config's rate is unconditional: position i and all
before it are accepted (vLLM's synthetic_acceptance_rates). `conditional_rates` turns it into the
rate of position i given that all before it were accepted, which the rejection op takes. Host-side:
plain numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from jaxspec.config import ConfigError, SpeculativeConfig, is_number

# vLLM's first schedule (PR #38045): the conditional rate falls by this factor per position, less
# steeply where the mean needs it.
MIN_DECAY = 0.85


def acceptance_rates(config: SpeculativeConfig) -> tuple[float, ...] | None:
    """Return the conditional rates [K] of a config; None unless its rule is the synthetic one."""
    return resolve(config) if config.rejection_sample_method == "synthetic" else None


def resolve(config: SpeculativeConfig) -> tuple[float, ...]:
    """Return the conditional rates [K] of a config whose rejection_sample_method is "synthetic".

    ConfigError if it states none that fit.
    """
    num_tokens = config.max_k
    if config.synthetic_acceptance_rates is not None:
        rates = config.synthetic_acceptance_rates
        if len(rates) != num_tokens:
            raise ConfigError(
                f"synthetic_acceptance_rates: expected {num_tokens} numbers "
                f"(num_speculative_tokens), got {len(rates)}: {list(rates)}"
            )
        return conditional_rates(rates)
    if config.synthetic_acceptance_length is not None:
        return conditional_rates(rates_from_length(config.synthetic_acceptance_length, num_tokens))
    if config.synthetic_acceptance_rate is not None:
        return conditional_rates(rates_from_mean_rate(config.synthetic_acceptance_rate, num_tokens))
    raise ConfigError(
        "synthetic_acceptance_rates, _length or _rate: expected one of them for the synthetic "
        f"schedule, got none with rejection_sample_method {config.rejection_sample_method!r}"
    )


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return c_0 = p_0 and c_i = p_i / p_{i-1}, 0 after a zero.

    ConfigError unless the rates p lie in [0, 1] and never increase.
    """
    rates = tuple(rates)
    in_range = all(is_number(rate) and 0 <= rate <= 1 for rate in rates)
    if not in_range or any(later > earlier for earlier, later in itertools.pairwise(rates)):
        raise ConfigError(
            "synthetic_acceptance_rates: expected numbers in [0, 1] that do not increase, "
            f"got {list(rates)}"
        )
    return tuple(
        rate / before if before else 0.0
        for before, rate in itertools.pairwise((1.0, *map(float, rates)))
    )


def rates_from_length(length: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Return unconditional rates [K] of mean acceptance length `length`, bonus token included.

    length is in [1, K+1]. Whole drafts are always accepted, the next one at the fractional rate,
    later ones never: 2.6 with K = 3 gives 1, 0.6, 0.
    """
    if not is_number(length) or not 1 <= length <= num_speculative_tokens + 1:
        raise ConfigError(
            "synthetic_acceptance_length: expected a number in "
            f"[1, {num_speculative_tokens + 1}], got {length}"
        )
    return tuple(min(max(float(length) - 1 - i, 0.0), 1.0) for i in range(num_speculative_tokens))


def rates_from_mean_rate(rate: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Return unconditional rates [K] with mean `rate` in [0, 1].

    The mean acceptance length is 1 + K rate. The conditional rate at position i is a0 decay^i, with
    the smallest decay of at least 0.85 that lets a0 stay at or below 1.
    """
    if not is_number(rate) or not 0 <= rate <= 1:
        raise ConfigError(f"synthetic_acceptance_rate: expected a number in [0, 1], got {rate}")
    decay = MIN_DECAY
    if _mean(_geometric(1.0, decay, num_speculative_tokens)) < rate:
        decay = _bisect(
            lambda x: _mean(_geometric(1.0, x, num_speculative_tokens)) >= rate, MIN_DECAY
        )
    first = _bisect(lambda x: _mean(_geometric(x, decay, num_speculative_tokens)) >= rate, 0.0)
    return _geometric(first, decay, num_speculative_tokens)


def _geometric(first: float, decay: float, count: int) -> tuple[float, ...]:
    """Return unconditional rates of the conditional first, first decay, first decay^2, ..."""
    rates, rate = [], 1.0
    for i in range(count):
        rate *= first * decay**i
        rates.append(rate)
    return tuple(rates)


def _bisect(reached: Callable[[float], bool], low: float) -> float:
    """Return the smallest x in [low, 1], to 1e-12, that satisfies the monotone `reached`.

    `reached(1)` must hold.
    """
    high = 1.0
    if reached(low):
        return low
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (low, middle) if reached(middle) else (middle, high)
    return high


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
