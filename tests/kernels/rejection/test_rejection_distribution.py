"""The output is distributed as the target's: chi-square over 200,000 rounds of the op, drafts drawn
from q with noise of their own.

Here the drafts come from tables; the same through the real drafter and its random streams is tested
elsewhere.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rejection_sampling import Inputs, rejection_sample
from tests.kernels.rejection.inputs import strict
from tests.support.slow import slow, slow_unless
from tests.support.statistics import chi_square, within_limit

pytestmark = [pytest.mark.once, pytest.mark.optimised]

TRIALS, CHUNK = 200_000, 20_000
LOSSLESS = ["strict", "probabilistic", "block"]


def gumbel(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """By log1p, as mode="high" but at half its cost: the tail past 17 is clamped, which 64 tokens
    cannot show."""
    return -jnp.log(jnp.maximum(jax.random.exponential(key, shape), 2.0**-25))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


class Draft(NamedTuple):
    """logits: [K, Vd] that draft tokens are drawn from; told: [K, Vd] that the op is told (the
    same, unless the test breaks it)."""

    logits: np.ndarray
    told: np.ndarray | None
    to_target: np.ndarray
    from_target: np.ndarray | None = None


def honest(logits: np.ndarray) -> Draft:
    return Draft(logits, logits, np.arange(logits.shape[-1], dtype=np.int32))


def onto_small_vocabulary(draft: Draft, absent: int, seed: int) -> Draft:
    """The same draft without `absent` of its tokens, its own ids in another order."""
    vocab = draft.logits.shape[-1]
    kept = np.random.default_rng(seed).permutation(vocab)[: vocab - absent].astype(np.int32)
    from_target = np.full(vocab, -1, np.int32)
    from_target[kept] = np.arange(len(kept), dtype=np.int32)
    return Draft(draft.logits[..., kept], draft.logits[..., kept], kept, from_target)


# ---- one row of logits per position, whatever was drafted before: large vocabularies, K = 3


@functools.partial(jax.jit, static_argnames=("rule", "share_noise", "implementation"))
def independent_rounds(
    seed: jax.Array,
    target: jax.Array,
    draft: Draft,
    num_valid: jax.Array,
    *,
    rule: str,
    share_noise: bool,
    implementation: str,
) -> tuple[jax.Array, jax.Array]:
    """CHUNK rounds with the target rows [K+1, V] and `num_valid` drafts, the others placeholders.

    share_noise: the recovered token reuses the noise that drew the rejected draft. The strict rule
        shares noise by design, row by row.
    """
    rows, vocab = target.shape
    draft_key, accept_key, recover_key = jax.random.split(jax.random.key(seed, impl="rbg"), 3)
    sample_noise = gumbel(recover_key, (CHUNK, rows, vocab)) if rule == "strict" else None
    draft_noise = None
    if sample_noise is not None:
        draft_noise = sample_noise[:, :-1, draft.to_target]
    elif share_noise:
        draft_noise = gumbel(draft_key, (CHUNK, *draft.logits.shape))
    if draft_noise is None:  # by inversion: one random number a token and not one for each id
        cumulative = jnp.cumsum(jax.nn.softmax(draft.logits), axis=-1)
        uniform = jax.random.uniform(draft_key, (CHUNK, rows - 1, 1)) * cumulative[:, -1:]
        tokens = (cumulative <= uniform).sum(-1)
    else:
        tokens = jnp.argmax(draft.logits + draft_noise, axis=-1)
    tokens = draft.to_target[tokens]
    tokens = jnp.where(jnp.arange(rows - 1, dtype=jnp.int32) < num_valid, tokens, -1)

    def judge(recover_noise: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        target_logits = jnp.broadcast_to(target, (CHUNK, rows, vocab))
        no, yes = jnp.zeros(CHUNK, bool), jnp.ones(CHUNK, bool)
        if sample_noise is not None:
            return strict(target_logits, tokens, no, sample_noise, yes)
        told = draft.told
        inputs = Inputs(
            target_logits=target_logits,
            draft_tokens=tokens,
            draft_logits=None if told is None else jnp.broadcast_to(told, (CHUNK, *told.shape)),
            target_to_draft=None if draft.from_target is None else jnp.asarray(draft.from_target),
            greedy=no,
            uniforms=jax.random.uniform(accept_key, (CHUNK, rows - 1)),
            recover_noise=recover_noise,
            active=yes,
            rule=rule,
        )
        return rejection_sample(inputs, implementation=implementation)

    if rule == "strict":
        return judge(None)
    noise = gumbel(recover_key, (CHUNK, vocab))
    output, num_sampled = judge(noise)
    # what was accepted does not depend on the noise, so the second call meets the same rejections
    if share_noise:
        assert draft_noise is not None
        rejected = jnp.minimum(num_sampled - 1, rows - 2)[:, None, None]
        shared = jnp.take_along_axis(draft_noise, rejected, axis=1).squeeze(1)
        output, num_sampled = judge(jnp.where((num_sampled < rows)[:, None], shared, noise))
    return output, num_sampled


def play(
    rule: str,
    target: np.ndarray,
    draft: Draft,
    implementation: str,
    *,
    num_valid: int = 3,
    share_noise: bool = False,
    trials: int = TRIALS,
) -> tuple[np.ndarray, np.ndarray]:
    chunks = [
        independent_rounds(
            np.uint32(seed),
            target,
            draft,
            np.int32(num_valid),
            rule=rule,
            share_noise=share_noise,
            implementation=implementation,
        )
        for seed in range(trials // CHUNK)
    ]
    return np.concatenate([np.asarray(c[0]) for c in chunks]), np.concatenate(
        [np.asarray(c[1]) for c in chunks]
    )


def statistics(
    tokens: np.ndarray, num_sampled: np.ndarray, target: np.ndarray
) -> list[tuple[float, int]]:
    """chi_square at every position that at least 300 rounds reached, over those rounds."""
    found = []
    for position in range(num_sampled.max()):
        reached = tokens[num_sampled > position, position]
        if reached.size >= 300:
            found.append(
                chi_square(
                    np.bincount(reached, minlength=target.shape[1]), softmax(target[position])
                )
            )
    return found


def assert_follows(
    tokens: np.ndarray, num_sampled: np.ndarray, target: np.ndarray, positions: int
) -> None:
    found = statistics(tokens, num_sampled, target)
    assert len(found) >= positions
    for position, (statistic, df) in enumerate(found):
        assert within_limit(statistic, df), (
            f"position {position}: chi-square {statistic:.0f} for df {df}"
        )


def logits_of(vocab: int, temperature: float, kind: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(vocab)
    target = rng.normal(size=(4, vocab))
    draft = {
        "independent": rng.normal(size=(3, vocab)),
        "negative": -target[:3],
        "close": target[:3] + 0.5 * rng.normal(size=(3, vocab)),
    }
    return (target / temperature).astype(np.float32), (draft[kind] / temperature).astype(np.float32)


@pytest.mark.parametrize(
    # Slow: each rule with each kind, each of both with each temperature.
    ("rule", "kind", "temperature"),
    [
        ("strict", "close", 0.6),
        slow("strict", "negative", 1.0),
        slow("probabilistic", "independent", 1.0),
        ("probabilistic", "negative", 0.6),
        slow("block", "independent", 0.6),
        ("block", "negative", 1.0),
    ],
)
def test_every_position_follows_the_target(
    rule: str, kind: str, temperature: float, implementation: str
) -> None:
    target, draft = logits_of(64, temperature, kind)
    tokens, num_sampled = play(rule, target, honest(draft), implementation)
    # Strict with the target's negative hardly ever agrees, and never comes to the later positions.
    assert_follows(
        tokens, num_sampled, target, positions=1 if (rule, kind) == ("strict", "negative") else 4
    )


@pytest.mark.parametrize("rule", [slow("strict"), "probabilistic", "block"])
def test_small_draft_vocabulary_follows_the_target(rule: str, implementation: str) -> None:
    target, draft = logits_of(64, 1.0, "close")
    tokens, num_sampled = play(
        rule, target, onto_small_vocabulary(honest(draft), absent=24, seed=1), implementation
    )
    assert_follows(tokens, num_sampled, target, positions=4)


@pytest.mark.parametrize(
    ("rule", "placeholders"),
    [("probabilistic", 2), ("block", 1), slow("probabilistic", 1), slow("block", 2)],
)
def test_trailing_placeholders_leave_the_distribution_alone(
    rule: str, placeholders: int, implementation: str
) -> None:
    target, draft = logits_of(64, 1.0, "close")
    tokens, num_sampled = play(
        rule, target, honest(draft), implementation, num_valid=3 - placeholders
    )
    assert num_sampled.max() == 3 - placeholders + 1
    assert_follows(tokens, num_sampled, target, positions=3 - placeholders + 1)


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_noise_shared_by_draft_and_recovered_token_is_caught(
    rule: str, implementation: str
) -> None:
    """vLLM's issue #47386: the recovered token is the one the draft nearly drew."""
    target, draft = logits_of(64, 1.0, "independent")
    shared = statistics(
        *play(rule, target, honest(draft), implementation, share_noise=True), target
    )
    assert not within_limit(*shared[0])


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_zeroed_draft_logits_of_later_steps_are_caught(rule: str, implementation: str) -> None:
    """vLLM's PR #37639: drafts of steps 1+ came from q, the rejection sampler was told zeros. K = 1
    cannot show it."""
    target, draft = logits_of(64, 1.0, "independent")
    told = np.concatenate([draft[:1], np.zeros_like(draft[1:])])
    tokens, num_sampled = play(rule, target, honest(draft)._replace(told=told), implementation)
    _, honest_num = play(rule, target, honest(draft), implementation, trials=60_000)
    found = statistics(tokens, num_sampled, target)
    assert not within_limit(*found[1])
    for position in (1, 2):  # rates given that the position was reached
        lied = (num_sampled > position + 1).sum() / (num_sampled > position).sum()
        true = (honest_num > position + 1).sum() / (honest_num > position).sum()
        assert lied > true + 0.05
    if rule == "probabilistic":  # the first position does not know of it
        assert within_limit(*found[0])


