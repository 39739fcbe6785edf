"""The choice of K by acceptance and cost, for SpeculativeConfig.adaptive.

A request's own number of drafts is chosen on the device (jaxspec.decode.adaptive) from its earlier
rounds and from thresholds that it keeps for life. The host repeats that arithmetic as it reads
results. So it knows the most drafts that a request can have in a round that is not launched yet.
A round's K is one of a few. It never cuts the drafts of a request whose text depends on them.

| request | thresholds from | a round's K |
|---|---|---|
| sampled, unless the rule is strict | the bytes of the weights | is large enough for its drafts |
| greedy, or strict | round times so far | may cut its drafts, if that pays |
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxspec import drafts
from jaxspec.config import DraftConfig, SpeculativeConfig
from jaxspec.decode.adaptive import PRIOR, SCALE, UNIT, Acceptance, Estimate, fade, num_worthwhile
from jaxspec.layers.params import Params

COMPILED = (1, 3, 7, 15)  # and the largest K
# A further row of a verify pass, of the time of the pass; a draft step costs its weights besides.
ROW_COST = 1 / 256
UNTIMED = 3  # rounds of a program that are not timed: they may compile, or wait for what did
WEIGHT = 16  # rounds over which times are averaged
# Arrays that a pass reads a few rows of.
GATHERED = ("embed_tokens", "draft_to_target", "target_to_draft")


@dataclass
class RequestAcceptance:
    """The acceptance of one request's drafts.

    thresholds: see Acceptance, for one request
    is_free: whether its text is the same with any number of drafts
    history: its estimate after each round that may be rewound to, with num_generated then
    """

    thresholds: tuple[int, ...]
    is_free: bool
    history: deque[tuple[int, Estimate]] = field(default_factory=lambda: deque([(0, PRIOR)]))

    @property
    def estimate(self) -> Estimate:
        """The estimate after the last round that was read."""
        return self.history[-1][1]

    def observe(
        self, num_drafts: int, num_accepted: int, *, num_generated: int, num_delivered: int
    ) -> None:
        """Count a round, after which the request has generated num_generated tokens.

        num_delivered: tokens that no failure takes back
        """
        columns = (np.asarray([x], np.int32) for x in (*self.estimate, num_drafts, num_accepted))
        judged, rejected = fade(*columns)
        self.history.append((num_generated, Estimate(int(judged[0]), int(rejected[0]))))
        while len(self.history) > 1 and self.history[1][0] <= num_delivered:
            self.history.popleft()

    def rewind(self, num_generated: int) -> None:
        """Forget the rounds after which more than num_generated tokens were generated."""
        while len(self.history) > 1 and self.history[-1][0] > num_generated:
            self.history.pop()


def rows_of(
    acceptances: Sequence[RequestAcceptance | None], num_rows: int, num_drafts: int
) -> Acceptance:
    """Return NumPy rows of a state's acceptance for these requests, and idle rows after them."""
    rows = np.zeros((num_rows, 2), np.int32)
    thresholds = np.zeros((num_rows, num_drafts), np.int32)
    for row, each in enumerate(acceptances):
        if each is not None:
            rows[row], thresholds[row] = each.estimate, each.thresholds
    return Acceptance(Estimate(rows[:, 0], rows[:, 1]), thresholds)  # type: ignore[arg-type]


def compiled_numbers(num_speculative_tokens: int) -> tuple[int, ...]:
    """Return the numbers of drafts that rounds are compiled for, rising to the largest."""
    return (*(n for n in COMPILED if n < num_speculative_tokens), num_speculative_tokens)


def step_cost(draft: DraftConfig, params: Params) -> float:
    """Return the cost of one more draft, of the time of a target pass of one row.

    It is known before anything runs: passes over few rows take the time of reading their weights.
    """
    drafter = drafts.drafter(draft)
    if drafter.one_hot or draft.method in drafts.BLOCKS:
        return ROW_COST  # no pass for each draft
    step = {name: x for name, x in params["draft"].items() if name not in GATHERED}
    target = dict(params["target"])
    if "lm_head" in target:
        del target["embed_tokens"]
    return ROW_COST + _num_bytes(step) / _num_bytes(target)


def _num_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def thresholds_of(costs: Sequence[float], numbers: Sequence[int]) -> tuple[int, ...]:
    """Return the acceptance rates, in 1 / SCALE, from which drafts pay: one for each draft.

    costs: of a round with each of the numbers, which rise
    """
    rates = np.arange(SCALE + 1) / SCALE
    tokens = np.cumsum(rates[:, None] ** np.arange(numbers[-1] + 1), axis=1)[:, list(numbers)]
    best = np.asarray(numbers)[np.argmax(tokens / np.asarray(costs), axis=1)]
    return tuple(
        0 if draft < numbers[0] else int(np.argmax(best > draft)) if best[-1] > draft else SCALE + 1
        for draft in range(numbers[-1])
    )


