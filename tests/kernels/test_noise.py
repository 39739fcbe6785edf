"""Gumbel noise of single tokens: jax's hash and float64's formula to the bit or its rounding, and a
sample of the standard Gumbel."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pallas_kernels import noise
from tests.kernels import noise_oracle
from tests.support.statistics import chi_square, within_limit

KEYS = np.asarray([[0, 0], [3, 4], [0, 2**32 - 1], [2**31, 77]], np.uint32)
HIGH_IS_ZERO = np.asarray([5_297_128, 8_507_014, 9_603_566, 17_284_040])  # token ids, under KEYS[0]
MANY = 1 << 20


def as_key(words: np.ndarray) -> noise.Key:
    return jnp.asarray(words[..., :1]), jnp.asarray(words[..., 1:])


def noise_of(words: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    """Noise [..., tokens] of key words [..., 2], as one program."""
    return np.asarray(jax.jit(noise.gumbel)(as_key(words), jnp.asarray(token_ids, jnp.int32)))


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, np.ndarray]:
    """The uniform halves, float32 [keys, MANY] each, that the noise of many tokens is made of."""
    with monkeypatch.context() as patch:
        patch.setattr(noise, "to_gumbel", lambda high, low, *_: (high, low))
        high, low = noise.gumbel(as_key(KEYS), jnp.arange(MANY, dtype=jnp.int32))
    return np.asarray(high), np.asarray(low)


# ---- the very numbers


@pytest.mark.parametrize(
    "token_ids", [np.arange(1), np.arange(5001), 2**31 - 1 - np.arange(128), HIGH_IS_ZERO]
)
def test_noise_is_float64s_of_jaxs_hash(token_ids: np.ndarray) -> None:
    expected = np.stack([noise_oracle.gumbel(key, token_ids) for key in KEYS])
    np.testing.assert_allclose(
        noise_of(KEYS, token_ids), expected, rtol=1e-6, atol=1e-6
    )  # a few roundings; atol where a logarithm is near 0


def test_the_halves_are_the_two_words_of_one_hash_bit_for_bit(
    halves: tuple[np.ndarray, np.ndarray],
) -> None:
    for row, key in enumerate(KEYS):
        for half, expected in zip(halves, noise_oracle.halves(key, np.arange(MANY)), strict=True):
            np.testing.assert_array_equal(half[row], np.float32(expected) * np.float32(2.0**-23))


def test_noise_has_the_tail_of_46_bits_and_no_infinity() -> None:
    """Where a sample would need 2^46 draws."""
    high, low = (
        jnp.float32([0, 0, 2.0**-23, 0.5, 1 - 2.0**-23]),
        jnp.float32([0, 2.0**-23, 0, 0.9, 0.9]),
    )
    x = np.asarray([2.0**-47, 2.0**-46 + 2.0**-47, 2.0**-23, 0.5, 1 - 2.0**-23])
    np.testing.assert_allclose(noise.to_gumbel(high, low), -np.log(-np.log1p(-x)), rtol=1e-6)


def test_tokens_reach_beyond_what_one_word_can_tell() -> None:
    """Where the first word is 0 in 23 bits, the noise is the second's alone: above 23 log 2, no two
    the same."""
    drawn = noise_of(KEYS[0], HIGH_IS_ZERO)
    assert (noise_oracle.halves(KEYS[0], HIGH_IS_ZERO)[0] == 0).all()
    assert drawn.min() > 23 * np.log(2) and drawn.max() > 18 and len(np.unique(drawn)) == len(drawn)


def test_a_tokens_noise_does_not_depend_on_which_others_are_drawn() -> None:
    whole, some = noise_of(KEYS, np.arange(4096)), np.asarray([4000, 7, 7, 0])
    np.testing.assert_array_equal(noise_of(KEYS, np.arange(999)), whole[:, :999])
    np.testing.assert_array_equal(noise_of(KEYS, some), whole[:, some])


@pytest.mark.parametrize("size", [1, 128, 5001])
def test_uniforms_and_folded_keys_are_bit_for_bit_jax_randoms(size: int) -> None:
    wrapped = jax.random.wrap_key_data(jnp.asarray(KEYS), impl="threefry2x32")
    uniform = jax.vmap(lambda k: jax.random.uniform(k, (size,), jnp.float32))
    np.testing.assert_array_equal(
        jax.jit(noise.uniform)(as_key(KEYS), jnp.arange(size, dtype=jnp.uint32)),
        jax.jit(uniform)(wrapped),
    )
    keys = jnp.asarray(KEYS)
    folded = noise.fold_in((keys[:, 0], keys[:, 1]), jnp.int32(4096))
    np.testing.assert_array_equal(
        jnp.stack(folded, axis=1), [noise_oracle.stream_key(words, 4096) for words in keys]
    )


# ---- their distribution


def test_noise_is_standard_gumbel() -> None:
    """By Kolmogorov and Smirnov over all keys, and by what is above 6 nats (a 400th), whose excess
    is all but exponential."""
    drawn = noise_of(KEYS, np.arange(MANY)).ravel().astype(np.float64)
    assert stats.kstest(drawn, "gumbel_r").pvalue > 1e-6
    tail = drawn[drawn > 6]
    share = stats.gumbel_r.sf(6)
    assert abs(len(tail) - share * drawn.size) < 5 * np.sqrt(share * drawn.size)
    assert stats.kstest(stats.gumbel_r.sf(tail) / share, "uniform").pvalue > 1e-6


def test_the_halves_are_uniform_and_independent(halves: tuple[np.ndarray, np.ndarray]) -> None:
    """In 64 x 64 squares, and where the high half is small and the low one counts."""
    for high, low in zip(*halves, strict=True):
        square = (high * 64).astype(int) * 64 + (low * 64).astype(int)
        assert within_limit(
            *chi_square(np.bincount(square, minlength=64**2), np.full(64**2, 64.0**-2))
        )
        assert abs(np.corrcoef(high, low)[0, 1]) * np.sqrt(MANY) < 5
        assert stats.kstest(low[high < 1 / 256].astype(np.float64), "uniform").pvalue > 1e-6


def test_tokens_do_not_correlate(halves: tuple[np.ndarray, np.ndarray]) -> None:
    """Nor one token's half with another's other half: the words of neighbouring ids, and of ids a
    power of two apart."""
    for x, y, key, lag in itertools.product(
        halves, halves, range(len(KEYS)), (1, 2, 3, 256, 1 << 15)
    ):
        assert abs(np.corrcoef(x[key, :-lag], y[key, lag:])[0, 1]) * np.sqrt(MANY - lag) < 5, (
            key,
            lag,
        )
