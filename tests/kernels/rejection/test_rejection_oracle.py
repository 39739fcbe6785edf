"""The op against the float64 oracle: the same noise gives the same tokens, over thousands of random
requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.rejection import oracle
from tests.kernels.rejection.inputs import Inputs, emitted, judge, make
from tests.support.slow import slow_unless

BATCH = 300
# (K, V): K = 0 and 1 have no inner prefix, V = 1 has no other token.
SHAPES = [(0, 5), (1, 4), (2, 3), (3, 7), (5, 9), (2, 1)]
DRAFTS = ["same_vocabulary", "small_vocabulary", "one_hot"]


def random_inputs(seed: int, K: int, vocab: int, drafts: str) -> Inputs:
    """Close, far, equal and truncated distributions; drafts mostly drawn from q, some placeholders,
    absent or out of range; a few NaN."""
    rng = np.random.default_rng(seed)
    shape = (BATCH, K + 1, vocab)
    target = rng.normal(size=shape) * rng.choice([0.3, 1.0, 4.0, 30.0], size=(BATCH, 1, 1))
    blend = rng.choice([1.0, 0.9, 0.0, -1.0], size=(BATCH, 1, 1))
    draft = (blend * target + (blend != 1.0) * rng.normal(size=shape))[:, :K]
    target[rng.random(shape) < 0.1] = -np.inf
    draft[rng.random(draft.shape) < 0.1] = -np.inf
    target[rng.random(shape) < 0.01] = np.nan
    target[rng.random(BATCH) < 0.02] = np.nan
    draft[rng.random(draft.shape) < 0.01] = np.nan

    target_to_draft, draft_logits = None, draft.astype(np.float32)
    kept = np.arange(vocab)
    if drafts == "small_vocabulary":
        kept = rng.permutation(vocab)[
            : max(1, (2 * vocab) // 3)
        ]  # the draft's ids are not in the target's order
        target_to_draft = np.full(vocab, -1, np.int32)
        target_to_draft[kept] = np.arange(len(kept))
        draft_logits = draft_logits[..., kept]
    noisy = draft_logits + rng.gumbel(size=draft_logits.shape)
    tokens = kept[np.where(np.isnan(noisy), -np.inf, noisy).argmax(-1)]
    odd = rng.random(tokens.shape) < 0.1
    tokens = np.where(odd, rng.integers(-1, vocab + 2, tokens.shape), tokens)
    uniforms = rng.random((BATCH, K), np.float32)
    uniforms[rng.random(uniforms.shape) < 0.01] = 0.0
    return make(
        target,
        tokens,
        seed,
        draft_logits=None if drafts == "one_hot" else draft_logits,
        target_to_draft=None if drafts == "one_hot" else target_to_draft,
        greedy=rng.random(BATCH) < 0.2,
        uniforms=uniforms,
        acceptance_rates=np.linspace(0.9, 0.6, K, dtype=np.float32),
        active=rng.random(BATCH) < 0.95,
    )


WAYS = [
    ("strict", "one_hot"),
    ("synthetic", "one_hot"),
    *((rule, drafts) for rule in ("probabilistic", "block") for drafts in DRAFTS),
]
# One shape with every way, one way in three with the others: each of them with each rule.
USUAL = [
    (*way, *shape)
    for i, way in enumerate(WAYS)
    for j, shape in enumerate(SHAPES)
    if shape == (3, 7) or (i + j) % 3 == 0
]


@pytest.mark.parametrize(
    ("rule", "drafts", "K", "vocab"),
    slow_unless(USUAL, [(*way, *shape) for way in WAYS for shape in SHAPES]),
)
def test_same_noise_gives_the_oracles_tokens(
    rule: str, drafts: str, K: int, vocab: int, implementation: str
) -> None:
    inputs = random_inputs(K * 100 + vocab, K, vocab, drafts)
    if (
        rule == "strict"
    ):  # otherwise nearly nothing matches: let half the drafts be what the target will sample
        noisy = inputs.target_logits + np.where(
            inputs.greedy[:, None, None], 0, inputs.sample_noise
        )
        samples = np.where(np.isnan(noisy), -np.inf, noisy).argmax(-1)[:, :K]
        half = np.random.default_rng(1).random(samples.shape) < 0.5
        inputs = replace(
            inputs, draft_tokens=np.where(half, samples, inputs.draft_tokens).astype(np.int32)
        )
    actual = emitted(*judge(inputs, rule, implementation))
    uncertain = 0
    for b in range(BATCH):
        expected, certain = oracle.verify(inputs, b, rule)
        uncertain += not certain
        assert not certain or actual[b] == expected, (
            f"request {b}: expected {expected}, got {actual[b]}\n{inputs.rows([b])}"
        )
    assert uncertain < 0.1 * BATCH, f"{uncertain} of {BATCH} requests are too close to call"
    if K > 1 and vocab > 1:  # the table of lengths is not empty anywhere: every branch was compared
        assert len({len(tokens) for tokens in actual}) == K + 2
