"""The synthetic schedule against cases of vLLM's suite, and against values worked out by hand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.sampling.synthetic import (
    conditional_rates,
    rates_from_length,
    rates_from_mean_rate,
    resolve,
)


def config(num_speculative_tokens: int = 3, **values: Any) -> SpeculativeConfig:
    return SpeculativeConfig(
        num_speculative_tokens=num_speculative_tokens, rejection_sample_method="synthetic", **values
    )


@pytest.mark.parametrize(
    ("rates", "conditional"),
    [
        ([0.9, 0.5, 0.2], [0.9, 0.5 / 0.9, 0.4]),
        ([1, 0.6, 0, 0], [1, 0.6, 0, 0]),
        ([1, 1, 1], [1, 1, 1]),
        ([0, 0], [0, 0]),
        ([], []),
        (np.float32([1, 0.5]), [1, 0.5]),
    ],
)
def test_conditional_rates(rates: list[float], conditional: list[float]) -> None:
    assert conditional_rates(rates) == pytest.approx(tuple(conditional))
    assert all(type(rate) is float for rate in conditional_rates(rates))


@pytest.mark.parametrize(
    "rates", [[0.5, 0.6], [1.1], [-0.1], [float("nan")], [float("inf")], [True], ["0.5"], [None]]
)
def test_impossible_rates_are_an_error(rates: list) -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"synthetic_acceptance_rates: expected numbers in \[0, "
            r"1\] that do not increase, got \["
        ),
    ):
        conditional_rates(rates)


@pytest.mark.parametrize(
    ("length", "num_tokens", "rates"),
    [
        (2.6, 3, [1, 0.6, 0]),
        (1, 3, [0, 0, 0]),
        (4, 3, [1, 1, 1]),
        (2, 3, [1, 0, 0]),
        (3.5, 4, [1, 1, 0.5, 0]),
    ],
)
def test_rates_from_length(length: float, num_tokens: int, rates: list[float]) -> None:
    assert rates_from_length(length, num_tokens) == pytest.approx(tuple(rates))
    assert 1 + sum(rates_from_length(length, num_tokens)) == pytest.approx(length)


@pytest.mark.parametrize("length", [0.99, 4.01, float("nan"), True, "2"])
def test_impossible_length_is_an_error(length: float) -> None:
    with pytest.raises(
        ConfigError, match=r"synthetic_acceptance_length: expected a number in \[1, 4\], got"
    ):
        rates_from_length(length, 3)


@pytest.mark.parametrize(
    ("rate", "first", "decay"),
    [(0.5, 0.753853, 0.85), (0.7, 0.915708, 0.85), (0.8, 0.985763, 0.85), (0.9, 1, 0.920371)],
)
def test_mean_rate_gives_the_recorded_schedule(rate: float, first: float, decay: float) -> None:
    conditional = conditional_rates(rates_from_mean_rate(rate, 3))
    assert conditional == pytest.approx([first, first * decay, first * decay**2], abs=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 7, 10])
def test_mean_rate_is_met(num_tokens: int) -> None:
    for rate in [*np.arange(100) / 100, 1.0]:
        rates = rates_from_mean_rate(float(rate), num_tokens)
        conditional = conditional_rates(rates)
        assert np.mean(rates) == pytest.approx(rate, abs=1e-8)
        assert len(rates) == num_tokens and max(conditional) <= 1
        decays = [
            later / earlier for earlier, later in itertools.pairwise(conditional) if earlier > 0
        ]
        assert all(0.85 - 1e-9 <= decay <= 1 + 1e-9 for decay in decays)
        assert conditional[0] == pytest.approx(1, abs=1e-6) or all(
            decay == pytest.approx(0.85) for decay in decays
        )


@pytest.mark.parametrize("rate", [-0.01, 1.01, float("nan"), "0.5"])
def test_impossible_mean_rate_is_an_error(rate: float) -> None:
    with pytest.raises(
        ConfigError, match=r"synthetic_acceptance_rate: expected a number in \[0, 1\], got"
    ):
        rates_from_mean_rate(rate, 3)


def test_resolve_reads_each_form_of_the_config() -> None:
    assert resolve(config(synthetic_acceptance_rates=(0.9, 0.5, 0.2))) == pytest.approx(
        (0.9, 0.5 / 0.9, 0.4)
    )
    assert resolve(config(synthetic_acceptance_length=2.6)) == pytest.approx((1, 0.6, 0))
    assert resolve(config(synthetic_acceptance_rate=0.5)) == pytest.approx(
        (0.753853, 0.640775, 0.544659), abs=1e-6
    )
    assert resolve(config(num_speculative_tokens=1, synthetic_acceptance_rate=0.0)) == (0.0,)


def test_resolve_rejects_a_wrong_count_and_another_rule() -> None:
    with pytest.raises(
        ConfigError,
        match=(
            r"synthetic_acceptance_rates: expected 3 numbers "
            r"\(num_speculative_tokens\), got 2: \[0.9, 0.5\]"
        ),
    ):
        resolve(config(synthetic_acceptance_rates=(0.9, 0.5)))
    with pytest.raises(
        ConfigError,
        match=r"expected one of them for the synthetic schedule, got none with .*'block'",
    ):
        resolve(SpeculativeConfig(rejection_sample_method="block"))
