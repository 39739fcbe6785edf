"""Acceptance figures of one case with their standard errors, by bootstrap over prompts.

Differences are paired, prompt by prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.tools.acceptance.lengths import by_range
from jaxspec.tools.acceptance.rounds import Counts

RESAMPLES = 2000


@dataclass(frozen=True)
class Case:
    """A measured case: drafts "greedy" or "probabilistic" (sampled), rule of SpeculativeConfig."""

    dataset: str
    temperature: float
    rule: str
    drafts: str
    num_speculative_tokens: int

    @property
    def name(self) -> str:
        rule = (
            "greedy"
            if self.temperature == 0
            else f"{self.rule}, {'sampled' if self.drafts == 'probabilistic' else 'greedy'} drafts"
        )
        return (
            f"{self.dataset}, T = {self.temperature:g}, {rule}, K = {self.num_speculative_tokens}"
        )


@dataclass(frozen=True)
class Result:
    case: Case
    counts: Counts

    def to_dict(self) -> dict[str, Any]:
        """Return the sums of each prompt, from which all else can be computed, and the figures."""
        counts = {
            k: {r: v.tolist() for r, v in x.items()} if isinstance(x, dict) else x.tolist()
            for k, x in vars(self.counts).items()
            if x is not None
        }
        return {"case": vars(self.case), "figures": figures(self), "counts_per_prompt": counts}

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Result:
        counts = record["counts_per_prompt"]
        arrays: dict[str, Any] = {
            k: {r: np.asarray(v) for r, v in x.items()} if isinstance(x, dict) else np.asarray(x)
            for k, x in counts.items()
        }
        return cls(Case(**record["case"]), Counts(**{"prompt_tokens": None, **arrays}))


Weights = np.ndarray  # [resamples, prompts] how often each prompt is drawn
Statistic = Callable[[Counts, Weights], np.ndarray]  # -> [resamples, ...]


def per_position(counts: Counts, weights: Weights) -> np.ndarray:
    """[resamples, K] the share of rounds that accept drafts 0..i."""
    return (weights @ counts.accepted) / (weights @ counts.rounds)[:, None]


def expected_per_position(rule: str) -> Statistic:
    return lambda counts, weights: (
        (weights @ counts.expected[rule]) / (weights @ counts.rounds)[:, None]
    )


def on_the_same_rounds(rule: str) -> Statistic:
    """Return [resamples], the mean length that theory expects of a rule on any rule's rounds.

    block's closed form is given all drafts. Its difference to probabilistic's given all drafts is
    less noisy than itself.
    """

    def statistic(counts: Counts, weights: Weights) -> np.ndarray:
        signs = (
            {"block": 1, "given_drafts": -1, "probabilistic": 1} if rule == "block" else {rule: 1}
        )
        return 1 + np.sum(
            [
                sign * expected_per_position(name)(counts, weights).sum(axis=1)
                for name, sign in signs.items()
            ],
            axis=0,
        )

    return statistic


def length(counts: Counts, weights: Weights) -> np.ndarray:
    """[resamples] mean acceptance length: 1 + accepted drafts a round."""
    return 1 + per_position(counts, weights).sum(axis=1)


def rate(counts: Counts, weights: Weights) -> np.ndarray:
    """[resamples] accepted drafts over drafted ones."""
    return per_position(counts, weights).mean(axis=1)


def excess(rule: str) -> Statistic:
    """Measured minus expected accepted drafts a round: 0 in the mean."""
    return lambda counts, weights: (
        length(counts, weights) - 1 - expected_per_position(rule)(counts, weights).sum(axis=1)
    )


def estimate(statistic: Statistic, counts: Counts) -> np.ndarray:
    return statistic(counts, np.ones((1, len(counts.rounds))))[0]


def standard_error(statistic: Statistic, *samples: Counts) -> np.ndarray:
    """Of the statistic; of two samples over the same prompts, of its difference."""
    prompts = len(samples[0].rounds)
    weights = (
        np.random.default_rng(0)
        .multinomial(prompts, np.full(prompts, 1 / prompts), RESAMPLES)
        .astype(np.float64)
    )
    values = [statistic(counts, weights) for counts in samples]
    return np.std(values[0] if len(values) == 1 else values[0] - values[1], axis=0)


def minus(a: Statistic, b: Statistic) -> Statistic:
    return lambda counts, weights: a(counts, weights) - b(counts, weights)


def measured_figures(counts: Counts) -> dict[str, Any]:
    """Return the figures of what rounds accepted, as shares, not percent.

    per_position is unconditional (it never increases).
    """
    return {
        "num_prompts": len(counts.rounds),
        "num_rounds": int(counts.rounds.sum()),
        "num_output_tokens": int(counts.tokens.sum()),
        "mean_acceptance_length": float(estimate(length, counts)),
        "mean_acceptance_length_standard_error": float(standard_error(length, counts)),
        "acceptance_rate": float(estimate(rate, counts)),
        "acceptance_rate_standard_error": float(standard_error(rate, counts)),
        "per_position": estimate(per_position, counts).tolist(),
        "per_position_standard_error": standard_error(per_position, counts).tolist(),
    }


def by_prompt_length(counts: Counts) -> dict[str, Counts]:
    """Return the counts of the prompts of each range of lengths (lengths.RANGES) with rounds.

    Empty if the lengths are not known.
    """
    if counts.prompt_tokens is None:
        return {}
    parts = {name: counts.select(i) for name, i in by_range(counts.prompt_tokens).items()}
    return {name: part for name, part in parts.items() if part.rounds.sum()}


def figures(result: Result) -> dict[str, Any]:
    """Return measured_figures of a case, of each range of prompt lengths, and what is expected."""
    counts, rule = result.counts, result.case.rule
    positions = estimate(per_position, counts)
    parts = by_prompt_length(counts)
    found: dict[str, Any] = {
        **measured_figures(counts),
        "by_prompt_length": {name: measured_figures(part) for name, part in parts.items()},
        "per_position_given_the_ones_before": [
            float(p / q) if q else 0.0
            for p, q in zip(positions, [1.0, *positions[:-1]], strict=True)
        ],
    }
    if counts.expected:
        for name in counts.expected:
            found[f"expected_per_position_{name}"] = estimate(
                expected_per_position(name), counts
            ).tolist()
        found["measured_minus_expected_length"] = float(estimate(excess(rule), counts))
        found["measured_minus_expected_length_standard_error"] = float(
            standard_error(excess(rule), counts)
        )
        found |= text_check(counts)
    return found


def text_check(counts: Counts) -> dict[str, float]:
    """Test whether the text is the target's.

    If it is, -log p minus the entropy of p has mean 0 over the text's tokens. Returns the mean,
    and its distance from 0 in standard errors (those of a sum of martingale differences).
    """
    tokens, difference = (
        counts.tokens.sum() - len(counts.tokens),
        (counts.surprise - counts.entropy).sum(),
    )
    squares = counts.squares.sum()
    return {
        "surprise_minus_entropy": float(difference / max(tokens, 1)),
        "surprise_minus_entropy_standard_errors": float(difference / np.sqrt(squares))
        if squares
        else 0.0,
    }
