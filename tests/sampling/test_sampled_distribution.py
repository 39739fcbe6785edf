"""Sampled text follows the target's processed distribution, through the real propose and verify,
with truncation, penalties and masks on.

The toy target's logits depend on the token before alone, but penalties make every token depend on
all before it: the joint distribution of the first three tokens, over as many rounds as they took,
is enumerated exactly. One batch row is one trial.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode import round as decode
from jaxspec.decode import state as decode_state
from jaxspec.sampling import logits as logits_module
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors import BEFORE_TEMPERATURE
from jaxspec.sampling.processors.penalties import Penalties, PenaltiesState
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary, Window
from jaxspec.sampling.rows import StateLayout, features_of, sampling_rows
from tests.support.sampling_specification import softmax, specification
from tests.support.slow import slow
from tests.support.statistics import chi_square, within_limit
from tests.support.toys import toy_config

V, K, LENGTH, TRIALS = 12, 3, 3, 40_000
PROMPT, FIRST, STOP = [4, 1, 1], 6, 9  # FIRST was generated already: what a round starts from
RNG = np.random.default_rng(0)
TARGET = 1.2 * RNG.normal(size=(V, V)).astype(np.float32)
DRAFT = TARGET + RNG.normal(size=(V, V)).astype(np.float32)

REQUESTS = {
    "min_p": SamplingParams(0.7, min_p=0.12),
    "penalties": SamplingParams(
        1.0, repetition_penalty=1.6, presence_penalty=0.7, frequency_penalty=0.9
    ),
    "everything": SamplingParams(
        0.9,
        top_k=9,
        top_p=0.95,
        min_p=0.03,
        repetition_penalty=1.3,
        presence_penalty=-0.5,
        frequency_penalty=1.1,
        logit_bias={2: 1.0, 7: -0.5},
        banned_token_ids=(5,),
        min_tokens=3,
        stop_token_ids=(STOP,),
    ),
}

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("toy_families")]


def first_tokens(
    params: SamplingParams, rule: str, draft_sampling: str
) -> tuple[np.ndarray, float]:
    """[TRIALS, LENGTH] tokens after FIRST, and how many drafts a round accepts."""
    cfg = toy_config(V, K, rule, draft_sampling).with_features(features_of([params]))
    program = jax.jit(partial(decode.decode_round, cfg))
    weights = {"target": {"table": jnp.asarray(TARGET)}, "draft": {"table": jnp.asarray(DRAFT)}}
    full = lambda x, dtype=jnp.int32: jnp.full(TRIALS, x, dtype)  # noqa: E731
    layout = StateLayout(Vocabulary(V)).fit(cfg, [params])
    row = sampling_rows(layout, [SampledRequest(params, 0, PROMPT, [FIRST])])
    sampling = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x), (TRIALS, *x.shape[1:])), row)
    keys = jnp.stack([full(3, jnp.uint32), jnp.arange(TRIALS, dtype=jnp.uint32)], axis=1)
    state = decode_state.init_state(
        cfg,
        replace(sampling, keys=keys),
        full(1000),
        full(-1)[:, None],
        (1,),
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    state = replace(
        state,
        seq_lens=full(len(PROMPT)),
        next_token=full(FIRST),
        active=full(True, jnp.bool_),
        draft=replace(
            state.draft,
            pending_tokens=state.draft.pending_tokens.at[:, 0].set(FIRST),
            num_pending=full(1),
        ),
    )
    tokens, accepted = [], []
    for _ in range(LENGTH):
        verification, state = program(weights, state, (full(0)[:, None],))
        tokens.append(np.asarray(verification.output_tokens))
        accepted.append(np.mean(verification.num_sampled) - 1)
    flat = np.concatenate(tokens, axis=1)
    first = np.take_along_axis(flat, np.argsort(flat < 0, axis=1, kind="stable"), axis=1)[
        :, :LENGTH
    ]
    return first, float(np.mean(accepted))


def joint(params: SamplingParams) -> np.ndarray:
    """The probability of every text of LENGTH tokens, [V ** LENGTH]."""
    expected = np.zeros((V,) * LENGTH)
    for head in itertools.product(range(V), repeat=LENGTH - 1):
        text, p = [FIRST], 1.0
        for token in head:
            p *= softmax(specification(params, TARGET[text[-1]], PROMPT, text))[token]
            text.append(token)
        expected[head] = (
            p * softmax(specification(params, TARGET[text[-1]], PROMPT, text)) if p else 0.0
        )
    return expected.ravel()


def statistic(params: SamplingParams, tokens: np.ndarray) -> tuple[float, int]:
    index = tokens @ V ** np.arange(LENGTH - 1, -1, -1)
    return chi_square(np.bincount(index, minlength=V**LENGTH), joint(params))


@pytest.mark.parametrize(
    ("rule", "draft_sampling", "request_"),
    [
        # test_speculation_equals_plain.py has this rule's texts.
        slow("strict", "probabilistic", "everything"),
        slow("probabilistic", "probabilistic", "everything"),
        ("probabilistic", "greedy", "penalties"),
        ("block", "probabilistic", "everything"),
        slow("block", "probabilistic", "min_p"),
    ],
)
def test_the_first_tokens_together_follow_the_processed_target(
    rule: str, draft_sampling: str, request_: str
) -> None:
    tokens, accepted = first_tokens(REQUESTS[request_], rule, draft_sampling)
    assert accepted > 0.3  # not by rejecting everything
    assert within_limit(*statistic(REQUESTS[request_], tokens))


@pytest.mark.parametrize("rule", ["probabilistic", slow("block")])
def test_penalties_that_do_not_count_the_windows_own_drafts_bias_the_text(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Forgetful(Penalties):  # programs share the traces of each processor
        def apply(self, state: PenaltiesState, logits: jax.Array, window: Window) -> jax.Array:
            assert window.draft_tokens is not None
            no_drafts = replace(window, draft_tokens=jnp.full_like(window.draft_tokens, -1))
            return super().apply(state, logits, no_drafts)

    processors = [Forgetful() if p.name == Penalties.name else p for p in BEFORE_TEMPERATURE]
    monkeypatch.setattr(logits_module, "BEFORE_TEMPERATURE", tuple(processors))
    tokens, _ = first_tokens(REQUESTS["penalties"], rule, "probabilistic")
    assert not within_limit(*statistic(REQUESTS["penalties"], tokens))
