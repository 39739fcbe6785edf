"""Log-probabilities of prompts and texts are those of the model's own logits, as transformers has
them, with and without speculation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import REFERENCE_OPS, CacheGroup, RoundConfig
from jaxspec.decode import programs
from jaxspec.decode import state as decode_state
from jaxspec.loading.model import load_target
from jaxspec.sampling import logprobs
from jaxspec.sampling.logprobs import (
    Logprob,
    Scores,
    likeliest,
    logprobs_of,
    score_hidden,
    score_tokens,
)
from jaxspec.sampling.params import MAX_LOGPROBS, SamplingParams
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary
from jaxspec.sampling.rows import StateLayout, features_of, sampling_rows
from tests.parity.oracles import TARGETS, hf_outputs, hf_target
from tests.support.tiny import block_tables, pad_chunk
from tests.support.toys import ToyDraft

PROMPTS = [[5, 9, 80, 5, 33, 2, 7], [11, 140, 3]]
MAX_TOKENS, CHUNK, K = 12, 4, 3


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def check(
    found: list[dict[int, Logprob]], tokens: list[int], expected: np.ndarray, num_logprobs: int
) -> None:
    """expected: log_softmax of the rows that predict tokens, [len(tokens), vocab]."""
    assert len(found) == len(tokens)
    for place, token, row in zip(found, tokens, expected, strict=True):
        assert next(iter(place)) == token
        top = np.argsort(-row)[: None if num_logprobs < 0 else num_logprobs].tolist()
        assert list(place) == [token, *(t for t in top if t != token)]
        for other, score in place.items():
            assert score.logprob == pytest.approx(row[other], abs=1e-4)
            assert score.rank == 1 + (row > row[other]).sum()


class Collected:
    """A request's tokens and scores, as a host gathers them from prefill chunks and rounds."""

    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt, self.params = prompt, params
        self.text: list[int] = []
        self.scores: list[dict[int, Logprob]] = []
        self.prompt_scores: list[dict[int, Logprob]] = []

    def add(self, verification: Any, row: int) -> None:
        tokens = verification.output_tokens[row, : verification.num_sampled[row]].tolist()
        self.scores += logprobs_of(verification.logprobs, row, tokens, self.params.logprobs or 0)
        self.text += tokens

    def add_prompt(self, scores: Scores, row: int, begin: int) -> None:
        self.prompt_scores += logprobs_of(
            scores,
            row,
            self.prompt[begin + 1 : begin + 1 + CHUNK],
            self.params.prompt_logprobs or 0,
        )


def collect(
    cfg: RoundConfig, weights: Any, params: list[SamplingParams], compilation: str = "round"
) -> list[Collected]:
    cfg = cfg.with_features(features_of(params))
    requests = [Collected(prompt, p) for prompt, p in zip(PROMPTS, params, strict=True)]
    layout = StateLayout(Vocabulary(cfg.target.vocab_size)).fit(cfg, params)
    rows = sampling_rows(
        layout,
        [SampledRequest(p, s, x) for p, s, x in zip(params, [1, 2], PROMPTS, strict=True)],
    )
    tables, num_blocks = block_tables(2, cfg)
    limits, stops = jnp.full(2, MAX_TOKENS, jnp.int32), jnp.full((2, 1), -1, jnp.int32)
    state = decode_state.init_state(
        cfg,
        jax.tree.map(jnp.asarray, rows),
        limits,
        stops,
        num_blocks,
        dtype=jnp.float32,
        cache_dtype=jnp.float32,
    )
    for begin in range(0, max(map(len, PROMPTS)), CHUNK):
        verification, state = programs.run_prefill(
            cfg, weights, state, tables, pad_chunk(PROMPTS, begin, CHUNK), compilation=compilation
        )
        verification = jax.tree.map(np.asarray, verification)
        for row, request in enumerate(requests):
            request.add_prompt(verification.prompt_logprobs, row, begin)
            request.add(verification, row)
    while np.asarray(state.active).any():
        verification, state = programs.run_round(cfg, weights, state, tables, compilation)
        assert verification.prompt_logprobs is None
        verification = jax.tree.map(np.asarray, verification)
        for row, request in enumerate(requests):
            request.add(verification, row)
    return requests


