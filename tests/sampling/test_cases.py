"""Cases of vLLM's suite for sampling parameters, through verify_rows with every parameter in
use."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.decode.verify import verify_rows
from jaxspec.drafts.autoregressive import Proposal
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary
from jaxspec.sampling.rows import StateLayout, features_of, sampling_rows
from tests.support.slow import slow
from tests.support.toys import toy_config

judged = jax.jit(verify_rows, static_argnums=0)

pytestmark = pytest.mark.usefixtures("toy_families")


def request(vocab: int, **changes: Any) -> SamplingParams:
    """With every parameter; the last tokens of the vocabulary among those that it names."""
    values: dict[str, Any] = {
        "temperature": 1.0,
        "top_k": 50,
        "top_p": 0.99,
        "min_p": 1e-4,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {vocab - 1: 5.0},
        "banned_token_ids": (vocab - 2,),
        "min_tokens": 3,
        "stop_token_ids": (vocab - 3,),
    }
    return SamplingParams(**(values | changes))


def verified(
    vocab: int,
    K: int,
    params: list[SamplingParams],
    seeds: list[int],
    *,
    rule: str = "probabilistic",
    seed: int = 0,
) -> Any:
    """num_sampled and output_tokens of random logits, each row's a function of its place, over
    drafts that are often right."""
    rows = [np.random.default_rng((seed, row)) for row in range(len(params))]
    logits = np.stack([2 * rng.normal(size=(K + 1, vocab)).astype(np.float32) for rng in rows])
    drafts = np.argmax(logits[:, :K], axis=-1).astype(np.int32)
    q = logits[:, :K] + np.stack([rng.normal(size=(K, vocab)).astype(np.float32) for rng in rows])
    state = sampling_rows(
        StateLayout(Vocabulary(vocab)).fit(features_of(params), params),
        [SampledRequest(p, s, [1], [vocab - 1]) for p, s in zip(params, seeds, strict=True)],
    )
    verification = judged(
        toy_config(vocab, K, rule).with_features(features_of(params)),
        jnp.asarray(logits),
        Proposal(jnp.asarray(drafts), None if rule == "strict" else jnp.asarray(q)),
        None,
        jax.tree.map(jnp.asarray, state),
        jnp.ones(len(params), jnp.int32),
        jnp.ones(len(params), bool),
    )
    return np.asarray(verification.num_sampled), np.asarray(verification.output_tokens)


@pytest.mark.parametrize("K", [1, slow(3), 5])
def test_seeded_requests_get_the_same_tokens_20_times_beside_others_in_batches_of_1_4_and_8(
    K: int,
) -> None:
    """Every other request has a seed; those between have another one each time."""
    first: dict[int, Any] = {}
    for batch, repeat in itertools.product((1, 4, 8), range(20)):
        seeds = [row if row % 2 == 0 else 1000 * (repeat + 1) + row for row in range(batch)]
        num_sampled, tokens = verified(1000, K, [request(1000)] * batch, seeds)
        for row in range(0, batch, 2):
            got = (int(num_sampled[row]), tokens[row].tolist())
            assert first.setdefault(row, got) == got
    assert len({str(got) for got in first.values()}) == len(first)


@pytest.mark.parametrize("vocab", [100, 8193, 10_000, 151_936])
def test_tokens_stay_in_range_whatever_the_size_of_the_vocabulary(vocab: int) -> None:
    params = [
        request(vocab),
        request(vocab, allowed_token_ids=(vocab - 3, vocab - 1)),
        request(vocab, temperature=0.0),
    ]
    num_sampled, tokens = verified(vocab, 2, params, [1, 2, 3])
    sampled = [tokens[row, : num_sampled[row]].tolist() for row in range(3)]
    assert all(0 <= t < vocab and t != vocab - 2 for row in sampled for t in row)
    assert sampled[1][0] == vocab - 1  # the other one ends the text, and it is too short
