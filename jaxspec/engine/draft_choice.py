"""The choice of K by acceptance and cost, for SpeculativeConfig.adaptive, and of the fallback.

A request's own number of drafts is chosen on the device (jaxspec.decode.adaptive) from its earlier
rounds and from thresholds that it keeps for life. The host repeats that arithmetic as it reads
results. So it knows the most drafts that a request can have in a round that is not launched yet.
A round's K is one of a few. It never cuts the drafts of a request whose text depends on them.

| request | thresholds from | a round's K |
|---|---|---|
| sampled, unless the rule is strict | the bytes of the weights | is large enough for its drafts |
| greedy, or strict | round times so far | may cut its drafts, if that pays |

The acceptance below which a request's drafts are looked up always follows from the bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxspec import drafts
from jaxspec.config import DraftConfig, SpeculativeConfig, TargetConfig
from jaxspec.decode.adaptive import (
    PRIOR,
    SCALE,
    UNIT,
    Acceptance,
    Estimate,
    fade,
    falls_back,
    forget,
    num_worthwhile,
)
from jaxspec.drafts import DraftModelConfig
from jaxspec.layers.moe import moe_of
from jaxspec.layers.params import Params

COMPILED = (1, 3, 7, 15)  # and the largest K
# A further row of a verify pass, of the time of the pass; a draft step costs its weights besides.
ROW_COST = 1 / 256
LOOKUP_RATE = 0.5  # stands in for the acceptance of looked-up drafts, which is not measured
UNTIMED = 3  # rounds of a program that are not timed: they may compile, or wait for what did
WEIGHT = 16  # rounds over which times are averaged
# Arrays that a pass reads a few rows of. The embedding is read whole where it is the head too.
GATHERED = ("embed_tokens", "draft_to_target", "target_to_draft")


@dataclass
class RequestAcceptance:
    """The acceptance of one request's drafts.

    thresholds: see Acceptance, for one request
    is_free: whether its text is the same with any number of drafts
    break_even: see Acceptance; 0 without a fallback
    history: its estimate after each round that may be rewound to, with num_generated then
    """

    thresholds: tuple[int, ...]
    is_free: bool
    break_even: int
    history: deque[tuple[int, Estimate[int]]] = field(default_factory=lambda: deque([(0, PRIOR)]))

    @property
    def estimate(self) -> Estimate[int]:
        """The estimate after the last round that was read."""
        return self.history[-1][1]

    def observe(
        self,
        num_proposed: int,
        num_accepted: int,
        *,
        is_lookup: bool,
        num_generated: int,
        num_delivered: int,
    ) -> None:
        """Count a round, after which the request has generated num_generated tokens.

        is_lookup: whether its drafts were looked up
        num_delivered: tokens that no failure takes back
        """
        before = Estimate(*(np.asarray([x], np.int32) for x in self.estimate))
        counts = (np.asarray([x], np.int32) for x in (num_proposed, num_accepted))
        judged, rejected = forget(before) if is_lookup else fade(before, *counts)
        self.history.append((num_generated, Estimate(int(judged[0]), int(rejected[0]))))
        while len(self.history) > 1 and self.history[1][0] <= num_delivered:
            self.history.popleft()

    def rewind(self, num_generated: int) -> None:
        """Forget the rounds after which more than num_generated tokens were generated."""
        while len(self.history) > 1 and self.history[-1][0] > num_generated:
            self.history.pop()


def rows_of(
    acceptances: Sequence[RequestAcceptance | None],
    num_rows: int,
    K: int,
    *,
    has_fallback: bool,
) -> Acceptance:
    """Return NumPy rows of a state's acceptance for these requests, and idle rows after them."""
    rows = np.zeros((num_rows, 3), np.int32)
    thresholds = np.zeros((num_rows, K), np.int32)
    for row, each in enumerate(acceptances):
        if each is not None:
            rows[row], thresholds[row] = (*each.estimate, each.break_even), each.thresholds
    judged, rejected, break_even = rows.T
    estimate = Estimate(judged, rejected)
    return Acceptance(estimate, thresholds, break_even if has_fallback else None)  # type: ignore[arg-type]


def compiled_numbers(num_speculative_tokens: int) -> tuple[int, ...]:
    """Return the numbers of drafts that rounds are compiled for, rising to the largest."""
    return (*(n for n in COMPILED if n < num_speculative_tokens), num_speculative_tokens)


class DraftCost(NamedTuple):
    """The cost of drafts, of the time of a target pass of one row.

    base: of any number of drafts
    step: of each draft
    """

    base: float
    step: float

    def rounds(self, numbers: Sequence[int]) -> list[float]:
        """Return the cost of a round with each of these numbers of drafts."""
        return [1 + self.base + self.step * n for n in numbers]


