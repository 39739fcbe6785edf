"""Acceptance counts, latencies and timings, as vLLM defines them."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import add
from typing import Any


@dataclass
class SpecDecodeMetrics:
    """Acceptance counts of one request or of an engine.

    num_drafts: rounds that proposed, one per request and round
    num_draft_tokens: their drafts: K each, or fewer where a request may have fewer or a drafter
        ends before K
    num_accepted_tokens: accepted drafts, without bonus and recovered tokens. A round in which a
        request ends counts in full, except for what a stop string cuts off.
    acceptance_histogram[j]: rounds that accepted exactly j drafts
    draft_histogram[j]: rounds that proposed exactly j drafts, from 1 on
    num_lookups: rounds whose drafts the fallback looked up
    """

    num_speculative_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    draft_histogram: list[int] = field(default_factory=list)
    num_lookups: int = 0

    def __post_init__(self) -> None:
        if not self.acceptance_histogram:
            self.acceptance_histogram = [0] * (self.num_speculative_tokens + 1)
        if not self.draft_histogram:
            self.draft_histogram = [0] * (self.num_speculative_tokens + 1)

    def observe(
        self, num_accepted: int, num_proposed: int | None = None, *, is_lookup: bool = False
    ) -> None:
        """Count one request's round of num_proposed drafts (None: K), unless it has none."""
        num_proposed = self.num_speculative_tokens if num_proposed is None else num_proposed
        if num_proposed == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += num_proposed
        self.num_accepted_tokens += num_accepted
        self.num_lookups += is_lookup
        self.acceptance_histogram[num_accepted] += 1
        self.draft_histogram[num_proposed] += 1

    def add(self, counts: SpecDecodeMetrics) -> None:
        """Add the counts of another request or engine with the same K."""
        self.num_drafts += counts.num_drafts
        self.num_draft_tokens += counts.num_draft_tokens
        self.num_accepted_tokens += counts.num_accepted_tokens
        self.num_lookups += counts.num_lookups
        for own, others in (
            (self.acceptance_histogram, counts.acceptance_histogram),
            (self.draft_histogram, counts.draft_histogram),
        ):
            own[:] = map(add, own, others)

    @property
    def accepted_per_position(self) -> list[int]:
        """For each position i, the rounds that accepted more than i drafts."""
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
        """The share of rounds that accepted the draft at each position.

        The shares are unconditional, so they never increase.
        """
        return [
            count / self.num_drafts if self.num_drafts else 0.0
            for count in self.accepted_per_position
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return counts and rates, for JSON."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "accepted_per_position": self.accepted_per_position,
            "acceptance_histogram": list(self.acceptance_histogram),
            "num_lookups": self.num_lookups,
            "draft_histogram": list(self.draft_histogram),
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "per_position_acceptance": self.per_position_acceptance,
        }


@dataclass(frozen=True)
class Counter:
    """A count, under vLLM's name."""

    name: str
    value: int


@dataclass(frozen=True)
class Vector:
    """A count for each position, under vLLM's name."""

    name: str
    values: list[int]


def as_vllm(metrics: SpecDecodeMetrics) -> list[Counter | Vector]:
    """Return acceptance counts under the names that vLLM's LLM.get_metrics gives them."""
    prefix = "vllm:spec_decode_num_"
    return [
        Counter(f"{prefix}drafts", metrics.num_drafts),
        Counter(f"{prefix}draft_tokens", metrics.num_draft_tokens),
        Counter(f"{prefix}accepted_tokens", metrics.num_accepted_tokens),
        Vector(f"{prefix}accepted_tokens_per_pos", metrics.accepted_per_position),
    ]


@dataclass
class Timings:
    """Wall-clock seconds of an engine, with the compilation that happened in them.

    The time between two reads counts as prefill or decoding, by what the second result is of.

    num_rounds: decode rounds in which some request sampled; the last launched ahead may be idle
    num_output_tokens: generated tokens
    num_rounds_of: the rounds by their K
    """

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    num_rounds: int = 0
    num_output_tokens: int = 0
    num_rounds_of: dict[int, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return vars(self) | {"num_rounds_of": dict(sorted(self.num_rounds_of.items()))}


@dataclass
class SchedulerCounts:
    """Counts of the scheduler.

    num_preemptions: times that a request lost its blocks and was prefilled again
    num_waits: rounds in which a request waited, since its drafts did not fit into
        max_num_verify_tokens
    num_prefix_queries: tokens to prefill
    num_prefix_hits: those of them that the prefix cache had
    """

    num_preemptions: int = 0
    num_waits: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class RequestTimes:
    """Times at which a request's tokens were read, in seconds of one clock.

    The tokens of a step come together.

    arrival: when the request was made
    first, last: when the first and the last result were read
    num_tokens: tokens read so far
    num_tokens_at_first: tokens of the first result
    inter_token: times between two results, as a streaming client sees them (vLLM's ITL)
    """

    arrival: float
    first: float | None = None
    last: float | None = None
    num_tokens: int = 0
    num_tokens_at_first: int = 0
    inter_token: list[float] = field(default_factory=list)

    def observe(self, now: float, num_tokens: int) -> None:
        """Count num_tokens new tokens, read at time `now`."""
        if self.last is None:
            self.first, self.num_tokens_at_first = now, num_tokens
        elif now > self.last:
            self.inter_token.append(now - self.last)
        self.last = now
        self.num_tokens += num_tokens

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token, waiting included; None before it."""
        return None if self.first is None else self.first - self.arrival

    @property
    def time_per_output_token(self) -> float | None:
        """Seconds per token after the first result; None without such tokens."""
        later = self.num_tokens - self.num_tokens_at_first
        return (
            (self.last - self.first) / later
            if self.first is not None and self.last is not None and later
            else None
        )

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last token; None before the first."""
        return None if self.last is None else self.last - self.arrival


def summary(values: Iterable[float]) -> dict[str, float] | None:
    """Return mean, median and p99 (the nearest rank); None without values."""
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
    """Latencies, in seconds, of the requests that finished last.

    most: values kept at most, so that an engine that runs for long stays small
    num_requests: requests that finished
    ttft: time to first token
    tpot: time per output token
    itl: time between two results
    """

    most: int = 100_000
    num_requests: int = 0
    ttft: deque[float] = field(init=False)
    tpot: deque[float] = field(init=False)
    itl: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self.ttft, self.tpot, self.itl = (deque(maxlen=self.most) for _ in range(3))

    def observe(self, times: RequestTimes) -> None:
        """Count a request that has finished."""
        self.num_requests += 1
        for kept, value in (
            (self.ttft, times.time_to_first_token),
            (self.tpot, times.time_per_output_token),
        ):
            if value is not None:
                kept.append(value)
        self.itl.extend(times.inter_token)

    def to_dict(self) -> dict[str, Any]:
        """Return mean, median and p99 of each, in seconds."""
        return {"num_requests": self.num_requests} | {
            name: summary(getattr(self, name)) for name in ("ttft", "tpot", "itl")
        }
