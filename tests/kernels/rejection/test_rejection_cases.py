"""Known inputs with known outputs, as vLLM's suite has them, and what must hold beside the
distribution."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.synthetic import conditional_rates
from pallas_kernels import rejection_sampling
from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sampling import RULES, rejection_sample
from tests.kernels.interpreter import call
from tests.kernels.rejection.inputs import ALL_RULES, Inputs, emitted, judge, make, strict
from tests.support.statistics import chi_square, within_limit

pytestmark = pytest.mark.once

LOSSLESS = ["strict", "probabilistic", "block"]


def peaked(tokens: list[list[int]], vocab: int = 20) -> np.ndarray:
    """Logits [B, K+1, V] whose argmaxes are the given tokens; shorter requests are filled up."""
    rows = max(map(len, tokens))
    filled = np.array([row + [0] * (rows - len(row)) for row in tokens])
    return 5 * np.eye(vocab, dtype=np.float32)[filled] + np.random.default_rng(0).normal(
        size=(len(tokens), rows, vocab)
    ).astype(np.float32)


def padded(drafts: list[list[int]]) -> np.ndarray:
    width = max(map(len, drafts))
    return np.array([row + [-1] * (width - len(row)) for row in drafts], np.int32).reshape(
        len(drafts), width
    )


def random_logits(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ---- greedy requests


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize(
    ("drafts", "argmaxes", "expected"),
    [
        ([[1, 2, 3]], [[1, 2, 3, 4]], [[1, 2, 3, 4]]),
        ([[1, 2, 3]], [[1, 5, 3, 4]], [[1, 5]]),
        ([[1, 2], [3]], [[1, 2, 5], [3, 4]], [[1, 2, 5], [3, 4]]),
        ([[1]], [[1, 2]], [[1, 2]]),
        ([[]], [[5]], [[5]]),
        ([[1, 2, 3], [4, 5, 6]], [[1, 2, 7, 6], [4, 8, 6, 9]], [[1, 2, 7], [4, 8]]),
        ([[1]], [[2, 3]], [[2]]),
        ([[1, 2], [3, 4]], [[1, 5, 6], [3, 4, 7]], [[1, 5], [3, 4, 7]]),
        ([[6, -1, -1]], [[6, 9, 8, 7]], [[6, 9]]),
    ],
)
def test_greedy_table(
    drafts: list[list[int]],
    argmaxes: list[list[int]],
    expected: list[list[int]],
    rule: str,
    implementation: str,
) -> None:
    inputs = make(peaked(argmaxes), padded(drafts), greedy=np.ones(len(drafts), bool))
    assert emitted(*judge(inputs, rule, implementation)) == expected


@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("rule", LOSSLESS)
def test_greedy_rows_emit_argmaxes_beside_sampled_rows(
    rule: str, K: int, implementation: str
) -> None:
    """The draft's logits, the noise and the neighbours have no say; sampled rows of the same batch
    do not turn greedy."""
    logits = random_logits(1, 64, K + 1, 50)
    drafts = np.where(np.random.default_rng(2).random((64, K)) < 0.7, logits.argmax(-1)[:, :-1], 3)
    inputs = make(
        logits,
        drafts,
        greedy=np.arange(64) % 2 == 0,
        draft_logits=random_logits(3, 64, K, 50),
    )
    tokens, num_sampled = judge(inputs, rule, implementation)
    for b, row in enumerate(emitted(tokens, num_sampled)):
        if b % 2 == 0:
            assert row == logits[b].argmax(-1)[: len(row)].tolist()
            assert len(row) == 1 + np.cumprod(drafts[b] == logits[b].argmax(-1)[:-1]).sum()
    last = tokens[np.arange(64), num_sampled - 1]
    assert (last[1::2] != logits[np.arange(64), num_sampled - 1].argmax(-1)[1::2]).mean() > 0.5


@pytest.mark.parametrize("rule", RULES)
def test_all_greedy_needs_no_noise_and_no_softmax(rule: str, implementation: str) -> None:
    logits = random_logits(1, 8, 4, 30)
    drafts = logits.argmax(-1)[:, :-1].astype(np.int32)
    drafts[::2, 1] = 7
    inputs = make(logits, drafts, greedy=np.ones(8, bool), draft_logits=random_logits(2, 8, 3, 30))
    expected = judge(inputs, rule, implementation)
    synthetic = rule == "synthetic"

    def without_noise(target: jax.Array) -> tuple[jax.Array, jax.Array]:
        greedy = rejection_sampling.Inputs(
            target_logits=target,
            draft_tokens=jnp.asarray(drafts),
            greedy=jnp.asarray(inputs.greedy),
            uniforms=jnp.asarray(inputs.uniforms) if synthetic else None,
            acceptance_rates=jnp.asarray(inputs.acceptance_rates) if synthetic else None,
            active=jnp.asarray(inputs.active),
            rule=rule,
            sampled=False,
        )
        return rejection_sample(greedy, implementation=implementation)

    program = str(jax.make_jaxpr(without_noise)(jnp.asarray(logits)))
    assert "exp" not in program and "log" not in program and "callback" not in program
    for got, wanted in zip(jax.jit(without_noise)(jnp.asarray(logits)), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


# ---- placeholders, NaN, truncated tokens, the ends of the vocabulary


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_placeholder_ends_verification(rule: str, one_hot: bool, implementation: str) -> None:
    """d = [x, -1, y] with the draft's distribution equal to the target's: at most two tokens, and
    nearly always two."""
    logits = random_logits(1, 2000, 4, 16)
    noisy = logits + np.random.default_rng(2).gumbel(size=logits.shape)
    drafts = noisy.argmax(-1)[:, :3].astype(np.int32)
    drafts[:, 1] = -1
    inputs = make(
        logits,
        drafts,
        draft_logits=None if one_hot else logits[:, :3].copy(),
        acceptance_rates=np.ones(3, np.float32),
    )
    if rule == "strict":
        inputs = replace(inputs, sample_noise=(noisy - logits).astype(np.float32))
    tokens, num_sampled = judge(inputs, rule, implementation)
    emitted(tokens, num_sampled)
    assert num_sampled.max() == 2 and tokens.max() < 16
    if rule in ("strict", "synthetic") or not one_hot:
        assert (num_sampled == 2).mean() > 0.9


@pytest.mark.parametrize("bad", [-1, 300, 2**31 - 1])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_single_placeholder_gives_one_target_token(
    rule: str, bad: int, implementation: str
) -> None:
    target = random_logits(0, 1, 2, 32)
    inputs = make(
        np.repeat(target, 20_000, 0),
        np.full((20_000, 1), bad),
        draft_logits=np.repeat(-target[:, :1], 20_000, 0),
    )
    tokens, num_sampled = judge(
        replace(inputs, acceptance_rates=np.ones(1, np.float32)), rule, implementation
    )
    assert (num_sampled == 1).all()
    p = np.exp(target[0, 0].astype(np.float64))
    assert within_limit(*chi_square(np.bincount(tokens[:, 0], minlength=32), p / p.sum()))


@pytest.mark.parametrize("rule", LOSSLESS)
def test_placeholder_is_filled_from_the_plain_target(rule: str, implementation: str) -> None:
    """Noise that all but one token lose: the residual would exclude it where q exceeds p, the plain
    target does not."""
    target = np.zeros((1, 2, 8), np.float32)
    draft = np.zeros((1, 1, 8), np.float32)
    draft[..., 5] = 3.0  # q(5) > p(5)
    noise = np.zeros((1, 8), np.float32)
    noise[:, 5] = 10.0
    inputs = make(
        target,
        np.array([[-1]]),
        draft_logits=draft,
        recover_noise=noise,
        sample_noise=np.repeat(noise[:, None], 2, 1),
    )
    assert emitted(*judge(inputs, rule, implementation)) == [[5]]


@pytest.mark.parametrize("one_hot", [True, False])
@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_draft_that_q_cannot_have_drawn_is_a_placeholder(
    rule: str, one_hot: bool, implementation: str
) -> None:
    """A token that the draft's vocabulary lacks: never accepted though p(d) > u q(d) holds; one-hot
    drafts need no map."""
    logits = peaked([[4, 4, 4]], 6)
    absent = np.array([0, 1, 2, 3, -1, 4], np.int32)
    inputs = make(logits, np.array([[4, 4]]), uniforms=np.zeros((1, 2), np.float32))
    if not one_hot:
        inputs = replace(
            inputs, draft_logits=np.zeros((1, 2, 5), np.float32), target_to_draft=absent
        )
    assert len(emitted(*judge(inputs, rule, implementation))[0]) == (3 if one_hot else 1)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_nan_targets_give_ids_in_range(rule: str, greedy: bool, implementation: str) -> None:
    vocab = 20_000
    inputs = make(
        np.full((4, 3, vocab), np.nan),
        np.array([[3, 4], [-1, 4], [3, -1], [0, 0]]),
        greedy=np.full(4, greedy),
    )
    for draft_logits in (
        None,
        random_logits(0, 4, 2, vocab),
        np.full((4, 2, vocab), np.nan, np.float32),
    ):
        for logits in (
            inputs.target_logits,
            np.full_like(inputs.target_logits, -np.inf),
            np.full_like(inputs.target_logits, np.inf),
        ):
            tokens, num_sampled = judge(
                replace(inputs, draft_logits=draft_logits, target_logits=logits),
                rule,
                implementation,
            )
            emitted(tokens, num_sampled)
            assert num_sampled.min() >= 1 and tokens.max() < vocab


@pytest.mark.parametrize("rule", LOSSLESS)
def test_truncated_tokens_are_never_emitted(rule: str, implementation: str) -> None:
    """p(d) = 0 rejects d even when u is exactly 0, and neither residual nor bonus finds it."""
    target = random_logits(1, 500, 4, 12)
    target[..., 1::2] = -np.inf
    draft = random_logits(2, 500, 3, 12)
    uniforms = np.random.default_rng(3).random((500, 3), np.float32)
    uniforms[:250] = 0.0
    for draft_logits in (draft, None):
        inputs = make(
            target,
            np.random.default_rng(4).integers(0, 12, (500, 3)),
            draft_logits=draft_logits,
            uniforms=uniforms,
        )
        tokens, num_sampled = judge(inputs, rule, implementation)
        assert all(token % 2 == 0 for row in emitted(tokens, num_sampled) for token in row)
    assert num_sampled.max() > 1 or rule == "strict"


@pytest.mark.parametrize("rule", ["probabilistic", "block"])
def test_a_residual_without_mass_is_the_plain_target(rule: str, implementation: str) -> None:
    """p = q leaves nothing to draw from. u = 1 forces here what rounding does once in ten million
    tokens."""
    target = random_logits(1, 20, 2, 8)
    target[..., 3] = -np.inf
    inputs = make(
        target,
        target.argmax(-1)[:, :1],
        draft_logits=target[:, :1].copy(),
        uniforms=np.ones((20, 1), np.float32),
    )
    tokens, num_sampled = judge(inputs, rule, implementation)
    assert (num_sampled == 1).all()
    assert tokens[:, 0].tolist() == (target[:, 0] + inputs.recover_noise).argmax(-1).tolist()


@pytest.mark.parametrize("vocab", [100, 8193, 10_000, 151_936])
@pytest.mark.parametrize("rule", ALL_RULES)
def test_both_ends_of_real_vocabularies(rule: str, vocab: int, implementation: str) -> None:
    """The last id is accepted, recovered and drawn as a bonus like any other; random rows stay in
    range."""
    target = np.zeros((4, 3, vocab), np.float32)
    target[0, :, vocab - 1] = target[1, :, vocab - 1] = target[2, :, 0] = 60.0
    target[3] = random_logits(1, 3, vocab)
    draft = random_logits(2, 4, 2, vocab)
    drafts = np.array([[vocab - 1, vocab - 1], [0, 0], [vocab - 1, 0], [5, 6]])
    inputs = make(target, drafts, draft_logits=draft, uniforms=np.full((4, 2), 0.5, np.float32))
    rows = emitted(*judge(inputs, rule, implementation))
    if rule == "synthetic":
        rates = np.array([1.0, 0.0], np.float32)
        rows = emitted(*judge(replace(inputs, acceptance_rates=rates), rule, implementation))
        assert rows[:3] == [[vocab - 1, vocab - 1], [0, vocab - 1], [vocab - 1, 0]]
    else:
        assert rows[:3] == [[vocab - 1] * 3, [vocab - 1], [0]]
    assert min(rows[3]) >= 0 and max(rows[3]) < vocab


# ---- block, synthetic


@pytest.mark.parametrize("placeholders", [1, 2])
def test_block_counts_only_valid_drafts(placeholders: int, implementation: str) -> None:
    """The draft before the placeholder is the last of its block: it is judged by P alone, so p = q
    keeps it always."""
    logits = random_logits(1, 500, 4, 30)
    drafts = (logits + np.random.default_rng(2).gumbel(size=logits.shape)).argmax(-1)[:, :3]
    drafts[:, 3 - placeholders :] = -1
    _, num_sampled = judge(
        make(logits, drafts, draft_logits=logits[:, :3].copy()), "block", implementation
    )
    assert (num_sampled == 3 - placeholders + 1).all()


def test_block_keeps_a_prefix_that_token_by_token_rejects(implementation: str) -> None:
    """2403.10444's example: d = (A, B) with p = (1/3, 2/3), q = (2/3, 1/3): ratios 1/2 then 2, so P
    = 1/2, 1: always kept whole."""
    p, q = np.log(np.array([1, 2], np.float32) / 3), np.log(np.array([2, 1], np.float32) / 3)
    inputs = make(
        np.stack([[p, p, p]]),
        np.array([[0, 1]]),
        draft_logits=np.stack([[q, q]]),
        uniforms=np.full((1, 2), 0.9, np.float32),
    )
    assert judge(inputs, "block", implementation)[1].tolist() == [3]
    assert judge(inputs, "probabilistic", implementation)[1].tolist() == [1]


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("rates", [[0.9, 0.5, 0.2], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.7]])
def test_synthetic_rates_are_met_and_rejections_sample_the_target(
    rates: list[float], temperature: int, implementation: str
) -> None:
    """Unconditional per-position rates within 1e-2; the token after the accepted drafts is the
    target's, bonus included."""
    trials, K, vocab = 40_000, len(rates), 16
    rng = np.random.default_rng(0)
    row = rng.normal(size=(K + 1, vocab)).astype(np.float32)
    drafts = rng.integers(0, vocab, (trials, K))
    inputs = make(
        np.repeat(row[None], trials, 0),
        drafts,
        greedy=np.full(trials, temperature == 0),
        acceptance_rates=np.asarray(conditional_rates(rates), np.float32),
    )
    tokens, num_sampled = judge(inputs, "synthetic", implementation)
    for position, rate in enumerate(rates):
        assert (num_sampled > position + 1).mean() == pytest.approx(rate, abs=1e-2)
        kept = num_sampled > position + 1
        assert (tokens[kept, position] == drafts[kept, position]).all()
    for length in range(1, K + 2):
        last = tokens[num_sampled == length, length - 1]
        if temperature == 0:
            assert (last == row[length - 1].argmax()).all()
        elif last.size:
            p = np.exp(row[length - 1].astype(np.float64))
            assert within_limit(*chi_square(np.bincount(last, minlength=vocab), p / p.sum()))