def test_acceptance_is_the_overlap_of_p_and_q_and_block_accepts_no_less(
    implementation: str,
) -> None:
    target, draft = logits_of(64, 1.0, "close")
    num_sampled = play("probabilistic", target, honest(draft), implementation, trials=100_000)[1]
    overlap = np.minimum(softmax(target[:3]), softmax(draft)).sum(-1)
    for position in range(3):
        rate = (num_sampled > position + 1).mean()
        assert rate == pytest.approx(
            np.prod(overlap[: position + 1]), abs=0.008
        )  # five standard deviations
    block = play("block", target, honest(draft), implementation, trials=100_000)[1]
    assert block.mean() >= num_sampled.mean() - 1e-2


@pytest.mark.parametrize(("rule", "accepted"), [("probabilistic", 10 / 9), ("block", 11 / 9)])
def test_block_papers_example(rule: str, accepted: float, implementation: str) -> None:
    """2403.10444, section 2: p = (1/3, 2/3), q = (2/3, 1/3), K = 2: 10/9 drafts accepted one by
    one, 11/9 as a block."""
    p, q = np.log(np.array([1, 2], np.float32) / 3), np.log(np.array([2, 1], np.float32) / 3)
    num_sampled = play(
        rule, np.stack([p, p, p]), honest(np.stack([q, q])), implementation, num_valid=2
    )[1]
    assert num_sampled.mean() - 1 == pytest.approx(accepted, abs=0.01)


