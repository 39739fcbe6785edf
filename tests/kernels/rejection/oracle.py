"""Rejection sampling in float64, one request and one token at a time, in probability space: written
from the papers, not from the op.

`verify` also says whether the outcome is certain: false where some comparison is so close that
float32 may decide otherwise.
"""

from __future__ import annotations

import math

import numpy as np

from tests.kernels.rejection.inputs import Inputs

TOLERANCE = 1e-5


def verify(inputs: Inputs, b: int, rule: str) -> tuple[list[int], bool]:
    """The tokens that request b emits, and whether float32 must agree."""
    if not inputs.active[b]:
        return [], True
    target = np.asarray(inputs.target_logits[b], np.float64)
    target[np.isnan(target)] = -np.inf
    drafts = [int(d) for d in inputs.draft_tokens[b]]
    greedy = bool(inputs.greedy[b])
    noise = [float(x) for x in inputs.recover_noise[b]]
    if rule == "synthetic":
        return _synthetic(
            target, drafts, greedy, inputs.uniforms[b], inputs.acceptance_rates, noise
        )
    if rule == "strict" or greedy:
        added = np.zeros_like(target) if greedy else np.asarray(inputs.sample_noise[b], np.float64)
        return _strict(target + added, drafts)
    p = [_softmax(row) for row in target]
    q = [_draft_probabilities(inputs, b, i, len(p[0])) for i in range(len(drafts))]
    decide = _probabilistic if rule == "probabilistic" else _block
    return decide(target, p, q, drafts, [float(u) for u in inputs.uniforms[b]], noise)


def _strict(scores: np.ndarray, drafts: list[int]) -> tuple[list[int], bool]:
    tokens, certain = [], True
    for i, row in enumerate(scores):
        token, clear = _highest(list(row))
        tokens.append(token)
        certain = certain and clear
        if i < len(drafts) and token != drafts[i]:
            break
    return tokens, certain


def _synthetic(
    target: np.ndarray,
    drafts: list[int],
    greedy: bool,
    uniforms: np.ndarray,
    rates: np.ndarray,
    noise: list[float],
) -> tuple[list[int], bool]:
    tokens: list[int] = []
    for d, u, rate in zip(drafts, uniforms, rates, strict=True):
        if not 0 <= d < target.shape[1] or not u < rate:
            break
        tokens.append(d)
    row = list(target[len(tokens)])
    token, clear = _highest(row if greedy else [x + g for x, g in zip(row, noise, strict=True)])
    return [*tokens, token], clear


def _probabilistic(
    target: np.ndarray,
    p: list[list[float]],
    q: list[list[float] | int],
    drafts: list[int],
    uniforms: list[float],
    noise: list[float],
) -> tuple[list[int], bool]:
    tokens: list[int] = []
    for i, d in enumerate(drafts):
        if _probability(q[i], d) == 0:
            token, clear = _draw(target[i], noise)
            return [*tokens, token], clear
        left, right = p[i][d], uniforms[i] * _probability(q[i], d)
        if abs(left - right) < TOLERANCE * (left + right):
            return tokens, False
        if left <= right:
            token, clear = _draw_residual(1.0, target[i], p[i], q[i], noise)
            return [*tokens, token], clear
        tokens.append(d)
    token, clear = _draw(target[-1], noise)
    return [*tokens, token], clear


