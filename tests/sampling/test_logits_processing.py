"""Each parameter against transformers' own processor, the whole order against a float64
specification, and rows of a window against plain decoding of the same text; and what nobody asks
for costs nothing and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import SamplingFeatures
from jaxspec.decode.verify import verify_rows
from jaxspec.drafts.autoregressive import Proposal
from jaxspec.engine.variants import ROUND_LEVELS
from jaxspec.sampling.logits import (
    adjust_logits,
    observe_tokens,
    process_target_logits,
    truncate_logits,
)
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import PROCESSORS
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary, Window
from jaxspec.sampling.rows import StateLayout, change_layout, features_of, sampling_rows
from jaxspec.sampling.state import SamplingState, scale_by_temperature
from tests.support.sampling_specification import specification
from tests.support.toys import toy_config

V, EOS = 40, (7, 11)
PROMPT, TEXT = [3, 7, 7, 30], [5, 30, 5, 11, 5]
GREEDY, SAMPLED = partial(SamplingParams, 0.0), partial(SamplingParams, 0.7)


@partial(jax.jit, static_argnums=0)
def processed(
    features: SamplingFeatures,
    logits: jax.Array,
    state: SamplingState,
    positions: jax.Array,
    draft_tokens: jax.Array | None = None,
) -> jax.Array:
    return process_target_logits(features, logits, state, Window(positions, draft_tokens))


judged = jax.jit(verify_rows, static_argnums=0)


def random_logits(*shape: int, seed: int = 0) -> np.ndarray:
    return 3 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def state_of(
    params: Sequence[SamplingParams],
    texts: Sequence[Sequence[int]],
    features: SamplingFeatures | None = None,
) -> SamplingState:
    """Rows of requests that all have PROMPT, and have generated these texts."""
    layout = StateLayout(Vocabulary(V, EOS)).fit(features or features_of(params), params)
    requests = [
        SampledRequest(p, seed, PROMPT, text)
        for seed, (p, text) in enumerate(zip(params, texts, strict=True))
    ]
    return jax.tree.map(jnp.asarray, sampling_rows(layout, requests))


def one_row(params: SamplingParams, logits: np.ndarray, text: Sequence[int]) -> np.ndarray:
    """Plain decoding: the logits [vocab] after a text, as this request would sample from them."""
    length = jnp.asarray([len(PROMPT) + len(text)], jnp.int32)
    state = state_of([params], [text])
    return np.asarray(
        processed(features_of([params]), jnp.asarray(logits)[None, None], state, length)
    )[0, 0]


# ---- transformers


def hf(name: str, *arguments: Any, **settings: Any) -> Callable[[Any, Any], Any]:
    """A processor of transformers by name, called with (input ids, logits)."""

    def call(ids: Any, logits: Any) -> Any:
        import transformers

        return getattr(transformers, name)(*arguments, **settings)(ids, logits)

    return call


ORACLES: dict[str, tuple[SamplingParams, Callable[[Any, Any], Any]]] = {
    "repetition": (GREEDY(repetition_penalty=1.7), hf("RepetitionPenaltyLogitsProcessor", 1.7)),
    "repetition wanted": (
        GREEDY(repetition_penalty=0.6),
        hf("RepetitionPenaltyLogitsProcessor", 0.6),
    ),
    "banned": (
        GREEDY(banned_token_ids=(0, 5, 39)),
        hf("SuppressTokensLogitsProcessor", [0, 5, 39], device="cpu"),
    ),
    "bias": (
        GREEDY(logit_bias={2: 4.5, 30: -100, 39: 0.25}),
        hf("SequenceBiasLogitsProcessor", [[[2], 4.5], [[30], -100.0], [[39], 0.25]]),
    ),
    "min_tokens, too short": (
        GREEDY(min_tokens=6, stop_token_ids=(9,)),
        hf("MinNewTokensLengthLogitsProcessor", len(PROMPT), 6, [7, 9, 11], device="cpu"),
    ),
    "min_tokens, reached": (
        GREEDY(min_tokens=5, stop_token_ids=(9,)),
        hf("MinNewTokensLengthLogitsProcessor", len(PROMPT), 5, [7, 9, 11], device="cpu"),
    ),
    "min_tokens, eos ignored": (
        GREEDY(min_tokens=6, ignore_eos=True),
        hf("MinNewTokensLengthLogitsProcessor", len(PROMPT), 6, [7, 11], device="cpu"),
    ),
    "bad words": (
        GREEDY(
            bad_words_token_ids=[[0], [5, 9], [11, 5, 3], [30, 5, 11, 5, 39], [5, 5, 8], [7, 5, 4]]
        ),
        hf(
            "NoBadWordsLogitsProcessor",
            [[0], [5, 9], [11, 5, 3], [30, 5, 11, 5, 39], [5, 5, 8], [7, 5, 4]],
        ),
    ),
    "min_p": (SamplingParams(1.0, min_p=0.05), hf("MinPLogitsWarper", 0.05)),
    "min_p 1": (SamplingParams(1.0, min_p=1.0), hf("MinPLogitsWarper", 1.0)),
    "top_k": (SamplingParams(1.0, top_k=5), hf("TopKLogitsWarper", 5)),
    "top_p": (SamplingParams(1.0, top_p=0.7), hf("TopPLogitsWarper", 0.7)),
}


@pytest.mark.oracle("transformers")
@pytest.mark.parametrize("name", ORACLES)
def test_a_parameter_does_what_transformers_does(name: str) -> None:
    import torch

    params, oracle = ORACLES[name]
    for seed in range(20):
        logits = random_logits(V, seed=seed)
        expected = oracle(torch.tensor([PROMPT + TEXT]), torch.from_numpy(logits.copy())[None])[
            0
        ].numpy()
        got = one_row(params, logits, TEXT)
        np.testing.assert_array_equal(np.isinf(got), np.isinf(expected), err_msg=f"seed {seed}")
        np.testing.assert_allclose(got, expected, rtol=1e-6, err_msg=f"seed {seed}")


# ---- the whole order


EVERYTHING: dict[str, Any] = {
    "min_p": 0.02,
    "top_k": 20,
    "top_p": 0.95,
    "repetition_penalty": 1.4,
    "presence_penalty": 0.6,
    "frequency_penalty": -0.3,
    "logit_bias": {5: 2.0, 30: -1.0, 8: 3.0},
    "allowed_token_ids": tuple(range(2, 38)),
    "banned_token_ids": (8, 20),
    "bad_words_token_ids": ((33,), (5, 30), (5, 5, 7), (11, 5, 12), (30, 5, 11, 5, 30), (30, 9)),
    "min_tokens": 7,
    "max_tokens": 60,
    "stop_token_ids": (5,),
}
REQUESTS = [
    SAMPLED(**EVERYTHING),
    GREEDY(**EVERYTHING),
    SAMPLED(),
    GREEDY(),
    SAMPLED(presence_penalty=1.5, frequency_penalty=0.25),
    SAMPLED(repetition_penalty=0.8, min_p=0.1),
    SAMPLED(allowed_token_ids=[1, 5, 30], logit_bias={5: -3}),
    GREEDY(min_tokens=4, stop_token_ids=(30,)),
    SAMPLED(top_k=3, top_p=0.5),
    GREEDY(bad_words_token_ids=[[5, 11], [5, 7, 8], [30, 5, 5]]),
]


def test_every_row_of_a_window_follows_the_specification_of_plain_decoding() -> None:
    """Requests of all kinds in one batch; rows 1 and on after drafts that repeat each other, the
    text, the prompt and a stop token."""
    K, features = 4, features_of(REQUESTS)
    texts = [TEXT[: i % 6] for i in range(len(REQUESTS))]
    drafts = (
        np.random.default_rng(1)
        .choice([5, 5, 30, 7, 8, 12, 33], (len(REQUESTS), K))
        .astype(np.int32)
    )
    drafts[0] = drafts[1] = [5, 5, 7, 30]
    logits = random_logits(len(REQUESTS), K + 1, V, seed=2)
    lengths = jnp.asarray([len(PROMPT) + len(t) for t in texts], jnp.int32)
    window = np.asarray(
        processed(
            features, jnp.asarray(logits), state_of(REQUESTS, texts), lengths, jnp.asarray(drafts)
        )
    )
    for row, params in enumerate(REQUESTS):
        for i in range(K + 1):
            text = [*texts[row], *drafts[row, :i].tolist()]
            expected = specification(params, logits[row, i], PROMPT, text, EOS)
            np.testing.assert_array_equal(
                np.isinf(window[row, i]), np.isinf(expected), err_msg=f"{params} row {i}"
            )
            np.testing.assert_allclose(
                window[row, i], expected, rtol=2e-6, atol=2e-6, err_msg=f"{params} row {i}"
            )
        is_plain = np.allclose(window[row], logits[row] / (params.temperature or 1))
        assert is_plain == (params in (SAMPLED(), GREEDY())), (
            f"{params}: expected some row to show it"
        )


def test_a_row_of_a_window_has_the_bits_of_plain_decoding_after_the_same_drafts() -> None:
    """Counts grow on the device as tokens are committed, and are rebuilt from the tokens when a
    request is admitted again."""
    K, features = 3, features_of(REQUESTS)
    texts = [TEXT[: i % 6] for i in range(len(REQUESTS))]
    drafts = np.random.default_rng(3).choice([5, 30, 7, 12], (len(REQUESTS), K)).astype(np.int32)
    logits = jnp.asarray(random_logits(len(REQUESTS), K + 1, V, seed=4))
    lengths = jnp.asarray([len(PROMPT) + len(t) for t in texts], jnp.int32)
    window = processed(features, logits, state_of(REQUESTS, texts), lengths, jnp.asarray(drafts))
    committed = state_of(REQUESTS, texts)
    for i in range(K + 1):
        rebuilt = state_of(
            REQUESTS, [[*t, *d[:i]] for t, d in zip(texts, drafts.tolist(), strict=True)]
        )
        for state in (committed, rebuilt):
            np.testing.assert_array_equal(
                window[:, i], processed(features, logits[:, i : i + 1], state, lengths + i)[:, 0]
            )
        committed = observe_tokens(
            features,
            committed,
            jnp.asarray(np.pad(drafts[:, i : i + 1], ((0, 0), (0, 2)), constant_values=-1)),
        )


def test_the_requests_above_use_every_processor() -> None:
    """So a new processor is not forgotten in them and in the specification."""
    assert features_of(REQUESTS).processors == EVERY_FEATURE.processors
    assert len({p.name for p in PROCESSORS}) == len(PROCESSORS)


def test_a_state_with_room_for_larger_requests_gives_the_same_bits() -> None:
    K, features = 3, features_of(REQUESTS)
    texts = [TEXT[: i % 6] for i in range(len(REQUESTS))]
    drafts = np.random.default_rng(5).choice([5, 30, 7, 11], (len(REQUESTS), K)).astype(np.int32)
    logits = jnp.asarray(random_logits(len(REQUESTS), K + 1, V, seed=8))
    lengths = jnp.asarray([len(PROMPT) + len(t) for t in texts], jnp.int32)
    state = state_of(REQUESTS, texts)
    layout = StateLayout(Vocabulary(V, EOS)).fit(features, REQUESTS)
    doubled = {name: tuple(2 * n for n in sizes) for name, sizes in layout.sizes.items()}
    larger = change_layout(state, replace(layout, sizes=doubled))
    assert sum(a.size for a in jax.tree.leaves(larger)) > sum(
        a.size for a in jax.tree.leaves(state)
    )
    committed = jnp.asarray(drafts[:, :2])
    for before, after in (
        (state, larger),
        tuple(observe_tokens(features, s, committed) for s in (state, larger)),
    ):
        np.testing.assert_array_equal(
            processed(features, logits, after, lengths, jnp.asarray(drafts)),
            processed(features, logits, before, lengths, jnp.asarray(drafts)),
        )


# ---- neighbours, and features that are off


EVERY_FEATURE = SamplingFeatures(processors=frozenset(p.name for p in PROCESSORS))


@dataclass(frozen=True)
class NeutralBatch:
    """64 requests that use no feature, half of them greedy; zeros of both signs, -inf and NaN among
    their logits."""

    K: int = 3
    count: int = 64

    def logits(self) -> jax.Array:
        logits = random_logits(self.count, self.K + 1, V, seed=6)
        logits[:, :, ::9] = 0.0
        logits[:, :, 4::9] = -0.0
        logits[:, :, 2] = -np.inf
        logits[:8, :, 3] = np.nan
        return jnp.asarray(logits)

    def drafts(self) -> jax.Array:
        rng = np.random.default_rng(5)
        likely = np.argmax(np.nan_to_num(self.logits()[:, : self.K], nan=-np.inf), -1)
        return jnp.asarray(
            np.where(rng.random(likely.shape) < 0.7, likely, rng.integers(-1, V, likely.shape)),
            jnp.int32,
        )

    def state(self, features: SamplingFeatures) -> SamplingState:
        texts = np.random.default_rng(6).integers(0, V, (self.count, 5)).tolist()
        return state_of(
            [SAMPLED() if i % 2 else GREEDY() for i in range(self.count)], texts, features
        )


def test_neutral_requests_keep_the_bits_of_their_logits_beside_any_neighbours() -> None:
    """0 is 0, whatever its sign; NaN counts as -inf everywhere."""
    batch, lengths = NeutralBatch(), jnp.full(64, 9, jnp.int32)
    results = []
    for features in (SamplingFeatures(), EVERY_FEATURE):
        out = processed(features, batch.logits(), batch.state(features), lengths, batch.drafts())
        results.append(jnp.where(jnp.isnan(out), -jnp.inf, out))
    np.testing.assert_array_equal(*results)


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("rule", ["strict", "probabilistic", "block"])
def test_neutral_requests_get_the_same_tokens_beside_any_neighbours(rule: str) -> None:
    batch, lengths = NeutralBatch(), jnp.full(64, 8, jnp.int32)
    q = None if rule == "strict" else jnp.asarray(random_logits(batch.count, batch.K, V, seed=7))
    results = []
    for features in (SamplingFeatures(), EVERY_FEATURE):
        cfg = toy_config(V, batch.K, rule).with_features(features)
        proposal = Proposal(batch.drafts(), q)
        results.append(
            judged(
                cfg,
                batch.logits(),
                proposal,
                None,
                batch.state(features),
                lengths,
                jnp.ones(batch.count, bool),
            )
        )
    jax.tree.map(np.testing.assert_array_equal, *results)
    assert len(set(np.asarray(results[0].num_sampled).tolist())) > 2


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bad_words": {"bad_words_token_ids": [[5], [30, 7], [1, 2, 3]]},
    "min_tokens": {"min_tokens": 3, "stop_token_ids": (3, 9)},
    "logit_bias": {"logit_bias": {2: 4.0, 30: -3.0}, "banned_token_ids": (8,)},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "min_p": {"min_p": 0.1},
    "truncation": {"top_k": 9, "top_p": 0.8},
}


@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_gets_the_same_tokens_in_a_program_of_all_features(kind: str) -> None:
    """In the last level, whose arrays hold whatever the limits allow; to the bit."""
    batch, K, everything = 32, 3, ROUND_LEVELS[-1]
    params = [(SAMPLED if i % 2 else GREEDY)(**KINDS[kind]) for i in range(batch)]
    requests = [SampledRequest(p, i, PROMPT, TEXT[: i % 6]) for i, p in enumerate(params)]
    q = jnp.asarray(random_logits(batch, K, V, seed=7))
    raw = random_logits(batch, K + 1, V, seed=6)
    raw[:, :, TEXT] += 4  # tokens that penalties would change
    logits, drafts = jnp.asarray(raw), jnp.asarray(raw[:, :K].argmax(-1), jnp.int32)
    lengths = jnp.asarray([len(PROMPT) + i % 6 for i in range(batch)], jnp.int32)
    own = features_of(params)
    assert own.processors == {kind} - {"plain"}
    layout, results = StateLayout(Vocabulary(V, EOS)), []
    for features, arrays in ((own, layout.fit(own, params)), (everything, layout.full(everything))):
        state = jax.tree.map(jnp.asarray, sampling_rows(arrays, requests))
        cfg = toy_config(V, K).with_features(features)
        active = jnp.ones(batch, bool)
        results.append(judged(cfg, logits, Proposal(drafts, q), None, state, lengths, active))
    results[1] = replace(results[1], logprobs=None)
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_feature_that_is_off_leaves_nothing_behind() -> None:
    """No operation, and no array of the vocabulary's size in the state."""
    features = features_of([SAMPLED(), GREEDY()])
    assert features == SamplingFeatures()
    state = state_of([SAMPLED(), GREEDY()], [[], []])
    assert [x.shape for x in jax.tree.leaves(state)] == [(2, 2), (2,)]
    logits, tokens = jnp.zeros((2, 3, V)), jnp.zeros((2, 2), jnp.int32)
    window = Window(jnp.zeros(2, jnp.int32), tokens)
    assert adjust_logits(features, logits, state, window) is logits
    assert observe_tokens(features, state, tokens) is state
    division = jax.make_jaxpr(scale_by_temperature)(logits, state.temperature)
    truncation = partial(truncate_logits, features, window=window)
    assert str(jax.make_jaxpr(truncation)(logits, state).jaxpr.eqns) == str(division.jaxpr.eqns)