# ---- rows that depend on what was drafted before: the joint distribution of the whole block, K = 2


@functools.partial(jax.jit, static_argnames=("rule", "one_hot", "implementation"))
def dependent_rounds(
    seed: jax.Array,
    target: tuple[jax.Array, jax.Array, jax.Array],
    draft: tuple[jax.Array, jax.Array],
    to_target: jax.Array,
    from_target: jax.Array | None,
    placeholder_rate: jax.Array,
    *,
    rule: str,
    one_hot: bool,
    implementation: str,
) -> jax.Array:
    """TRIALS rounds; three tokens of each [TRIALS, 3], those past num_sampled continued by plain
    sampling from the target.

    target: logits [V], [V, V], [V, V, V] of a token given those before it; draft: [Vd], [V, Vd].
    """
    vocab = target[0].shape[0]
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 6)
    noise = gumbel(keys[0], (TRIALS, 2, draft[0].shape[0])) * (0.0 if one_hot else 1.0)
    first_logits = jnp.broadcast_to(draft[0], (TRIALS, *draft[0].shape))
    first = to_target[jnp.argmax(first_logits + noise[:, 0], axis=-1)]
    second_logits = draft[1][first]
    second = to_target[jnp.argmax(second_logits + noise[:, 1], axis=-1)]
    rows = jnp.stack(
        [jnp.broadcast_to(target[0], (TRIALS, vocab)), target[1][first], target[2][first, second]],
        axis=1,
    )
    missing = jax.random.uniform(keys[1], (TRIALS, 2)) < placeholder_rate
    drafts = jnp.where(missing, -1, jnp.stack([first, second], axis=1))
    no, yes = jnp.zeros(TRIALS, bool), jnp.ones(TRIALS, bool)
    if rule == "strict":
        tokens, num_sampled = strict(rows, drafts, no, gumbel(keys[4], rows.shape), yes)
    else:
        inputs = Inputs(
            target_logits=rows,
            draft_tokens=drafts,
            draft_logits=None if one_hot else jnp.stack([first_logits, second_logits], axis=1),
            target_to_draft=None if one_hot else from_target,
            greedy=no,
            uniforms=jax.random.uniform(keys[2], (TRIALS, 2)),
            recover_noise=gumbel(keys[3], (TRIALS, vocab)),
            active=yes,
            rule=rule,
        )
        tokens, num_sampled = rejection_sample(inputs, implementation=implementation)
    later = gumbel(keys[5], (TRIALS, 2, vocab))
    x1 = tokens[:, 0]
    x2 = jnp.where(
        num_sampled > 1,
        tokens[:, 1],
        jnp.argmax(target[1][x1] + later[:, 0], axis=-1).astype(jnp.int32),
    )
    x3 = jnp.where(
        num_sampled > 2,
        tokens[:, 2],
        jnp.argmax(target[2][x1, x2] + later[:, 1], axis=-1).astype(jnp.int32),
    )
    return jnp.stack([x1, x2, x3], axis=1)


