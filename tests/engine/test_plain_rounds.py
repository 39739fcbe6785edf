"""Several rounds a step without drafts are handed out at once: requests see what a round a step
shows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.engine.engine import Engine
from tests.engine.test_engine_requests import K, make, random_requests

pytestmark = pytest.mark.once

ROUNDS = 4


@pytest.fixture(scope="module")
def one() -> LLM:
    return make(draft=False, rounds_per_step=1)


@pytest.fixture(scope="module")
def several() -> LLM:
    """An LLM whose rounds of tokens alone are compiled: one with log-probabilities would serve."""
    llm = make(draft=False, rounds_per_step=ROUNDS)
    llm.generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=6))
    return llm


def shown(llm: LLM, prompts: Any, params: Any) -> list[Any]:
    return [
        (text.token_ids, text.text, text.finish_reason, text.stop_reason)
        for output in llm.generate(prompts, params)
        for text in output.outputs
    ]


def test_requests_end_where_they_end_in_a_round_a_step(one: LLM, several: LLM) -> None:
    """With stop tokens, stop strings, limits, neighbours that come and go, and preemption."""
    prompts, params = random_requests(40, seed=5)
    for each in params[::4]:
        each.stop = ("C", "EA")
    before = several.scheduling.num_preemptions
    found = shown(several, prompts, params)
    assert found == shown(one, prompts, params)
    assert {reason for _, _, reason, _ in found} == {"stop", "length"}
    assert {type(why) for _, _, _, why in found} == {str, int, type(None)}
    assert several.scheduling.num_preemptions > before


@pytest.mark.parametrize("length", range(7, 14))
def test_a_second_turn_finds_the_blocks_of_the_first(one: LLM, several: LLM, length: int) -> None:
    """Blocks that rounds of the last step have filled are shared too, up to the last token."""
    hits = []
    for llm in (one, several):
        llm.reset_prefix_cache()
        params = SamplingParams(0.0, max_tokens=length, ignore_eos=True)
        [first] = llm.generate([[1, 2, 3]], params)
        text = [1, 2, 3, *first.token_ids]
        [second] = llm.generate([[*text, 4, 5, 6, 7]], params)
        hits.append(second.num_cached_tokens)
    assert hits[0] == hits[1] >= length // 4 * 4


def test_drafts_by_batch_size_may_be_none_in_several_rounds() -> None:
    """Two requests or more have none. Greedy, since a sampled text depends on K."""
    prompts, params = random_requests(12, seed=8)
    params = [replace(each, temperature=0.0) for each in params]
    spec = {"num_speculative_tokens_per_batch_size": [(1, 1, K), (2, 4, 0)]}
    by_rounds = [make(spec=spec, rounds_per_step=rounds) for rounds in (1, ROUNDS)]
    one, several = (shown(llm, prompts, params) for llm in by_rounds)
    assert several == one
    assert all(set(llm.timings.num_rounds_of) == {0, K} for llm in by_rounds)


def test_only_rounds_with_tokens_alone_are_handed_out_together(
    several: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    together = Engine._hand_out_plain

    def counted(*args: Any) -> None:
        calls.append(args)
        together(*args)

    monkeypatch.setattr(Engine, "_hand_out_plain", counted)
    several.generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=6, logprobs=1))
    make(rounds_per_step=ROUNDS).generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=6))
    assert not calls
    several.generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=6))
    assert calls


def test_steps_are_counted_by_their_rounds(several: LLM) -> None:
    before = several.timings.num_rounds, several.timings.num_output_tokens
    [output] = several.generate([[1, 2, 3]], SamplingParams(0.0, max_tokens=10, ignore_eos=True))
    assert len(output.token_ids) == 10
    assert several.timings.num_output_tokens - before[1] == 10
    # The prompt's call makes the first token, and the rounds after the last one are idle.
    assert several.timings.num_rounds - before[0] == 9
    assert several.timings.num_rounds_of == {0: several.timings.num_rounds}
    assert several.scheduling.num_waits == 0


def test_a_callback_has_the_tokens_of_a_step_together(several: LLM) -> None:
    [request] = several.make_requests(
        [[1, 2, 3]], SamplingParams(0.0, max_tokens=10, ignore_eos=True)
    )
    seen: list[int] = []
    request.on_tokens = lambda _, count: seen.append(count)
    several.engine.add(request)
    while request.finish_reason is None:
        several.engine.step()
    assert seen == [1, 4, 4, 1]


def test_a_callback_that_raises_ends_its_request_alone(several: LLM) -> None:
    prompts = np.arange(8).reshape(2, 4).tolist()
    params = SamplingParams(0.0, max_tokens=10, ignore_eos=True)
    bad, good = several.make_requests(prompts, params)

    def raises(*_: Any) -> None:
        raise KeyError("callback")

    bad.on_tokens = raises
    for request in (bad, good):
        several.engine.add(request)
    while several.engine.has_requests:
        several.engine.step()
    assert isinstance(bad.error, KeyError) and good.finish_reason == "length"
    assert len(good.token_ids) == 10
