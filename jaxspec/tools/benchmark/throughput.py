"""A load on an engine: requests that arrive at some rate, a bounded number at a time.

The results are in vLLM's rows.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.engine.metrics import LatencyMetrics, summary
from jaxspec.engine.request import Request
from jaxspec.llm import LLM


@dataclass(frozen=True)
class Load:
    """A load.

    request_rate:    requests a second, with Poisson arrivals; infinity: all at once
    max_concurrency: requests in the engine at a time; the others wait outside it, and their time
                     to the first token starts when they are let in
    seed:            of the arrivals
    """

    request_rate: float
    max_concurrency: int
    seed: int = 0

    def arrivals(self, count: int) -> np.ndarray:
        """Seconds after the start, ascending."""
        if np.isinf(self.request_rate):
            return np.zeros(count)
        return np.cumsum(np.random.default_rng(self.seed).exponential(1 / self.request_rate, count))


class Meter:
    """Counts tokens by the second and requests at a time, as they are read."""

    def __init__(self) -> None:
        self.tokens_at: Counter[int] = Counter()
        self.running = self.peak_running = 0

    def started(self) -> None:
        self.running += 1
        self.peak_running = max(self.peak_running, self.running)

    def on_tokens(self, request: Request, num_new: int) -> None:
        self.tokens_at[int(time.perf_counter())] += num_new
        self.running -= request.finish_reason is not None


def run(llm: LLM, requests: Sequence[Request], load: Load) -> dict[str, Any]:
    """Run the requests and return every row of the benchmark of vLLM's PR #37639.

    The engine's own counts follow. Times are in milliseconds.
    """
    llm.reset_metrics()
    meter, waiting = Meter(), deque(zip(load.arrivals(len(requests)), requests, strict=True))
    began = time.perf_counter()
    while waiting or meter.running:
        now = time.perf_counter()
        while waiting and meter.running < load.max_concurrency and waiting[0][0] <= now - began:
            _, request = waiting.popleft()
            request.on_tokens, request.times.arrival = meter.on_tokens, now
            meter.started()
            llm.serving.add(request)
        if meter.running:
            llm.serving.step()
        else:
            time.sleep(max(0.0, waiting[0][0] - (time.perf_counter() - began)))
    return results(llm, requests, load, meter, time.perf_counter() - began)


def results(
    llm: LLM, requests: Sequence[Request], load: Load, meter: Meter, seconds: float
) -> dict[str, Any]:
    succeeded = [r for r in requests if r.finish_reason in ("stop", "length")]
    latency = LatencyMetrics()
    for request in succeeded:
        latency.observe(request.times)
    num_input, num_output = (
        sum(map(f, succeeded))
        for f in (lambda r: len(r.prompt_token_ids), lambda r: r.num_generated)
    )
    metrics, rounds = llm.metrics, llm.timings.num_rounds
    found: dict[str, Any] = {
        "successful requests": len(succeeded),
        "failed requests": len(requests) - len(succeeded),
        "maximum request concurrency": load.max_concurrency,
        "request rate (req/s)": "inf" if np.isinf(load.request_rate) else load.request_rate,
        "benchmark duration (s)": seconds,
        "total input tokens": num_input,
        "total generated tokens": num_output,
        "request throughput (req/s)": len(succeeded) / seconds,
        "output token throughput (tok/s)": num_output / seconds,
        "peak output token throughput (tok/s)": max(meter.tokens_at.values(), default=0),
        "peak concurrent requests": meter.peak_running,
        "total token throughput (tok/s)": (num_input + num_output) / seconds,
    }
    for name, values in (("TTFT", latency.ttft), ("TPOT", latency.tpot), ("ITL", latency.itl)):
        of = summary(values) or {}
        for label, key in (("mean", "mean"), ("median", "median"), ("P99", "p99")):
            found[f"{label} {name} (ms)"] = 1e3 * of[key] if of else None
    if llm.speculative is not None:
        found |= {
            "acceptance rate (%)": 100 * metrics.acceptance_rate,
            "acceptance length": metrics.mean_acceptance_length,
            "drafts": metrics.num_drafts,
            "draft tokens": metrics.num_draft_tokens,
            "accepted tokens": metrics.num_accepted_tokens,
        }
        found |= {
            f"acceptance at position {i} (%)": 100 * rate
            for i, rate in enumerate(metrics.per_position_acceptance)
        }
    if llm.speculative is not None and llm.speculative.fallback_method is not None:
        found["rounds with looked-up drafts"] = metrics.num_lookups
    if llm.speculative is not None and llm.speculative.adaptive:
        of_k = sorted(llm.timings.num_rounds_of.items())
        found |= {f"rounds with K = {K}": count for K, count in of_k}
    found |= {
        "rounds": rounds,
        "duration / rounds (ms)": 1e3 * seconds / rounds if rounds else None,
    }
    return found | {
        name.removeprefix("num_").replace("_", " "): value
        for name, value in llm.scheduling.to_dict().items()
    }