DRAFTS = ("random", "negative", "one_hot", "small_vocabulary", "placeholders")
# Every kind of drafts, under a rule that reads q where there is one.
USUAL = [
    ("strict", "random"),
    ("probabilistic", "negative"),
    ("probabilistic", "one_hot"),
    ("probabilistic", "small_vocabulary"),
    ("block", "random"),
    ("block", "one_hot"),
    ("block", "placeholders"),
]


@pytest.mark.parametrize(
    ("rule", "drafts"), slow_unless(USUAL, itertools.product(LOSSLESS, DRAFTS))
)
def test_joint_distribution_of_the_block_is_the_targets(
    rule: str, drafts: str, implementation: str
) -> None:
    vocab = {"one_hot": 3, "small_vocabulary": 4}.get(drafts, 5)
    rng = np.random.default_rng(vocab)
    target = [rng.normal(size=(vocab,) * n).astype(np.float32) for n in (1, 2, 3)]
    draft = [rng.normal(size=(vocab,) * n).astype(np.float32) for n in (1, 2)]
    if drafts == "negative":
        draft = [-target[0], -target[1]]
    if drafts == "one_hot":  # the likeliest tokens: where p(d) is small, a wrong rule hardly shows
        draft = [target[0], target[1]]
    to_target, from_target = np.arange(vocab, dtype=np.int32), None
    if drafts == "small_vocabulary":
        small = onto_small_vocabulary(honest(draft[1]), absent=1, seed=vocab)
        draft, to_target, from_target = (
            [draft[0][small.to_target], small.logits],
            small.to_target,
            small.from_target,
        )
    tokens = dependent_rounds(
        np.uint32(vocab),
        tuple(target),
        tuple(draft),
        to_target,
        from_target,
        np.float32(0.2 if drafts == "placeholders" else 0.0),
        rule=rule,
        one_hot=drafts == "one_hot",
        implementation=implementation,
    )
    p1, p2, p3 = (softmax(t) for t in target)
    joint = p1[:, None, None] * p2[:, :, None] * p3
    bins = np.ravel_multi_index(tuple(np.asarray(tokens).T), joint.shape)
    statistic, df = chi_square(np.bincount(bins, minlength=joint.size), joint)
    assert within_limit(statistic, df), f"chi-square {statistic:.0f} for df {df}"