def draft_cost(target: TargetConfig, draft: DraftConfig, params: Params) -> DraftCost:
    """Return the cost of a draft.

    It is known before anything runs: passes over few rows take the time of reading their weights.
    """
    if drafts.drafter(draft).one_hot:
        return DraftCost(0.0, ROW_COST)
    model = draft.model if isinstance(draft, DraftModelConfig) else target  # what has experts
    of_pass = _bytes_read(model, params["draft"]) / _bytes_read(target, params["target"])
    if draft.method in drafts.BLOCKS:
        return DraftCost(of_pass, ROW_COST)
    return DraftCost(0.0, of_pass + ROW_COST)


def _bytes_read(model: TargetConfig, params: Mapping[str, Any]) -> float:
    """Return the bytes of weights that a pass of one row reads: of experts, those that it chooses.

    model: the config of the layers' experts, if they have some
    """
    gathered = set(GATHERED) - ({"embed_tokens"} if "lm_head" not in params else set())
    read = {name: x for name, x in params.items() if name not in gathered}
    experts = [layer["experts"] for layer in params["layers"] if "experts" in layer]
    moe = moe_of(model)
    idle = 1 - moe.top_k / moe.num_experts if moe is not None else 0.0
    return _num_bytes(read) - idle * _num_bytes(experts)


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def thresholds_of(costs: Sequence[float], numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the acceptance rates, in 1 / SCALE, from which drafts pay: one for each draft.

    costs: of a round with each of the numbers, which rise
    """
    best = np.asarray(numbers)[np.argmax(_values(costs, numbers), axis=1)]
    return tuple(
        0 if draft < numbers[0] else int(np.argmax(best > draft)) if best[-1] > draft else SCALE + 1
        for draft in range(numbers[-1])
    )


def break_even_of(costs: Sequence[float], numbers: Sequence[int]) -> int:
    """Return the acceptance rate, in 1 / SCALE, below which no number beats a round without drafts.

    costs: of a round with each of the numbers, of the cost of one without
    """
    pays = _values(costs, numbers).max(axis=1) >= 1
    return int(np.argmax(pays)) if pays[-1] else SCALE + 1


def _values(costs: Sequence[float], numbers: Sequence[int]) -> np.ndarray:
    """Return tokens by cost [SCALE + 1, numbers], by acceptance rate."""
    rates = np.arange(SCALE + 1) / SCALE
    tokens = np.cumsum(rates[:, None] ** np.arange(numbers[-1] + 1), axis=1)[:, list(numbers)]
    return tokens / np.asarray(costs)


class RoundTimes:
    """Seconds of rounds, averaged by batch size and K."""

    def __init__(self) -> None:
        self._mean: dict[tuple[int, int], float] = {}
        self._count: dict[tuple[int, int], int] = {}

    def add(self, batch: int, K: int, seconds: float) -> None:
        """Count a round; the first ones of each kind are left out, and outliers count little."""
        key = batch, K
        count = self._count[key] = self._count.get(key, 0) + 1
        if count > UNTIMED:
            mean = self._mean.get(key, seconds)
            weight = min(count - UNTIMED, WEIGHT)
            self._mean[key] = mean + (min(seconds, 2 * mean) - mean) / weight

    def costs(self, batch: int, numbers: Sequence[int], cost: DraftCost) -> list[float]:
        """Return the cost of a round of this batch with each of the numbers, in one unit.

        cost: stands in for the times of numbers that have not run
        """
        assumed = cost.rounds(numbers)
        known = {n: self._mean[batch, n] for n in numbers if (batch, n) in self._mean}
        scale = [known[n] / a for n, a in zip(numbers, assumed, strict=True) if n in known]
        unit = sum(scale) / len(scale) if scale else 1.0
        return [known.get(n, unit * a) for n, a in zip(numbers, assumed, strict=True)]


@dataclass(frozen=True)
class Candidate:
    """A request of the next round.

    acceptance: its own
    draft_limit: see Request
    num_unread: rounds that are launched and not read
    """

    acceptance: RequestAcceptance
    draft_limit: int
    num_unread: int


class DraftChoice:
    """Choose thresholds of requests and K of rounds, and learn from what rounds bring.

    numbers: the K that rounds are compiled for
    """

    def __init__(
        self,
        speculative: SpeculativeConfig,
        target: TargetConfig,
        draft: DraftConfig,
        params: Params,
        *,
        fixed_k: bool,
    ) -> None:
        """fixed_k: whether all rounds have the largest K, and none goes by the clock."""
        K = speculative.max_k
        self.numbers = compiled_numbers(K) if speculative.adaptive else (K,)
        self._fixed_k = fixed_k or not speculative.adaptive
        self._rule = speculative.rejection_sample_method
        self._cost = draft_cost(target, draft, params)
        assumed = self._cost.rounds(self.numbers)
        self._assumed = thresholds_of(assumed, self.numbers)
        has_fallback = speculative.fallback_method is not None
        self._break_even = break_even_of(assumed, self.numbers) if has_fallback else 0
        self._times = RoundTimes()
        self._judged = self._rejected = 0.0  # of all requests

    def begin(self, *, greedy: bool, batch: int) -> RequestAcceptance:
        """Return what a new request remembers.

        batch: slots of the batch that it joins. A greedy request begins with the acceptance of all
        requests so far, a sampled one with the prior.
        """
        is_free = self._rule != "synthetic" and (greedy or self._rule == "strict")
        if not is_free or self._fixed_k:
            return RequestAcceptance(self._assumed, is_free, self._break_even)
        costs = self._times.costs(batch, self.numbers, self._cost)
        rejected = (self._rejected + PRIOR.rejected) / (self._judged + PRIOR.judged)
        prior = Estimate(PRIOR.judged, round(rejected * PRIOR.judged))
        thresholds = thresholds_of(costs, self.numbers)
        return RequestAcceptance(thresholds, True, self._break_even, deque([(0, prior)]))

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        """Count a request's round, with the weight of PRIOR's counts for a request's first."""
        is_rejected = num_accepted < num_proposed
        self._judged += UNIT * (num_accepted + is_rejected)
        self._rejected += UNIT * is_rejected

    def timed(self, batch: int, K: int, seconds: float) -> None:
        """Count the time of a round."""
        self._times.add(batch, K, seconds)

    def choose(
        self,
        requests: Sequence[Candidate],
        batch: int,
        rounds_per_step: int,
        is_ready: Callable[[int], bool],
    ) -> int:
        """Return the K of the next step's rounds.

        is_ready: whether the program of a K is compiled; called for the best first
        """
        numbers, largest = self.numbers, self.numbers[-1]
        if self._fixed_k or len(numbers) == 1 or not requests:
            return largest
        own = [r.acceptance for r in requests]
        found = rows_of(own, len(requests), largest, has_fallback=True)
        estimate = Estimate(*(np.asarray(x) for x in found.estimate))
        thresholds = np.asarray(found.thresholds)
        limits = np.asarray([r.draft_limit for r in requests])
        ahead = np.asarray([r.num_unread + rounds_per_step - 1 for r in requests])
        ahead = np.where([r.is_free for r in own], -1, ahead)
        break_even = np.asarray(found.break_even)
        if self._may_fall_back(estimate, break_even, ahead):
            return largest
        least = self._most_ahead(estimate, thresholds, limits, ahead)
        is_lookup = falls_back(estimate, break_even)
        worth = np.where(is_lookup, largest, num_worthwhile(estimate, thresholds))
        worth = np.minimum(worth, limits)
        rates = (estimate.judged - estimate.rejected) / estimate.judged
        rates = np.where(is_lookup, LOOKUP_RATE, rates)
        powers = np.cumsum(rates[:, None] ** np.arange(largest + 1), axis=1)
        costs = self._times.costs(batch, numbers, self._cost)

        def value(at: int) -> float:
            drafted = np.minimum(worth, numbers[at])
            return float(np.take_along_axis(powers, drafted[:, None], axis=1).sum()) / costs[at]

        allowed = [at for at, n in enumerate(numbers) if n >= least]
        for at in sorted(allowed, key=value, reverse=True):
            if at == len(numbers) - 1 or is_ready(numbers[at]):
                return numbers[at]
        raise AssertionError("the largest K is always allowed")

    @staticmethod
    def _may_fall_back(
        estimate: Estimate[np.ndarray], break_even: np.ndarray, ahead: np.ndarray
    ) -> bool:
        """Return whether drafts of a request may be looked up within `ahead` [batch] more rounds.

        The first draft of each of these rounds is taken for rejected: no other outcome leaves as
        many rejected and as few judged. Requests with a negative `ahead` are left out.
        """
        one, none = np.ones_like(break_even), np.zeros_like(break_even)
        for done in range(int(ahead.max(initial=-1)) + 1):
            if (falls_back(estimate, break_even) & (ahead >= done)).any():
                return True
            estimate = fade(estimate, one, none)
        return False

    @staticmethod
    def _most_ahead(
        estimate: Estimate[np.ndarray],
        thresholds: np.ndarray,
        limits: np.ndarray,
        ahead: np.ndarray,
    ) -> int:
        """Return the most drafts that a request can have after `ahead` [batch] more rounds.

        All drafts of these rounds are taken for accepted: no other outcome leaves as few rejected
        and as many judged. Requests with a negative `ahead` are left out.
        """
        found = 0
        for done in range(int(ahead.max(initial=-1)) + 1):
            worth = np.minimum(num_worthwhile(estimate, thresholds), limits)
            found = max(found, int(worth[ahead >= done].max(initial=0)))
            estimate = fade(estimate, worth, worth)
        return found