@pytest.mark.oracle("transformers")
@pytest.mark.usefixtures("toy_families")
@pytest.mark.parametrize("num_logprobs", [MAX_LOGPROBS, -1])
def test_logprobs_are_transformers_log_softmax_with_and_without_speculation(
    num_logprobs: int, tmp_path: Path
) -> None:
    """Requests whose texts are far from the likeliest: penalties, a bias, temperature. A prompt in
    chunks; a draft that is often right."""
    oracle = hf_target(tmp_path, **TARGETS["llama"])
    target, weights = load_target(tmp_path, jnp.float32)
    params = [
        SamplingParams(
            0.0, repetition_penalty=1.8, logit_bias={3: 3.0}, logprobs=2, prompt_logprobs=1
        ),
        SamplingParams(0.9, seed=2, presence_penalty=1.0, logprobs=num_logprobs, prompt_logprobs=0),
    ]
    groups = (CacheGroup(4, 64),)
    plain = RoundConfig(target=target, target_groups=groups, ops=REFERENCE_OPS, rule="strict")
    texts = collect(plain, {"target": weights, "draft": {}}, params)
    drafts = np.zeros((2, 64), np.int32)
    for row, request in enumerate(texts):
        whole = [*request.prompt, *request.text]
        drafts[row, : len(whole)] = whole
    drafts[:, ::5] = 0  # and some are wrong
    draft = ToyDraft(target.vocab_size, method="replay")
    cfg = replace(
        plain,
        draft=draft,
        draft_groups=groups,
        num_speculative_tokens=K,
        draft_sampling="greedy",
    )
    speculated = collect(cfg, {"target": weights, "draft": {"text": jnp.asarray(drafts)}}, params)
    for requests in (texts, speculated):
        for request, again in zip(requests, texts, strict=True):
            assert request.text[:MAX_TOKENS] == again.text
            whole = [*request.prompt, *request.text]
            expected = log_softmax(hf_outputs(oracle, np.asarray(whole)).logits)
            check(
                request.scores,
                request.text,
                expected[len(request.prompt) - 1 : -1],
                request.params.logprobs or 0,
            )
            rows = expected[: len(request.prompt) - 1]
            check(
                request.prompt_scores, request.prompt[1:], rows, request.params.prompt_logprobs or 0
            )
    assert any(
        next(iter(place.values())).rank > 3 for request in texts for place in request.scores
    ), "expected unlikely tokens too"


def test_scores_do_not_depend_on_the_pieces_that_a_prompt_is_scored_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    hidden, head = (
        jnp.asarray(rng.normal(size=(2, 7, 8)), jnp.float32),
        jnp.asarray(rng.normal(size=(8, 30)), jnp.float32),
    )
    tokens = jnp.asarray(rng.integers(0, 30, (2, 7)), jnp.int32)
    expected = score_tokens(hidden @ head, tokens)
    assert expected.top_ids.shape == (2, 7, MAX_LOGPROBS)
    for rows in (1, 2, 3, 7):
        monkeypatch.setattr(logprobs, "PIECE_BYTES", 4 * 2 * 30 * rows)
        scores = score_hidden(lambda x: x @ head, 30, hidden, tokens)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), scores, expected
        )


def test_the_likeliest_in_passes_are_those_of_a_sort() -> None:
    """What a GPU runs; ties in the order of their ids."""
    logits = jnp.asarray(np.random.default_rng(1).integers(0, 40, (2, 3, 100)), jnp.float32)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.jit(likeliest, static_argnums=1)(logits, 20),
        tuple(jax.lax.top_k(logits, 20)),
    )


def test_a_vocabulary_smaller_than_the_list_is_listed_whole_and_ties_share_a_rank() -> None:
    logits = jnp.asarray([[[1.0, 3.0, 3.0, -jnp.inf]]], jnp.float32)
    scores = jax.tree.map(np.asarray, score_tokens(logits, jnp.asarray([[2]], jnp.int32)))
    (place,) = logprobs_of(scores, 0, [2], 3)
    assert (
        list(place) == [2, 1, 0] and place[2].rank == 2
    )  # as vLLM counts: those as likely or likelier
    assert scores.top_ids.shape == (1, 1, 4) and scores.top_logprobs[0, 0, 3] == -np.inf
    assert sum(np.exp(s.logprob) for s in place.values()) == pytest.approx(1, abs=1e-6)