# ---- rows are independent


def random_inputs(batch: int, vocab: int) -> Inputs:
    target, draft = random_logits(1, batch, 4, vocab), random_logits(2, batch, 3, vocab)
    drafts = (draft + np.random.default_rng(3).gumbel(size=draft.shape)).argmax(-1)
    return make(target, drafts, draft_logits=draft, greedy=np.arange(batch) % 5 == 4)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_chunks_equal_the_full_batch(rule: str, implementation: str) -> None:
    inputs = random_inputs(5, 257)
    whole = judge(inputs, rule, implementation)
    parts = [
        judge(inputs.rows(chunk), rule, implementation) for chunk in (slice(0, 2), slice(2, 5))
    ]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate([part[i] for part in parts]), whole[i])


@pytest.mark.parametrize("rule", ALL_RULES)
def test_temperature_divides_both_logits_but_of_greedy_rows(rule: str, implementation: str) -> None:
    inputs = random_inputs(20, 65)
    temperature = np.random.default_rng(5).uniform(0.3, 2.0, 20).astype(np.float32)
    divisor = np.where(inputs.greedy, np.float32(1.0), temperature)[:, None, None]
    divided = replace(
        inputs,
        target_logits=inputs.target_logits / divisor,
        draft_logits=inputs.draft_logits / divisor,
    )
    for got, wanted in zip(
        judge(inputs, rule, implementation, temperature=temperature),
        judge(divided, rule, implementation),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("rule", ALL_RULES)
def test_padding_rows_emit_nothing_and_disturb_nobody(rule: str, implementation: str) -> None:
    inputs = random_inputs(8, 64)
    expected = judge(inputs, rule, implementation)
    poisoned = {
        name: getattr(inputs, name).copy()
        for name in ("target_logits", "draft_logits", "recover_noise", "sample_noise", "uniforms")
    }
    for value in poisoned.values():
        value[5:] = np.nan
    drafts = inputs.draft_tokens.copy()
    drafts[5:] = 2**31 - 1
    active = np.arange(8) < 5
    tokens, num_sampled = judge(
        replace(inputs, **poisoned, draft_tokens=drafts, active=active), rule, implementation
    )
    np.testing.assert_array_equal(tokens[:5], expected[0][:5])
    np.testing.assert_array_equal(num_sampled[:5], expected[1][:5])
    assert (tokens[5:] == -1).all() and (num_sampled[5:] == 0).all()


@pytest.mark.parametrize("rule", ALL_RULES)
def test_vmap_over_batches_equals_one_batch(rule: str, implementation: str) -> None:
    inputs = random_inputs(6, 40)
    expected = judge(inputs, rule, implementation)

    def one(target, tokens, draft, greedy, uniforms, recover, sample):
        active = jnp.ones(2, bool)
        if rule == "strict":
            return strict(target, tokens, greedy, sample, active)
        one_batch = rejection_sampling.Inputs(
            target_logits=target,
            draft_tokens=tokens,
            draft_logits=draft,
            greedy=greedy,
            uniforms=uniforms,
            recover_noise=recover,
            acceptance_rates=jnp.asarray(inputs.acceptance_rates) if rule == "synthetic" else None,
            active=active,
            rule=rule,
        )
        return rejection_sample(one_batch, implementation=implementation)

    names = (
        "target_logits",
        "draft_tokens",
        "draft_logits",
        "greedy",
        "uniforms",
        "recover_noise",
        "sample_noise",
    )
    split = [
        jnp.asarray(getattr(inputs, name)).reshape(3, 2, *getattr(inputs, name).shape[1:])
        for name in names
    ]
    for got, wanted in zip(jax.jit(jax.vmap(one))(*split), expected, strict=True):
        np.testing.assert_array_equal(got.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("rule", LOSSLESS)
def test_one_compilation_serves_any_values(rule: str, implementation: str) -> None:
    traces = []

    @jax.jit
    def counted(
        logits: jax.Array, drafts: jax.Array, greedy: jax.Array, active: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        traces.append(logits.shape)
        inputs = make(np.zeros((3, 3, 8)), np.zeros((3, 2)))
        if rule == "strict":
            return strict(logits, drafts, greedy, jnp.asarray(inputs.sample_noise), active)
        one_hot = rejection_sampling.Inputs(
            target_logits=logits,
            draft_tokens=drafts,
            greedy=greedy,
            uniforms=jnp.asarray(inputs.uniforms),
            recover_noise=jnp.asarray(inputs.recover_noise),
            active=active,
            rule=rule,
        )
        return rejection_sample(one_hot, implementation=implementation)

    yes, no = jnp.ones(3, bool), jnp.zeros(3, bool)
    for drafts in (jnp.zeros((3, 2), jnp.int32), jnp.full((3, 2), -1, jnp.int32)):
        for greedy, active in ((yes, yes), (no, yes), (yes, no)):
            counted(jnp.zeros((3, 3, 8)), drafts, greedy, active)
    assert len(traces) == 1


# ---- errors


def stream_of(keys: int, positions: int) -> Stream:
    return Stream(jnp.zeros((keys, 2), jnp.uint32), jnp.zeros(positions, jnp.int32), 0)


@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        ("fast", {}, r"rule: expected one of probabilistic, block, synthetic, got 'fast'"),
        ("strict", {}, r"rule: expected one of probabilistic, block, synthetic, got 'strict'"),
        (
            "block",
            {"implementation": "fast"},
            r"implementation: expected one of reference, mosaic_gpu, got 'fast'",
        ),
        (
            "block",
            {"target_logits": jnp.zeros((2, 9))},
            r"target_logits: expected 3 axes \[B, K\+1, V\], got shape \(2, 9\)",
        ),
        (
            "block",
            {"target_logits": jnp.zeros((2, 4, 9), jnp.bfloat16)},
            r"target_logits: expected float32 \[2, 4, 9\], got bfloat16",
        ),
        (
            "block",
            {"draft_tokens": jnp.zeros((2, 4), jnp.int32)},
            r"draft_tokens: expected int32 \[2, 3\], got int32 \[2, 4\]",
        ),
        (
            "block",
            {"draft_tokens": jnp.zeros((2, 3))},
            r"draft_tokens: expected int32 \[2, 3\], got float32 \[2, 3\]",
        ),
        (
            "block",
            {"draft_logits": jnp.zeros((2, 3, 5))},
            r"draft_logits: expected float32 \[2, 3, 9\], got float32 \[2, 3, 5\]",
        ),
        (
            "block",
            {"draft_logits": jnp.zeros((2, 4, 9))},
            r"draft_logits: expected float32 \[2, 3, 9\]",
        ),
        (
            "block",
            {"target_to_draft": jnp.zeros(8, jnp.int32)},
            r"target_to_draft: expected int32 \[9\], got int32 \[8\]",
        ),
        (
            "probabilistic",
            {"greedy": jnp.zeros(2, jnp.int32)},
            r"greedy: expected bool \[2\], got int32 \[2\]",
        ),
        (
            "probabilistic",
            {"temperature": jnp.ones(3)},
            r"temperature: expected float32 \[2\], got float32 \[3\]",
        ),
        (
            "probabilistic",
            {"active": jnp.zeros(3, bool)},
            r"active: expected bool \[2\], got bool \[3\]",
        ),
        ("block", {"uniforms": None}, r"uniforms: expected float32 \[2, 3\], got None"),
        (
            "synthetic",
            {"uniforms": None, "sampled": False},
            r"uniforms: expected float32 \[2, 3\], got None",
        ),
        (
            "probabilistic",
            {"recover_noise": jnp.zeros((2, 4, 9))},
            r"recover_noise: expected float32 \[2, 9\], got float32 \[2, 4, 9\]",
        ),
        (
            "synthetic",
            {"recover_noise": None},
            r"recover_noise: expected float32 \[2, 9\], got None",
        ),
        (
            "synthetic",
            {"acceptance_rates": None},
            r"acceptance_rates: expected float32 \[3\], got None",
        ),
        (
            "synthetic",
            {"acceptance_rates": jnp.zeros(2)},
            r"acceptance_rates: expected float32 \[3\], got float32 \[2\]",
        ),
        (
            "block",
            {"uniforms": stream_of(3, 2)},
            r"uniforms.keys: expected uint32 \[2, 2\], got uint32 \[3, 2\]",
        ),
        (
            "probabilistic",
            {"recover_noise": stream_of(2, 1)},
            r"recover_noise.position: expected int32 \[2\], got int32 \[1\]",
        ),
        (
            "probabilistic",
            {"recover_noise": stream_of(1, 2)},
            r"recover_noise.keys: expected uint32 \[2, 2\], got uint32 \[1, 2\]",
        ),
        (
            "probabilistic",
            {"uniforms": jnp.zeros((2, 1))},
            r"uniforms: expected float32 \[2, 3\], got float32 \[2, 1\]",
        ),
        (
            "block",
            {"acceptance_rates": jnp.zeros(3)},
            r"acceptance_rates: expected None with rule 'block' \(only 'synthetic' uses it\)",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(rule: str, change: dict, message: str) -> None:
    arguments = {
        "target_logits": jnp.zeros((2, 4, 9)),
        "draft_tokens": jnp.zeros((2, 3), jnp.int32),
        "draft_logits": jnp.zeros((2, 3, 9)),
        "target_to_draft": None,
        "greedy": jnp.zeros(2, bool),
        "uniforms": jnp.zeros((2, 3)),
        "recover_noise": jnp.zeros((2, 9)),
        "acceptance_rates": jnp.zeros(3) if rule == "synthetic" else None,
        "active": jnp.ones(2, bool),
    }
    inputs = rejection_sampling.Inputs(**arguments, rule=rule)
    with pytest.raises(ValueError, match=message):
        call(rejection_sample, inputs, change)
