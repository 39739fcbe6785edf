"""Acceptance counts, latencies and timings, as vLLM defines them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SpecDecodeMetrics:
    """What became of the drafts, of one request or of an engine.

    num_drafts: rounds that proposed, one per request and round. num_draft_tokens: K of each, or what the request was allowed.
    num_accepted_tokens: accepted drafts, the bonus or recovered token not counted, and nothing cut off a round in which a request ended
    (but for what a stop string cuts off).
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

    def observe(self, num_accepted: int, num_drafted: int | None = None) -> None:
        """Count one request's round of num_drafted drafts (None: K); a round without drafts counts for nothing."""
        num_drafted = self.num_speculative_tokens if num_drafted is None else num_drafted
        if num_drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_drafted
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
        return [
            count / self.num_drafts if self.num_drafts else 0.0
            for count in self.accepted_per_position
        ]

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
    """Wall-clock seconds of an engine, compilation included where it happened; num_rounds counts decode rounds of any batch
    in which somebody sampled (the last that were launched ahead may be idle).

    A result's time counts to what it is the result of, from when the one before was read.
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_rounds: int = 0
    num_output_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class SchedulerCounts:
    """num_preemptions: times that a request gave its blocks up and was prefilled again. num_prefix_queries, num_prefix_hits: tokens to
    prefill, and those of them that the prefix cache had."""

    num_preemptions: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class RequestTimes:
    """When a request's tokens were read, in seconds of one clock. Those of a step's rounds come together: inter_token is the time between
    two results, as a client that streams sees it (vLLM's ITL), and num_tokens_at_first what came with the first."""

    arrival: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    num_tokens_at_first: int = 0
    inter_token: list[float] = field(default_factory=list)

    def observe(self, now: float, num_tokens: int) -> None:
        """num_tokens new ones were read."""
        if self.last is None:
            self.first, self.num_tokens_at_first = now, num_tokens
        elif now > self.last:
            self.inter_token.append(now - self.last)
        self.last = now
        self.num_tokens += num_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Waiting in the queue included."""
        return None if self.first is None else self.first - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Of the tokens after the first."""
        later = self.num_tokens - self.num_tokens_at_first
        return (
            (self.last - self.first) / later
            if self.first is not None and self.last is not None and later
            else None
        )

    @property
    def latency(self) -> float | None:
        """From arrival to the last token."""
        return None if self.last is None else self.last - self.arrival


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """mean, median, p99 (the nearest rank), or None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    rank = max(0, -(-99 * len(ordered) // 100) - 1)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[rank],
    }


@dataclass
class LatencyMetrics:
    """Seconds of the requests that finished last: a bounded number, so that an engine that runs for long stays small."""

    most: int = 100_000
    num_requests: int = 0
    ttft: deque[float] = field(init=False)
    tpot: deque[float] = field(init=False)
    itl: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.ttft, self.tpot, self.itl = (deque(maxlen=self.most) for _ in range(3))

    def observe(self, times: RequestTimes) -> None:
        """A request has finished."""
        self.num_requests += 1
        for kept, value in (
            (self.ttft, times.time_to_first_token),
            (self.tpot, times.time_per_output_token),
        ):
            if value is not None:
                kept.append(value)
        self.itl.extend(times.inter_token)

    def to_dict(self) -> dict[str, Any]:
        """mean, median and p99 of each, in seconds."""
        return {"num_requests": self.num_requests} | {
            name: summary(getattr(self, name)) for name in ("ttft", "tpot", "itl")
        }
