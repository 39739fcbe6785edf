"""With every parameter in use, speculation gives the text of plain decoding, token for token: at
temperature 0, and under the strict rule for sampled requests too. Drafts come from the text itself:
whole windows are accepted, with what penalties and stops act on inside."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.params import SamplingParams, end_token_ids
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary
from jaxspec.sampling.rows import StateLayout, features_of, sampling_rows
from tests.support.slow import slow
from tests.support.tiny import Run, generate
from tests.support.toys import ToyDraft, toy_config

V, EOS, MAX_TOKENS, NUM_STOPS = 24, 7, 30, 4
TABLE = jnp.asarray(2 * np.random.default_rng(0).normal(size=(V, V)), jnp.float32)

# Words of two tokens, one of three; and of three with some of one and of five.
PAIRS = [(a, b) for a, b in product(range(V), repeat=2) if (a + b) % 3 == 0] + [(1, 1, 2)]
TRIPLES = [
    (a, b, c) for a, b, c in product(range(0, V, 2), range(V), range(V)) if (a + b + c) % 7 == 0
] + [(4,), (9, 9, 9, 9, 8)]

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("toy_families")]


def requests(temperature: float) -> list[SamplingParams]:
    """One for each parameter, then some together."""
    params = partial(SamplingParams, temperature, max_tokens=MAX_TOKENS, seed=5)
    narrow = {"top_k": 12, "top_p": 0.9, "min_p": 0.03} if temperature else {}
    return [
        params(ignore_eos=True),
        params(ignore_eos=True, repetition_penalty=1.5),
        params(ignore_eos=True, presence_penalty=1.2),
        params(ignore_eos=True, frequency_penalty=0.7),
        params(ignore_eos=True, presence_penalty=-2.0, frequency_penalty=-0.5),
        params(ignore_eos=True, logit_bias={3: 2.5, 9: -4.0}),
        params(ignore_eos=True, allowed_token_ids=range(2, 12)),
        params(ignore_eos=True, banned_token_ids=(1, 4, 12, 21)),
        params(logit_bias={EOS: 4.0}, min_tokens=11),
        params(logit_bias={EOS: 4.0}, min_tokens=0),
        params(stop_token_ids=(2, 3), min_tokens=5, repetition_penalty=1.3, **narrow),
        params(
            ignore_eos=True,
            repetition_penalty=1.2,
            frequency_penalty=0.4,
            logit_bias={0: 2.0},
            banned_token_ids=(8,),
            **narrow,
        ),
        params(
            ignore_eos=True,
            min_tokens=6,
            presence_penalty=0.9,
            allowed_token_ids=range(V - 3),
            **narrow,
        ),
        params(ignore_eos=True, bad_words_token_ids=PAIRS),
        params(
            ignore_eos=True,
            bad_words_token_ids=TRIPLES,
            frequency_penalty=0.3,
            logit_bias={4: 9.0},
            **narrow,
        ),
    ]


def texts_of(run: Run, params: Sequence[SamplingParams]) -> list[list[int]]:
    """As the host cuts them: at the first token that ends the request, itself included."""
    texts = []
    for text, p in zip(run.token_ids, params, strict=True):
        ends = set(p.stop_token_ids) if p.ignore_eos else {EOS, *p.stop_token_ids}
        texts.append(text[: next((i + 1 for i, t in enumerate(text) if t in ends), len(text))])
    return texts


def run(cfg: Any, draft: Any, params: Sequence[SamplingParams]) -> Run:
    """Each request with a prompt of its own."""
    prompts = [[(3 * i + j) % V for j in range(1 + i % 4)] for i in range(len(params))]
    layout = StateLayout(Vocabulary(V, (EOS,))).fit(features_of(params), params)
    rows = sampling_rows(
        layout,
        [SampledRequest(p, p.seed or 0, prompt) for p, prompt in zip(params, prompts, strict=True)],
    )
    stops = np.full((len(params), NUM_STOPS), -1, np.int32)
    for row, p in enumerate(params):
        ends = p.stop_token_ids if p.ignore_eos else end_token_ids(p, (EOS,))
        stops[row, : len(ends)] = ends
    weights = {"target": {"table": TABLE}, "draft": draft}
    return generate(
        cfg.with_features(features_of(params)),
        weights,
        prompts,
        rows,
        max_tokens=MAX_TOKENS,
        stop_token_ids=stops,
    )


def whole_texts(plain: Run, params: Sequence[SamplingParams]) -> np.ndarray:
    """prompt + text of each request, as the replaying draft reads them; past a request's end the
    tokens that its last round drew."""
    whole = np.zeros((len(params), 64), np.int32)
    for row, text in enumerate(plain.token_ids):
        prompt = [(3 * row + j) % V for j in range(1 + row % 4)]
        whole[row, : len(prompt) + len(text)] = prompt + text
    return whole


@pytest.fixture(scope="module")
def plain_runs() -> dict[float, Run]:
    return {}


def plain_run(cache: dict[float, Run], temperature: float) -> Run:
    if temperature not in cache:
        cache[temperature] = run(
            toy_config(V, 0, "strict", draft=None, draft_groups=()), {}, requests(temperature)
        )
    return cache[temperature]


@pytest.mark.parametrize(
    ("K", "rule", "temperature"),
    [
        (1, "probabilistic", 0.0),
        (2, "block", 0.0),
        (3, "probabilistic", 0.0),
        (4, "strict", 0.0),
        (5, "strict", 0.9),
        slow(3, "strict", 0.9),
    ],
)
def test_speculation_gives_the_text_of_plain_decoding_with_every_parameter(
    K: int, rule: str, temperature: float, plain_runs: dict[float, Run]
) -> None:
    """Drafts that are the text, drafts that never are, and drafts of which a third is wrong."""
    params = requests(temperature)
    plain = plain_run(plain_runs, temperature)
    expected = texts_of(plain, params)
    text, rng = whole_texts(plain, params), np.random.default_rng(K)
    wrong = rng.integers(1, V, text.shape)
    cfg = toy_config(V, K, rule, "greedy", draft=ToyDraft(V, method="replay"))
    for share, low, high in ((0.0, 0.9 * K, K), (1.0, 0, 0), (0.33, 0.1, K - 0.1)):
        drafts = np.where(rng.random(text.shape) < share, (text + wrong) % V, text)
        result = run(cfg, {"text": jnp.asarray(drafts, jnp.int32)}, params)
        assert texts_of(result, params) == expected
        # Past a request's end, in its last round, no draft knows the text.
        accepted = [n for counts in result.accepted[:5] for n in counts]
        assert low <= np.mean(accepted) <= high


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_every_parameter_changes_the_text_as_it_should(
    temperature: float, plain_runs: dict[float, Run]
) -> None:
    """Else the test above would say nothing of it."""
    params = requests(temperature)
    texts = texts_of(plain_run(plain_runs, temperature), params)
    neutral = SamplingParams(temperature, max_tokens=MAX_TOKENS, seed=5, ignore_eos=True)
    plain = run(
        toy_config(V, 0, "strict", draft=None, draft_groups=()), {}, [neutral] * len(params)
    ).token_ids
    unchanged = (
        {0} if temperature else {0, 4}
    )  # a greedy text that repeats itself is not moved by a wish to repeat
    assert {i for i, (a, b) in enumerate(zip(texts, plain, strict=True)) if a == b} == unchanged
    assert set(texts[6]) <= set(range(2, 12)) and not set(texts[7]) & {1, 4, 12, 21}
    for text, words in ((texts[13], PAIRS), (texts[14], TRIPLES)):
        assert not [w for w in words for i in range(len(text)) if tuple(text[i : i + len(w)]) == w]
    assert (
        texts[8][-1] == EOS
        and EOS not in texts[8][:-1]
        and len(texts[8]) == 12
        and texts[9][-1] == EOS
        and len(texts[9]) < 11
    )
    if temperature == 0:
        assert len(set(texts[3])) > len(set(texts[0])) and len(set(texts[4])) <= len(set(texts[0]))
