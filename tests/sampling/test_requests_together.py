"""Through the engine: a request's text and log-probabilities do not depend on its neighbours'
parameters, nor on being preempted, nor, where it is greedy, on speculation."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, EngineConfig, RequestOutput, SamplingParams, SpeculativeConfig
from tests.support.toys import ToyDraft, ToyTarget

V, K, EOS = 24, 3, 7
RNG = np.random.default_rng(0)
TARGET = {"table": jnp.asarray(2 * RNG.normal(size=(V, V)), jnp.float32)}
DRAFT = {"table": TARGET["table"] + jnp.asarray(0.5 * RNG.normal(size=(V, V)), jnp.float32)}

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("toy_families")]

EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {EOS: 2.0, 3: 1.0},
    "banned_token_ids": (11,),
    "min_tokens": 9,
    "stop_token_ids": (2,),
    "max_tokens": 30,
    "logprobs": 3,
    "prompt_logprobs": 2,
}
WORDS = [(a, b) for a in range(V) for b in range(V) if (a + b) % 3 == 0] + [
    (a, b, (a + 2 * b) % V) for a in range(V) for b in range(V)
]
REQUESTS = [
    SamplingParams(1.0, seed=1, max_tokens=30, ignore_eos=True),
    SamplingParams(0.0, **EVERYTHING),
    SamplingParams(0.9, seed=2, top_k=10, top_p=0.9, min_p=0.02, **EVERYTHING),
    SamplingParams(0.0, max_tokens=25, ignore_eos=True, frequency_penalty=0.8, prompt_logprobs=0),
    SamplingParams(0.0, max_tokens=30, ignore_eos=True, bad_words_token_ids=WORDS),
    SamplingParams(1.0, seed=3, max_tokens=30, ignore_eos=True, bad_words_token_ids=WORDS),
]
PROMPTS = [[(5 * i + j * j) % V for j in range(3 + 3 * i)] for i in range(len(REQUESTS))]


def engine(*, speculative: bool = True, verify: int | None = None, **config: Any) -> LLM:
    """verify: max_num_verify_tokens"""
    settings = {
        "max_model_len": 64,
        "max_num_seqs": 4,
        "batch_buckets": (4,),
        "block_size": 4,
        "max_num_batched_tokens": 16,
    } | config
    return LLM(
        (ToyTarget(V), TARGET),
        (ToyDraft(V), DRAFT) if speculative else None,
        SpeculativeConfig(method="eagle", num_speculative_tokens=K, max_num_verify_tokens=verify)
        if speculative
        else None,
        eos_token_ids=(EOS,),
        config=EngineConfig(**settings),
    )


def of(output: RequestOutput) -> tuple[Any, ...]:
    return output.token_ids, output.finish_reason, output.logprobs, output.prompt_logprobs


@pytest.fixture(scope="module")
def alone() -> dict[int, RequestOutput]:
    return {}


def run_alone(found: dict[int, RequestOutput], i: int) -> RequestOutput:
    if i not in found:
        found[i] = engine().generate([PROMPTS[i]], REQUESTS[i])[0]
    return found[i]


@pytest.mark.parametrize("verify", [None, 6])
def test_a_request_is_the_same_alone_and_among_others_that_preempt_it(
    alone: dict[int, RequestOutput], verify: int | None
) -> None:
    """Each twice, over a pool of blocks that holds two or three of them to their ends; and in
    rounds with rows for one request, where the others wait."""
    llm = engine(num_gpu_blocks_override=20, verify=verify)
    together = llm.generate(2 * PROMPTS, 2 * REQUESTS)
    assert llm.scheduling.num_preemptions > 0
    assert (llm.scheduling.num_waits > 20) == (verify is not None)
    for i, output in enumerate(together):
        assert of(output) == of(run_alone(alone, i % len(REQUESTS))), f"request {i}"
    assert together[1].finish_reason == "stop" and len(together[1].token_ids) > 9


def test_greedy_requests_are_those_of_plain_decoding(alone: dict[int, RequestOutput]) -> None:
    greedy = [i for i, p in enumerate(REQUESTS) if p.greedy]
    plain = engine(speculative=False).generate(
        [PROMPTS[i] for i in greedy], [REQUESTS[i] for i in greedy]
    )
    for i, output in zip(greedy, plain, strict=True):
        assert of(output) == of(run_alone(alone, i)), f"request {i}"
        assert run_alone(alone, i).metrics.num_accepted_tokens > 0


def test_outputs_hold_the_logprobs_that_were_asked_for(alone: dict[int, RequestOutput]) -> None:
    """Of the toy target's own table, before any processing, for every generated token and every
    prompt token but the first."""
    x = np.asarray(TARGET["table"], np.float64)
    expected = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    for i, params in enumerate(REQUESTS):
        output = run_alone(alone, i)
        assert (output.logprobs is None) == (params.logprobs is None)
        assert (output.cumulative_logprob is None) == (params.logprobs is None)
        assert (output.prompt_logprobs is None) == (params.prompt_logprobs is None)
        whole = [*PROMPTS[i], *output.token_ids]
        places = [
            *(output.prompt_logprobs or [None] * len(PROMPTS[i])),
            *(output.logprobs or [None] * len(output.token_ids)),
        ]
        assert len(places) == len(whole) and places[0] is None
        total = sum(
            expected[a, b]
            for a, b in zip(whole[len(PROMPTS[i]) - 1 :], output.token_ids, strict=False)
        )
        assert output.cumulative_logprob in (None, pytest.approx(total, abs=1e-4))
        for before, token, place in zip(whole, whole[1:], places[1:], strict=False):
            for other, score in (place or {}).items():
                assert score.logprob == pytest.approx(expected[before, other], abs=1e-5)
            assert place is None or next(iter(place)) == token


def test_n_texts_of_a_prompt_each_have_their_logprobs_and_the_prompt_has_one() -> None:
    params = SamplingParams(
        1.0, seed=4, n=2, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1
    )
    output = engine().generate([PROMPTS[1]], params)[0]
    first, second = output.outputs
    assert first.token_ids != second.token_ids
    assert first.logprobs is not None and second.logprobs is not None
    assert [next(iter(place)) for place in second.logprobs] == second.token_ids
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPTS[1])
    assert None not in output.prompt_logprobs[1:]