class RoundTimes:
    """Seconds of rounds, averaged by batch size and K."""

    def __init__(self) -> None:
        self._mean: dict[tuple[int, int], float] = {}
        self._count: dict[tuple[int, int], int] = {}

    def add(self, batch: int, num_drafts: int, seconds: float) -> None:
        """Count a round; the first ones of each kind are left out, and outliers count little."""
        key = batch, num_drafts
        count = self._count[key] = self._count.get(key, 0) + 1
        if count > UNTIMED:
            mean = self._mean.get(key, seconds)
            weight = min(count - UNTIMED, WEIGHT)
            self._mean[key] = mean + (min(seconds, 2 * mean) - mean) / weight

    def costs(self, batch: int, numbers: Sequence[int], step_cost: float) -> list[float]:
        """Return the cost of a round of this batch with each of the numbers, in one unit.

        step_cost: stands in for the times of numbers that have not run
        """
        assumed = [1 + step_cost * n for n in numbers]
        known = {n: self._mean[batch, n] for n in numbers if (batch, n) in self._mean}
        scale = [known[n] / a for n, a in zip(numbers, assumed, strict=True) if n in known]
        unit = sum(scale) / len(scale) if scale else 1.0
        return [known.get(n, unit * a) for n, a in zip(numbers, assumed, strict=True)]


@dataclass(frozen=True)
class Candidate:
    """A request of the next round.

    acceptance: its own
    most: drafts that its parameters allow
    num_unread: rounds that are launched and not read
    """

    acceptance: RequestAcceptance
    most: int
    num_unread: int


class DraftChoice:
    """Choose thresholds of requests and K of rounds, and learn from what rounds bring.

    numbers: the K that rounds are compiled for
    """

    def __init__(
        self, speculative: SpeculativeConfig, draft: DraftConfig, params: Params, *, fixed_k: bool
    ) -> None:
        """fixed_k: whether all rounds have the largest K, and none goes by the clock."""
        self.numbers = compiled_numbers(speculative.max_drafts)
        self._fixed_k = fixed_k
        self._rule = speculative.rejection_sample_method
        self._step_cost = step_cost(draft, params)
        assumed = [1 + self._step_cost * n for n in self.numbers]
        self._assumed = thresholds_of(assumed, self.numbers)
        self._times = RoundTimes()
        self._judged = self._rejected = 0.0  # of all requests

    def begin(self, *, greedy: bool, batch: int) -> RequestAcceptance:
        """Return what a new request remembers.

        batch: slots of the batch that it joins. A greedy request begins with the acceptance of all
        requests so far, a sampled one with the prior.
        """
        is_free = self._rule != "synthetic" and (greedy or self._rule == "strict")
        if not is_free or self._fixed_k:
            return RequestAcceptance(self._assumed, is_free)
        costs = self._times.costs(batch, self.numbers, self._step_cost)
        judged = int(PRIOR.judged)  # type: ignore[arg-type]
        rejected = (self._rejected + int(PRIOR.rejected)) / (self._judged + judged)  # type: ignore[arg-type]
        prior = Estimate(judged, round(rejected * judged))
        return RequestAcceptance(thresholds_of(costs, self.numbers), True, deque([(0, prior)]))

    def observe(self, num_drafts: int, num_accepted: int) -> None:
        """Count a request's round, with the weight of PRIOR's counts for a request's first."""
        is_rejected = num_accepted < num_drafts
        self._judged += UNIT * (num_accepted + is_rejected)
        self._rejected += UNIT * is_rejected

    def timed(self, batch: int, num_drafts: int, seconds: float) -> None:
        """Count the time of a round."""
        self._times.add(batch, num_drafts, seconds)

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
        found = rows_of([r.acceptance for r in requests], len(requests), largest)
        judged, rejected = (np.asarray(x) for x in found.estimate)
        thresholds, most = np.asarray(found.thresholds), np.asarray([r.most for r in requests])
        worth = np.minimum(num_worthwhile(judged, rejected, thresholds), most)
        ahead = np.asarray([r.num_unread + rounds_per_step - 1 for r in requests])
        is_free = np.asarray([r.acceptance.is_free for r in requests])
        least = self._most_ahead(judged, rejected, thresholds, most, np.where(is_free, -1, ahead))
        rates = (judged - rejected) / judged
        powers = np.cumsum(rates[:, None] ** np.arange(largest + 1), axis=1)
        costs = self._times.costs(batch, numbers, self._step_cost)

        def value(at: int) -> float:
            drafted = np.minimum(worth, numbers[at])
            return float(np.take_along_axis(powers, drafted[:, None], axis=1).sum()) / costs[at]

        allowed = [at for at, n in enumerate(numbers) if n >= least]
        for at in sorted(allowed, key=value, reverse=True):
            if at == len(numbers) - 1 or is_ready(numbers[at]):
                return numbers[at]
        raise AssertionError("the largest K is always allowed")

    @staticmethod
    def _most_ahead(
        judged: np.ndarray,
        rejected: np.ndarray,
        thresholds: np.ndarray,
        most: np.ndarray,
        ahead: np.ndarray,
    ) -> int:
        """Return the most drafts that a request can have after `ahead` [batch] more rounds.

        All drafts of these rounds are taken for accepted: no other outcome leaves as few rejected
        and as many judged. Requests with a negative `ahead` are left out.
        """
        found = 0
        for done in range(int(ahead.max(initial=-1)) + 1):
            worth = np.minimum(num_worthwhile(judged, rejected, thresholds), most)
            found = max(found, int(worth[ahead >= done].max(initial=0)))
            judged, rejected = fade(judged, rejected, worth, worth)
        return found
