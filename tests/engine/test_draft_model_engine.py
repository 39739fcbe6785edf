"""The engine with an independent draft: mixed requests in a pool far too small have the texts that
they have alone, and shared prefixes hold the draft's keys and values too."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from tests.drafts.test_independent import own_draft
from tests.engine.test_engine_requests import random_requests
from tests.support.families import family_model
from tests.support.slow import slow
from tests.support.tiny import Model, random_prompts

pytestmark = pytest.mark.once

LIMIT, K, COUNT = 96, 3, 20


def engine(model: Model, spec: dict[str, Any] | None, **config: Any) -> LLM:
    """spec: None decodes plainly."""
    values: dict[str, Any] = dict(
        max_model_len=LIMIT,
        max_num_seqs=4,
        block_size=4,
        batch_buckets=(4,),
        max_num_batched_tokens=64,
        num_gpu_blocks_override=LIMIT // 4,  # room for one request of the largest size
    )
    speculative = None
    if spec is not None:
        speculative = SpeculativeConfig("none", "draft_model", num_speculative_tokens=K, **spec)
    return LLM(
        (model.target, model.params["target"]),
        None if spec is None else (model.draft, model.params["draft"]),
        speculative,
        config=EngineConfig(**(values | config)),
    )


@pytest.mark.parametrize(
    ("draft", "spec", "rounds"),
    [
        ("gpt_oss", dict(rejection_sample_method="block"), 1),
        slow("llama", dict(rejection_sample_method="strict"), 4),
        slow("llama4_text", {}, 1),
    ],
)
def test_mixed_requests_keep_their_text_when_they_are_preempted_and_share_prefixes(
    draft: str, spec: dict[str, Any], rounds: int
) -> None:
    model = family_model("llama", f"draft_model:{draft}")
    prompts, params = random_requests(COUNT, seed=1)
    small = engine(model, spec, rounds_per_step=rounds)
    together = [output.token_ids for output in small.generate(prompts, params)]
    assert small.scheduling.num_preemptions > 0 and small.scheduling.num_prefix_hits > 0
    assert small.metrics.mean_acceptance_length > 1.15
    cold = engine(model, spec, enable_prefix_caching=False, rounds_per_step=1)
    alone = [
        cold.generate([prompt], own)[0].token_ids
        for prompt, own in zip(prompts, params, strict=True)
    ]
    assert together == alone
    plain = engine(model, None).generate(prompts, params)
    greedy = [i for i, own in enumerate(params) if own.temperature == 0]
    assert len(greedy) > 3
    assert [together[i] for i in greedy] == [plain[i].token_ids for i in greedy]


def test_a_text_that_goes_on_from_a_shared_prefix_accepts_every_draft() -> None:
    """A draft that the target is accepts nothing less. So the blocks that the second round of
    requests shares hold all keys and values, those of the first ones' last drafts too; and so do
    the caches of requests whose number of drafts changes from round to round."""
    model = own_draft("llama")
    schedule = ((1, 1, 2), (2, 2, 0), (3, 4, 3))
    llm = engine(
        model, dict(num_speculative_tokens_per_batch_size=schedule), num_gpu_blocks_override=96
    )
    prompts = random_prompts((5, 9, 3, 6), seed=3)
    params = [SamplingParams(temperature=0, max_tokens=n) for n in (23, 25, 22, 37)]
    first = [output.token_ids for output in llm.generate(prompts, params)]
    going_on = [[*p, *text] for p, text in zip(prompts, first, strict=True)]
    second = llm.generate(going_on, SamplingParams(temperature=0, max_tokens=21))
    assert llm.scheduling.num_prefix_hits >= 80
    metrics = llm.metrics
    assert metrics.num_accepted_tokens == metrics.num_draft_tokens > 60
    plain = engine(model, None, num_gpu_blocks_override=96)
    assert first == [output.token_ids for output in plain.generate(prompts, params)]
    again = plain.generate(going_on, SamplingParams(temperature=0, max_tokens=21))
    assert [output.token_ids for output in second] == [output.token_ids for output in again]


def test_drafts_end_with_the_drafts_context() -> None:
    model = own_draft("llama")
    llm = engine(model, dict(draft_max_model_len=20))
    [output] = llm.generate(random_prompts((6,)), SamplingParams(temperature=0, max_tokens=40))
    plain = engine(model, None)
    [expected] = plain.generate(random_prompts((6,)), SamplingParams(temperature=0, max_tokens=40))
    assert output.token_ids == expected.token_ids
    assert (llm.metrics.num_drafts, llm.metrics.num_draft_tokens) == (4, 12)  # of 6 + 12 tokens
    assert llm.metrics.num_accepted_tokens > 9
