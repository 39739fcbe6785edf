"""The chi-square rule by which tests decide whether sampled tokens follow a distribution."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike

MIN_EXPECTED = 5.0


def chi_square(counts: ArrayLike, probabilities: ArrayLike) -> tuple[float, int]:
    """(statistic, degrees of freedom) of counts [bins] against probabilities [bins], which sum to
    1.

    Bins of expected count below 5 are merged into one (and that one with the smallest other bin
    while it is still below 5). A count where the probability is 0 makes the statistic infinite.
    ValueError when fewer than two bins remain: such a test could not fail.
    """
    counts, probabilities = (
        np.asarray(counts, np.float64).ravel(),
        np.asarray(probabilities, np.float64).ravel(),
    )
    if counts.shape != probabilities.shape or not math.isclose(
        probabilities.sum(), 1.0, abs_tol=1e-6
    ):
        raise ValueError(
            f"expected counts and probabilities of one shape, summing to 1, got {counts.shape} "
            f"and {probabilities.sum()}"
        )
    possible = probabilities > 0
    impossible_seen = counts[~possible].sum() > 0
    expected = probabilities[possible] * counts.sum()
    order = np.argsort(expected)
    expected, counts = expected[order], counts[possible][order]
    small = int((expected < MIN_EXPECTED).sum())
    while 0 < small < expected.size and expected[:small].sum() < MIN_EXPECTED:
        small += 1
    if small:
        expected = np.append(expected[small:], expected[:small].sum())
        counts = np.append(counts[small:], counts[:small].sum())
    if expected.size < 2:
        raise ValueError(
            f"expected at least two bins of {MIN_EXPECTED} or more, got {expected.size} from "
            f"{counts.sum():.0f} counts"
        )
    statistic = math.inf if impossible_seen else float(((counts - expected) ** 2 / expected).sum())
    return statistic, expected.size - 1


def limit(degrees_of_freedom: int) -> float:
    """df + 10 sqrt(2 df): ten standard deviations above the mean, as vLLM's suite has it. A bias,
    not bad luck, gets there."""
    return degrees_of_freedom + 10 * math.sqrt(2 * degrees_of_freedom)


def within_limit(statistic: float, degrees_of_freedom: int) -> bool:
    return statistic < limit(degrees_of_freedom)