def _block(
    target: np.ndarray,
    p: list[list[float]],
    q: list[list[float] | int],
    drafts: list[int],
    uniforms: list[float],
    noise: list[float],
) -> tuple[list[int], bool]:
    joint = [1.0]
    for i, d in enumerate(drafts):
        if _probability(q[i], d) == 0:
            break
        joint.append(min(joint[-1] * p[i][d] / _probability(q[i], d), 1.0))
    num_valid = len(joint) - 1
    for length in range(num_valid, 0, -1):
        low = high = joint[length]
        if length < num_valid:
            mass = sum(
                max(joint[length] * p[length][x] - _probability(q[length], x), 0.0)
                for x in range(len(p[0]))
            )
            gap, slack = 1.0 - joint[length], 1e-6
            low = max(mass - slack, 0.0) / (max(mass - slack, 0.0) + gap + slack)
            high = (mass + slack) / (mass + slack + max(gap - slack, 0.0))
        if (
            joint[length] == 0
        ):  # a draft that the target cannot emit: never kept, however small u is
            continue
        u = uniforms[length - 1]
        if u < low - TOLERANCE:
            return _finish(target, p, q, drafts, num_valid, length, joint, noise)
        if u < high + TOLERANCE:
            return [], False
    return _finish(target, p, q, drafts, num_valid, 0, joint, noise)


def _finish(
    target: np.ndarray,
    p: list[list[float]],
    q: list[list[float] | int],
    drafts: list[int],
    num_valid: int,
    length: int,
    joint: list[float],
    noise: list[float],
) -> tuple[list[int], bool]:
    if length == num_valid:
        token, clear = _draw(target[length], noise)
    else:
        token, clear = _draw_residual(joint[length], target[length], p[length], q[length], noise)
    return [*drafts[:length], token], clear


def _draw(logits: np.ndarray, noise: list[float]) -> tuple[int, bool]:
    return _highest([float(x) + g for x, g in zip(logits, noise, strict=True)])


def _draw_residual(
    joint: float, logits: np.ndarray, p: list[float], q: list[float] | int, noise: list[float]
) -> tuple[int, bool]:
    """Gumbel-max over max(joint p - q, 0); certain if the winner survives the rounding of every
    difference."""
    if sum(p) == 0:  # nothing but -inf (NaN): no distribution, but some id in range
        return _draw(logits, noise)
    lows, highs, scores = [], [], []
    for x in range(len(p)):
        gain, loss = joint * p[x], _probability(q, x)
        rounding = (
            0.0 if loss == 0 or gain == 0 or isinstance(q, int) else TOLERANCE * (gain + loss)
        )
        scores.append(_log(gain - loss) + noise[x])
        lows.append(_log(gain - loss - rounding) + noise[x])
        highs.append(_log(gain - loss + rounding) + noise[x])
    winner = max(range(len(p)), key=lambda x: scores[x])
    return winner, lows[winner] > -math.inf and all(
        lows[winner] > highs[x] + TOLERANCE for x in range(len(p)) if x != winner
    )


def _highest(scores: list[float]) -> tuple[int, bool]:
    """The first highest, and whether it is clearly highest; a row of nothing but -inf gives 0."""
    winner = 0
    for x in range(1, len(scores)):
        if scores[x] > scores[winner]:
            winner = x
    if scores[winner] == -math.inf:
        return 0, True
    return winner, all(
        scores[winner] - scores[x] > TOLERANCE for x in range(len(scores)) if x != winner
    )


def _draft_probabilities(inputs: Inputs, b: int, i: int, vocab: int) -> list[float] | int:
    """q of draft i over the target's ids; for a draft without logits the one token that q puts
    everything on."""
    if inputs.draft_logits is None:
        d = int(inputs.draft_tokens[b, i])
        return d if 0 <= d < vocab else -1
    row = np.asarray(inputs.draft_logits[b, i], np.float64)
    row[np.isnan(row)] = -np.inf
    own = _softmax(row)
    if inputs.target_to_draft is None:
        return own
    return [own[int(j)] if j >= 0 else 0.0 for j in inputs.target_to_draft]


def _probability(q: list[float] | int, x: int) -> float:
    if isinstance(q, int):
        return 1.0 if x == q and x >= 0 else 0.0
    return q[x] if 0 <= x < len(q) else 0.0


def _softmax(logits: np.ndarray) -> list[float]:
    top = float(max(logits))
    if top == -math.inf:
        return [0.0] * len(logits)
    weights = [math.exp(float(x) - top) for x in logits]
    total = sum(weights)
    return [w / total for w in weights]


def _log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf
