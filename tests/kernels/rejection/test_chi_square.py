"""The chi-square helper tells a true sample from a slightly wrong one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from tests.support.statistics import chi_square, within_limit


def test_equals_scipy_where_no_bin_is_merged() -> None:
    counts = np.random.default_rng(0).multinomial(1000, [0.1, 0.2, 0.3, 0.4])
    statistic, df = chi_square(counts, [0.1, 0.2, 0.3, 0.4])
    assert statistic == pytest.approx(
        stats.chisquare(counts, 1000 * np.array([0.1, 0.2, 0.3, 0.4])).statistic
    )
    assert df == 3


def test_small_bins_are_merged_into_one_of_at_least_five() -> None:
    # expected 90, 6, 2, 2: the last two make 4, so 6 joins them
    assert chi_square([80, 10, 5, 5], [0.9, 0.06, 0.02, 0.02]) == (
        pytest.approx(10**2 / 90 + 10**2 / 10),
        1,
    )
    assert chi_square([88, 2, 2, 4, 4], [0.88, 0.03, 0.03, 0.03, 0.03]) == (0.0, 1)


def test_true_samples_are_within_and_wrong_ones_are_not() -> None:
    p = np.random.default_rng(1).dirichlet(np.ones(64))
    wrong = np.roll(p, 1) * 0.05 + p * 0.95
    assert within_limit(*chi_square(np.random.default_rng(2).multinomial(200_000, p), p))
    assert not within_limit(*chi_square(np.random.default_rng(2).multinomial(200_000, wrong), p))


def test_an_impossible_count_is_infinite() -> None:
    assert chi_square([50, 50, 1], [0.5, 0.5, 0.0]) == (math.inf, 1)
    assert not within_limit(math.inf, 1)


@pytest.mark.parametrize(("counts", "p"), [([3, 3], [0.5, 0.5]), ([100], [1.0])])
def test_a_test_that_could_not_fail_is_refused(counts: list[int], p: list[float]) -> None:
    with pytest.raises(ValueError, match="expected at least two bins"):
        chi_square(counts, p)


def test_probabilities_must_sum_to_one() -> None:
    with pytest.raises(ValueError, match="summing to 1"):
        chi_square([50, 50], [0.5, 0.6])