def test_greedy_requests_are_not_truncated() -> None:
    """The argmax would survive it, so they neither ask for it nor take part in it."""
    params = GREEDY(top_k=3, top_p=0.4, min_p=0.2)
    assert features_of([params]) == SamplingFeatures(sampled=False)
    logits, everything = (
        jnp.asarray(random_logits(1, 4, V)),
        SamplingFeatures(processors=frozenset({"truncation", "min_p"})),
    )
    state = state_of([params], [[]], everything)
    np.testing.assert_array_equal(
        processed(everything, logits, state, jnp.zeros(1, jnp.int32), jnp.zeros((1, 3), jnp.int32)),
        logits,
    )


def test_a_state_takes_on_features_and_drops_them_while_requests_run() -> None:
    params = [SAMPLED(presence_penalty=1.0), SAMPLED()]
    before = observe_tokens(
        features_of(params), state_of(params, [[5], []]), jnp.asarray([[5, 9], [3, -1]], jnp.int32)
    )
    more = features_of(params) | SamplingFeatures(
        processors=frozenset({"logit_bias", "min_tokens", "min_p"})
    )
    layout = StateLayout(Vocabulary(V)).fit(more)
    after = change_layout(before, layout)
    held = after.processors
    assert held["penalties"].output_counts[0].tolist() == [{5: 2, 9: 1}.get(t, 0) for t in range(V)]
    assert not held["logit_bias"].any()
    assert held["min_tokens"].stop_token_ids.tolist() == [[-1] * 4] * 2
    assert held["min_p"].tolist() == [0, 0]
    more_stops = SamplingParams(stop_token_ids=range(5))
    wider = change_layout(after, layout.fit(more, [more_stops]))
    assert wider.processors["min_tokens"].stop_token_ids.shape == (2, 8)
    structure = jax.tree.structure(state_of(params, [[], []], more))
    assert jax.tree.structure(after) == structure
    dropped = change_layout(after, layout.fit(SamplingFeatures()))
    assert dropped.processors == {} and len(jax.tree.leaves(dropped)) == 2
