"""Truncation without sorting against truncation by sorting, and against the definition in float64
at real vocabularies."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.truncation import truncate

compiled = jax.jit(truncate, static_argnames="implementation")
# The mass is a float32 sum of up to 151,936 terms: relative to top_p, a boundary within this of it
# may fall on either side.
MASS_TOLERANCE = 1e-5
CASES = [(k, p) for k in (0, 1, 5, 40, 10**6) for p in (0.1, 0.5, 0.9, 0.99, 1.0)]
VOCABS = [7, 100, 999, 12_000, 49_152, 128_256, 151_936]


@jax.jit
def by_sorting(logits: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """The oracle: sort, cut, take the running sum, cut again."""
    vocab = logits.shape[-1]
    descending = jnp.sort(logits, axis=-1, descending=True)
    k = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)[:, None, None]
    kth = jnp.take_along_axis(descending, jnp.broadcast_to(k - 1, (*logits.shape[:-1], 1)), axis=-1)
    kept = jnp.where(descending >= kth, descending, -jnp.inf)
    probabilities = jax.nn.softmax(kept, axis=-1)
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    inside = (before < top_p[:, None, None]) | (top_p[:, None, None] >= 1.0)
    last = jnp.min(jnp.where(inside & (kept > -jnp.inf), kept, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(logits >= jnp.maximum(kth, last), logits, -jnp.inf)


def batch(vocab: int, rows: int = 2, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Every case once, flat rows beside peaked ones."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(CASES), rows, vocab)) * rng.choice(
        [0.1, 1.0, 4.0], size=(len(CASES), rows, 1)
    )
    return (
        logits.astype(np.float32),
        np.array([k for k, _ in CASES], np.int32),
        np.array([p for _, p in CASES], np.float32),
    )


def assert_kept_by_definition(
    got: np.ndarray, logits: np.ndarray, top_k: int, top_p: float
) -> None:
    """One row [vocab] in float64: the kept set is an upper set of at least top_k tokens, with ties,
    cut where its mass reaches top_p."""
    kept = got > -np.inf
    np.testing.assert_array_equal(got[kept], logits[kept])
    threshold = logits[kept].min()
    np.testing.assert_array_equal(kept, logits >= threshold)
    k = top_k if 0 < top_k < len(logits) else len(logits)
    kth = np.partition(logits, -k)[-k]
    assert threshold >= kth
    weights = np.where(logits >= kth, np.exp(logits.astype(np.float64) - logits.max()), 0.0)
    weights /= weights.sum()
    if top_p >= 1:
        assert threshold == kth
    assert weights[logits > threshold].sum() < top_p * (1 + MASS_TOLERANCE), (
        "the last token kept is one too many"
    )
    assert weights[kept].sum() >= min(top_p, 1.0) * (1 - MASS_TOLERANCE), "a token is missing"


def test_nothing_compiled_gives_the_same() -> None:
    """The engine's mode "eager": loops count in Python's integers there."""
    arguments = batch(100)
    with jax.disable_jit():
        found = truncate(*map(jnp.asarray, arguments))
    np.testing.assert_array_equal(found, compiled(*arguments))


@pytest.mark.parametrize("vocab", VOCABS[:4])
def test_keeps_what_sorting_keeps(vocab: int) -> None:
    for seed in range(3):
        arguments = batch(vocab, seed=seed)
        np.testing.assert_array_equal(compiled(*arguments), by_sorting(*arguments))


@pytest.mark.parametrize("vocab", VOCABS)
def test_keeps_the_set_that_the_definition_keeps(vocab: int) -> None:
    logits, top_k, top_p = batch(vocab, rows=1)
    out = np.asarray(compiled(logits, top_k, top_p))
    for b in range(len(CASES)):
        assert_kept_by_definition(out[b, 0], logits[b, 0], int(top_k[b]), float(top_p[b]))


def test_tokens_that_tie_with_the_last_one_are_kept() -> None:
    logits = np.array([[[2.0, 1.0, 1.0, 1.0, -0.0, 0.0, -3.0]]], np.float32)

    def keep(k, p):
        return (
            np.asarray(compiled(logits, np.array([k], np.int32), np.array([p], np.float32)))
            > -np.inf
        ).sum()

    assert [keep(k, 1.0) for k in range(8)] == [7, 1, 4, 4, 4, 6, 6, 7]
    mass = np.exp(logits.ravel()) / np.exp(logits).sum()
    assert [
        keep(0, p)
        for p in (0.0, mass[0] - 0.01, mass[0] + 0.01, mass[:4].sum() - 0.01, mass[:4].sum() + 0.01)
    ] == [1, 1, 4, 4, 6]


def test_neighbouring_floats_do_not_tie() -> None:
    """Sixteen consecutive float32 of either sign: every bit of the pattern counts."""
    steps = np.arange(16, dtype=np.int32)
    for start in (np.float32(1.0), np.float32(-3.7)):
        logits = (start.view(np.int32) + steps).view(np.float32)
        kept = [
            (
                np.asarray(
                    compiled(logits[None, None], np.array([k], np.int32), np.ones(1, np.float32))
                )
                > -np.inf
            ).sum()
            for k in steps[1:]
        ]
        assert kept == steps[1:].tolist()


@pytest.mark.parametrize("fill", [np.nan, -np.inf, np.inf])
def test_rows_without_finite_logits_and_rows_with_a_few_bad_ones(fill: float) -> None:
    """Nothing but fill: nothing finite appears. Some fill: NaN and -inf are dropped and change
    nothing else; +inf takes all."""
    logits, top_k, top_p = batch(100)
    logits[:, 0] = fill
    logits[:, 1, ::7] = fill
    out = np.asarray(compiled(logits, top_k, top_p))
    assert not np.isfinite(out[:, 0]).any()
    if fill == np.inf:
        assert (out[:, 1, ::7] == np.inf).all()
        return
    rest = np.delete(np.arange(100), np.s_[::7])
    assert (~(out[:, 1, ::7] > -np.inf)).all()
    np.testing.assert_array_equal(
        out[:, 1, rest], compiled(logits[:, 1:, rest], top_k, top_p)[:, 0]
    )


def test_a_row_does_not_depend_on_the_batch() -> None:
    arguments = batch(999)
    whole = np.asarray(compiled(*arguments))
    for part in (slice(0, 1), slice(7, 12)):
        np.testing.assert_array_equal(compiled(*(a[part] for a in arguments)), whole[part])


def test_no_sort_and_a_fixed_number_of_passes() -> None:
    program = str(
        jax.make_jaxpr(truncate)(jnp.zeros((1, 1, 999)), jnp.zeros(1, jnp.int32), jnp.ones(1))
    )
    assert (
        " sort" not in program
        and "while" not in program
        and "scan" in program
        and "callback" not in program
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"logits": jnp.zeros((2, 9))},
            r"logits: expected float32 \[batch, rows, vocab\], got float32 \[2, 9\]",
        ),
        (
            {"logits": jnp.zeros((2, 3, 9), jnp.bfloat16)},
            r"logits: expected float32 .* got bfloat16 \[2, 3, 9\]",
        ),
        ({"top_k": jnp.zeros(2)}, r"top_k: expected int32 \[2\], got float32 \[2\]"),
        ({"top_p": jnp.ones(3)}, r"top_p: expected float32 \[2\], got float32 \[3\]"),
        (
            {"implementation": "fast"},
            r"implementation: expected one of reference, got 'fast'",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict, message: str) -> None:
    arguments = {
        "logits": jnp.zeros((2, 3, 9)),
        "top_k": jnp.zeros(2, jnp.int32),
        "top_p": jnp.ones(2),
    }
    with pytest.raises(ValueError, match=message):
        truncate(**arguments | change)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [999, 49_152, 128_256])
def test_on_the_gpu(vocab: int) -> None:
    logits, top_k, top_p = batch(vocab, rows=4)
    out = np.asarray(compiled(logits, top_k, top_p))
    for b in range(len(CASES)):
        for row in range(4):
            assert_kept_by_definition(out[b, row], logits[b, row], int(top_k[b]), float(top_p[b]))
    np.testing.assert_array_equal(compiled(logits[3:4], top_k[3:4], top_p[3:4])[0], out[3])
