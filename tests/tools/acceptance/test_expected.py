"""The closed forms of expected acceptance against simulation: drafts, noise and rejection sampling
drawn many times over."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.tools.acceptance.expected import expected_acceptance, gumbel_agreement
from pallas_kernels.rejection_sampling import Inputs, rejection_sample
from tests.kernels.rejection.inputs import strict
from tests.support.slow import slow

VOCAB, K, TRIALS = 12, 3, 40_000
KNOWN = np.array([0, 1, 3, 4, 6, 7, 9, 11])  # the draft's vocabulary


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum(axis=-1, keepdims=True)


@pytest.mark.parametrize("known", [np.arange(VOCAB), KNOWN], ids=["whole vocabulary", "part of it"])
def test_agreement_of_gumbel_draws_is_the_closed_form(known):
    """Against the double sum, and against draws with common noise."""
    rng = np.random.default_rng(0)
    p, q = softmax(1.5 * rng.normal(size=VOCAB)), softmax(1.5 * rng.normal(size=len(known)))
    pk = p[known]
    outside = 1 - pk.sum()
    value = float(gumbel_agreement(jnp.float32(pk), jnp.float32(q), jnp.float32(outside)))
    double_sum = sum(
        1 / (np.maximum(pk / pk[x], q / q[x]).sum() + outside / pk[x]) for x in range(len(known))
    )
    assert value == pytest.approx(double_sum, abs=1e-5)
    noise = rng.gumbel(size=(200_000, VOCAB))
    agree = (np.log(p) + noise).argmax(axis=1) == known[
        (np.log(q) + noise[:, known]).argmax(axis=1)
    ]
    assert value == pytest.approx(agree.mean(), abs=5 * 0.5 / np.sqrt(len(noise)))


def test_agreement_with_ties_and_zeros():
    p, q = jnp.array([0.5, 0.5, 0.0, 0.0]), jnp.array([0.5, 0.0, 0.5, 0.0])
    assert float(gumbel_agreement(p, q, jnp.float32(0))) == pytest.approx(1 / 3)  # 1 / (1 + 1 + 1)
    assert float(gumbel_agreement(p, p, jnp.float32(0))) == pytest.approx(1.0)


def chain_logits(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Rows of logits by the token before: [VOCAB, VOCAB] and, over KNOWN, [VOCAB, 8]; the draft
    resembles the target."""
    target = 1.5 * rng.normal(size=(VOCAB, VOCAB))
    return target, target[:, KNOWN] + 0.7 * rng.normal(size=(VOCAB, len(KNOWN)))


@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize(
    ("drafts", "last"),
    [("sampled", 3), ("greedy", 2), slow("sampled", 2), slow("greedy", 3)],
    ids=["sampled", "greedy, one masked", "sampled, one masked", "greedy"],
)
def test_expectation_is_what_rejection_sampling_accepts(rule, drafts, last):
    """TRIALS rounds from one context at temperature 0.8, each with its own drafts and noise; the
    strict rule's draft shares the noise."""
    rng, temperature = np.random.default_rng(3), 0.8
    target, draft = chain_logits(rng)
    sample_noise = rng.gumbel(size=(TRIALS, K + 1, VOCAB))
    noise = (
        sample_noise[:, :K, KNOWN] if rule == "strict" else rng.gumbel(size=(TRIALS, K, len(KNOWN)))
    )
    if drafts == "greedy":
        noise = np.zeros_like(noise)
    before = np.full(TRIALS, 5)
    tokens, p, q = [], [target[before]], []
    for i in range(K):
        q.append(draft[before])
        before = KNOWN[(q[-1] / temperature + noise[:, i]).argmax(axis=1)]
        tokens.append(before)
        p.append(target[before])
    as_array = lambda x: jnp.asarray(np.stack(x, axis=1), jnp.float32)  # noqa: E731
    tokens = np.stack(tokens, axis=1).astype(np.int32)
    tokens[:, last:] = -1
    target_to_draft = np.full(VOCAB, -1, np.int32)
    target_to_draft[KNOWN] = np.arange(len(KNOWN))
    sampled = drafts == "sampled"
    q_logits = as_array(q) if sampled else None
    temperatures = jnp.full(TRIALS, temperature, jnp.float32)
    no, yes = jnp.zeros(TRIALS, bool), jnp.ones(TRIALS, bool)
    if rule == "strict":
        noise = jnp.asarray(sample_noise, jnp.float32)
        _, count = strict(as_array(p), jnp.asarray(tokens), no, noise, yes, temperatures)
    else:
        inputs = Inputs(
            target_logits=as_array(p),
            draft_tokens=jnp.asarray(tokens),
            draft_logits=q_logits,
            target_to_draft=jnp.asarray(target_to_draft) if sampled else None,
            greedy=no,
            uniforms=jnp.asarray(rng.random((TRIALS, K)), jnp.float32),
            recover_noise=jnp.asarray(rng.gumbel(size=(TRIALS, VOCAB)), jnp.float32),
            active=yes,
            temperature=temperatures,
            rule=rule,
        )
        _, count = rejection_sample(inputs)
    accepted = np.asarray(count)[:, None] > 1 + np.arange(K)
    expected = np.asarray(
        getattr(
            expected_acceptance(
                as_array(p),
                jnp.asarray(tokens),
                q_logits,
                jnp.asarray(KNOWN, jnp.int32),
                temperatures,
            ),
            rule,
        )
    )
    assert (
        expected[:, :last].min() >= 0
        and (expected[:, last:] == 0).all()
        and not accepted[:, last:].any()
    )
    error = np.sqrt(accepted.var(axis=0) + expected.var(axis=0)) / np.sqrt(TRIALS)
    assert (np.abs(accepted.mean(axis=0) - expected.mean(axis=0)) <= 4.5 * error + 1e-6).all(), (
        accepted.mean(0),
        expected.mean(0),
        error,
    )
    assert expected[:, 0].mean() > 0.3


def test_block_is_expected_to_accept_no_less_than_probabilistic_and_that_no_less_than_strict():
    """On the same drafts, in mean length; with room between them."""
    target, draft = chain_logits(np.random.default_rng(3))
    keys = jax.random.split(jax.random.key(0), K)
    before, tokens, p, q = jnp.full(20_000, 5), [], [], []
    for i in range(K):
        p.append(jnp.asarray(target, jnp.float32)[before])
        q.append(jnp.asarray(draft, jnp.float32)[before])
        before = jnp.asarray(KNOWN)[jax.random.categorical(keys[i], q[-1])]
        tokens.append(before)
    p.append(jnp.asarray(target, jnp.float32)[before])
    e = expected_acceptance(
        jnp.stack(p, 1),
        jnp.stack(tokens, 1).astype(jnp.int32),
        jnp.stack(q, 1),
        jnp.asarray(KNOWN, jnp.int32),
        jnp.ones(20_000),
    )
    strict, probabilistic, block = (
        float(x.sum(axis=1).mean()) for x in (e.strict, e.probabilistic, e.block)
    )
    assert strict + 0.05 < probabilistic < block - 0.005
