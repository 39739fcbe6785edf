"""Acceptance counts and timings, as vLLM defines them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpecDecodeMetrics:
    """What became of the drafts, of one request or of an engine.

    num_drafts: rounds that proposed, one per request and round. num_draft_tokens: K of each. num_accepted_tokens:
    accepted drafts, the bonus or recovered token not counted, and nothing cut off a round in which a request ended.
    accepted_per_position[i]: rounds that accepted more than i drafts. acceptance_histogram[j]: rounds that accepted just j.
    """

    num_speculative_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.acceptance_histogram:
            self.acceptance_histogram = [0] * (self.num_speculative_tokens + 1)

    def observe(self, num_accepted: int) -> None:
        """Count one request's round."""
        self.num_drafts += 1
        self.num_draft_tokens += self.num_speculative_tokens
        self.num_accepted_tokens += num_accepted
        self.acceptance_histogram[num_accepted] += 1

    @property
    def accepted_per_position(self) -> list[int]:
        return [sum(self.acceptance_histogram[i + 1 :]) for i in range(self.num_speculative_tokens)]

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts over drafted tokens; 0 before the first draft."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a round: 1 + accepted drafts over rounds; 1 before the first draft."""
        return 1.0 + (self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0)

    @property
    def per_position_acceptance(self) -> list[float]:
        """The share of rounds that accepted the draft at each position; unconditional, so it never increases."""
        return [count / self.num_drafts if self.num_drafts else 0.0 for count in self.accepted_per_position]

    def to_dict(self) -> dict[str, Any]:
        """Counts and rates, for JSON."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_position": self.accepted_per_position,
            "acceptance_histogram": list(self.acceptance_histogram),
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "per_position_acceptance": self.per_position_acceptance,
        }


@dataclass
class Timings:
    """Wall-clock seconds of an engine, compilation included where it happened; num_rounds counts decode rounds of any batch."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_rounds: int = 0
    num_output_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))
