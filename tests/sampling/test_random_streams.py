"""Truncation against two oracles, the full tail of the Gumbel noise, and random streams that do not
touch each other."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.verify import verify_rows
from jaxspec.drafts.autoregressive import Proposal
from jaxspec.sampling import state as sampling
from jaxspec.sampling.state import gumbel_noise, noise_stream, sample
from pallas_kernels.truncation import truncate
from tests.support.statistics import chi_square, within_limit
from tests.support.tiny import sampling_state
from tests.support.toys import toy_config

noise_of = jax.jit(gumbel_noise, static_argnums=(1, 4))
truncated = jax.jit(truncate)
judged = jax.jit(verify_rows, static_argnums=0)


def keys_of(count: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.stack([np.full(count, seed), np.arange(count)], axis=1), jnp.uint32)


# ---- truncation


def kept_by_definition(logits: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """bool [vocab], float64: the top_k largest, then the fewest of these, largest first, whose mass
    reaches top_p."""
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    order = order[: top_k or len(order)]
    weights = np.exp(logits[order].astype(np.float64) - logits.max())
    reached = np.cumsum(weights / weights.sum())
    count = len(order) if top_p >= 1 else int(np.searchsorted(reached, top_p, side="left")) + 1
    kept = np.zeros(len(logits), bool)
    kept[order[:count]] = True
    return kept


CASES = [(k, p) for k in (0, 1, 5, 99) for p in (0.5, 0.9, 0.99, 1.0)]


def batch_of_cases(vocab: int = 100) -> tuple[jax.Array, jax.Array, jax.Array]:
    logits = 3 * np.random.default_rng(vocab).normal(size=(len(CASES), 4, vocab)).astype(np.float32)
    return (
        jnp.asarray(logits),
        jnp.asarray([k for k, _ in CASES], jnp.int32),
        jnp.asarray([p for _, p in CASES], jnp.float32),
    )


@pytest.mark.parametrize("vocab", [100, 999])
def test_truncation_keeps_the_set_that_its_definition_keeps(vocab: int) -> None:
    logits, top_k, top_p = batch_of_cases(vocab)
    out = np.asarray(truncated(logits, top_k, top_p))
    for row, (k, p) in enumerate(CASES):
        for got, raw in zip(out[row], np.asarray(logits[row]), strict=True):
            kept = kept_by_definition(raw, k, p)
            np.testing.assert_array_equal(
                got, np.where(kept, raw, -np.inf), err_msg=f"top_k {k} top_p {p}"
            )


def test_top_k_above_the_vocabulary_and_top_p_of_1_keep_everything() -> None:
    logits = batch_of_cases()[0][:1]
    out = truncated(logits, jnp.asarray([10**6], jnp.int32), jnp.ones(1, jnp.float32))
    np.testing.assert_array_equal(out, logits)


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize(("top_k", "top_p"), [c for c in CASES if c != (0, 1.0)])
def test_truncation_equals_transformers(top_k: int, top_p: float) -> None:
    import torch
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    logits = batch_of_cases()[0][:, 0]
    count = len(CASES)
    expected = torch.from_numpy(np.array(logits))
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    out = truncated(
        logits[:, None], jnp.full(count, top_k, jnp.int32), jnp.full(count, top_p, jnp.float32)
    )[:, 0]
    np.testing.assert_array_equal(out, expected.numpy())


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1.0), (5, 1.0), (99, 1.0), (0, 0.5), (0, 0.9), (0, 0.99)]
)
def test_judged_tokens_stay_inside_the_kept_set(rule: str, top_k: int, top_p: float) -> None:
    """cases.md 3.1: 100 requests of 3 drafts over 100 tokens, 0.1 more on top_k of them; drafts
    from all over the vocabulary."""
    vocab, requests, K = 100, 100, 3
    rng = np.random.default_rng(top_k + int(100 * top_p))
    if top_k:
        logits = np.zeros((requests, K + 1, vocab), np.float32)
        for row in logits.reshape(-1, vocab):
            row[rng.permutation(vocab)[:top_k]] += 0.1
    else:
        logits = rng.normal(size=(requests, K + 1, vocab)).astype(np.float32)
    drafts = rng.integers(0, vocab, (requests, K)).astype(np.int32)
    drafts[::2] = np.argmax(logits[::2, :K], axis=-1)  # and some that are kept
    verification = judged(
        toy_config(vocab, K, rule, processors=frozenset({"truncation"})),
        jnp.asarray(logits),
        Proposal(
            jnp.asarray(drafts),
            None if rule == "strict" else jnp.zeros((requests, K, vocab), jnp.float32),
        ),
        None,
        jax.tree.map(
            jnp.asarray,
            sampling_state(range(requests), 1.0, [top_k] * requests, [top_p] * requests),
        ),
        jnp.full(requests, 9, jnp.int32),
        jnp.ones(requests, bool),
    )
    tokens, num_sampled = (
        np.asarray(verification.output_tokens),
        np.asarray(verification.num_sampled),
    )
    assert rule == "strict" or num_sampled.max() > 1
    for b, i in itertools.product(range(requests), range(K + 1)):
        if i < num_sampled[b]:
            assert kept_by_definition(logits[b, i], top_k, top_p)[tokens[b, i]]


# ---- noise (cases.md 3.4, at sizes for a CPU)


def test_the_noise_has_its_full_tail() -> None:
    """JAX's default form takes 2 ** 23 values: above 10 nats it repeats itself, and it never
    exceeds about 16."""
    draws = np.asarray(
        noise_of(keys_of(1000), "draft", jnp.zeros(1000, jnp.int32), 0, 4096)
    ).ravel()
    tail = draws[draws > 10]
    expected = draws.size * -np.expm1(-np.exp(-10.0))
    assert abs(len(tail) - expected) < 10 * np.sqrt(expected)
    assert len(np.unique(tail)) == len(tail)
    default = np.asarray(jax.random.gumbel(jax.random.key(0), (draws.size,), jnp.float32))
    assert len(np.unique(default[default > 10])) < (default > 10).sum(), (
        "the comparison would not notice the default form"
    )


@pytest.mark.parametrize("vocab", [999, 1024, 4097])
def test_gumbel_max_samples_the_softmax(vocab: int) -> None:
    trials = 20_000_000 // vocab
    logits = np.random.default_rng(vocab).normal(size=vocab).astype(np.float32) * 2
    tokens = []
    draw = jax.jit(
        lambda keys: sample(
            jnp.broadcast_to(logits, (keys.shape[0], vocab)),
            draw_noise(keys, vocab),
            jnp.zeros(keys.shape[0], bool),
        )
    )
    for begin in range(0, trials - 2000, 2000):
        tokens.append(np.asarray(draw(keys_of(2000, seed=begin))))
    flat = np.concatenate(tokens)
    assert flat.min() >= 0 and flat.max() < vocab
    weights = np.exp(logits.astype(np.float64))
    assert within_limit(*chi_square(np.bincount(flat, minlength=vocab), weights / weights.sum()))


def draw_noise(keys: jax.Array, vocab: int) -> jax.Array:
    return gumbel_noise(keys, "sample", jnp.full(keys.shape[0], 3, jnp.int32), 0, vocab)


def test_greedy_rows_take_the_argmax_whatever_the_noise() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(128, 999)), jnp.float32)
    noise = noise_of(keys_of(128), "sample", jnp.zeros(128, jnp.int32), 0, 999)
    greedy = jnp.arange(128) % 2 == 0
    tokens = np.asarray(sample(logits, noise, greedy))
    best = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(tokens[::2], best[::2])
    assert (tokens[1::2] != best[1::2]).any()
    np.testing.assert_array_equal(sample(logits, None, greedy), best)


def test_excluded_tokens_are_never_sampled_and_nan_stays_in_range() -> None:
    noise = noise_of(keys_of(512), "sample", jnp.zeros(512, jnp.int32), 0, 64)
    no_row = jnp.zeros(512, bool)
    logits = jnp.where(jnp.arange(64) % 3 == 0, 0.0, -jnp.inf) * jnp.ones((512, 1), jnp.float32)
    assert not (np.asarray(sample(logits, noise, no_row)) % 3).any()
    single = jnp.where(jnp.arange(64) == 41, -50.0, -jnp.inf) * jnp.ones((512, 1), jnp.float32)
    assert (np.asarray(sample(single, noise, no_row)) == 41).all()
    tokens = np.asarray(sample(jnp.full((512, 64), jnp.nan), noise, no_row))
    assert ((tokens >= 0) & (tokens < 64)).all()


# ---- streams


def test_streams_positions_offsets_and_keys_are_independent() -> None:
    """No two of them share a number, and no two correlate: offset 1 of a position is not offset 0
    of the next."""
    size = 4096
    drawn: dict[Any, np.ndarray] = {}
    for stream, position, offset in itertools.product(sampling.STREAMS, (5, 6), (0, 1)):
        drawn[stream, position, offset] = np.asarray(
            noise_of(keys_of(1), stream, jnp.asarray([position], jnp.int32), offset, size)
        )[0]
    drawn["other seed"] = np.asarray(
        noise_of(keys_of(2)[1:], "draft", jnp.asarray([5], jnp.int32), 0, size)
    )[0]
    drawn["other high half"] = np.asarray(
        noise_of(keys_of(1, seed=1), "draft", jnp.asarray([5], jnp.int32), 0, size)
    )[0]
    for (a, x), (b, y) in itertools.combinations(drawn.items(), 2):
        assert np.intersect1d(x, y).size < size // 100, (a, b)  # a few float32 values coincide
        assert abs(np.corrcoef(x, y)[0, 1]) * np.sqrt(size) < 5, (a, b)


def test_a_requests_noise_does_not_depend_on_its_row_or_the_batch() -> None:
    order = np.array([3, 0, 2, 1, 3])
    positions = jnp.asarray([4, 9, 2, 7], jnp.int32)
    uniforms = lambda keys, position: noise_stream(keys, "accept", position).uniforms(3)  # noqa: E731
    for function in (partial(gumbel_noise, stream="recover", offset=0, size=64), uniforms):
        draw = jax.jit(function)
        whole = np.asarray(draw(keys_of(4), position=positions))
        np.testing.assert_array_equal(
            draw(keys_of(4)[order], position=positions[order]), whole[order]
        )
        np.testing.assert_array_equal(draw(keys_of(4)[2:3], position=positions[2:3]), whole[2:3])


def test_uniforms_are_in_the_half_open_unit_interval_and_uniform() -> None:
    drawn = np.asarray(
        noise_stream(keys_of(50_000), "accept", jnp.zeros(50_000, jnp.int32)).uniforms(3)
    )
    assert drawn.min() >= 0 and drawn.max() < 1 and drawn.dtype == np.float32
    for column in drawn.T:
        assert within_limit(
            *chi_square(np.bincount((column * 100).astype(int), minlength=100), np.full(100, 0.01))
        )


@pytest.mark.parametrize("vocab", [1, 5, 255, 256, 257, 1000])
def test_argmax_is_the_first_of_the_largest(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    x = rng.integers(-3, 4, (60, vocab)).astype(np.float32)
    x[0], x[1, : vocab - 1] = -np.inf, -np.inf
    np.testing.assert_array_equal(sampling.argmax(jnp.asarray(x)), np.argmax(x, axis=-1))
