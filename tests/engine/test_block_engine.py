"""The engine with block drafts: mixed requests in a pool far too small have the texts that they
have alone, and greedy ones those of plain decoding."""

from __future__ import annotations

from typing import Any

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from tests.engine.test_engine_requests import random_requests
from tests.support.slow import slow
from tests.support.tiny import Model, agreeing_block_model

pytestmark = pytest.mark.once

LIMIT, K, COUNT = 96, 3, 24


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
        speculative = SpeculativeConfig(method=model.draft.method, num_speculative_tokens=K, **spec)
    return LLM(
        (model.target, model.params["target"]),
        None if spec is None else (model.draft, model.params["draft"]),
        speculative,
        config=EngineConfig(**(values | config)),
    )


@pytest.mark.parametrize(
    ("method", "changes", "spec", "rounds"),
    [
        (
            "dspark",
            dict(windows=(None, 6), causal=(False, True), confidence_threshold=0.2),
            dict(rejection_sample_method="block", max_num_verify_tokens=6),
            1,
        ),
        slow(
            "dspark",
            dict(windows=(None, 6), causal=(False, True), confidence_threshold=0.2),
            dict(rejection_sample_method="block"),
            1,
        ),
        slow(
            "dspark",
            dict(confidence_threshold=0.1),
            dict(rejection_sample_method="probabilistic", max_num_verify_tokens=6),
            1,
        ),
        slow("dspark", dict(windows=(5, 5), causal=(True, True)), {}, 4),
        slow("dflash", {}, dict(rejection_sample_method="strict"), 1),
    ],
)
def test_mixed_requests_keep_their_text_when_they_are_preempted_and_share_prefixes(
    method: str, changes: dict[str, Any], spec: dict[str, Any], rounds: int
) -> None:
    model = agreeing_block_model(method, **changes)
    prompts, params = random_requests(COUNT, seed=1)
    small = engine(model, spec, rounds_per_step=rounds)
    together = [output.token_ids for output in small.generate(prompts, params)]
    assert small.scheduling.num_preemptions > 0 and small.scheduling.num_prefix_hits > 0
    assert (small.scheduling.num_waits > 20) == ("max_num_verify_tokens" in spec)
    metrics = small.metrics
    assert metrics.mean_acceptance_length > 1.15
    if changes.get("confidence_threshold"):  # what it ended is not proposed
        assert all(metrics.draft_histogram[1:]) and sum(metrics.draft_histogram) > 20
        assert metrics.num_draft_tokens < K * metrics.num_drafts
    cold = engine(model, spec, enable_prefix_caching=False, max_num_seqs=4, rounds_per_step=1)
    alone = [
        cold.generate([prompt], own)[0].token_ids
        for prompt, own in zip(prompts, params, strict=True)
    ]
    assert together == alone
    plain = engine(model, None).generate(prompts, params)
    greedy = [i for i, own in enumerate(params) if own.temperature == 0]
    assert len(greedy) > 4
    assert [together[i] for i in greedy] == [plain[i].token_ids for i in greedy]


def test_the_number_of_drafts_may_follow_the_batch_and_end_with_the_drafts_context() -> None:
    """With K from 0 to 3, and requests that outlive what is drafted for."""
    model = agreeing_block_model("dspark")
    prompts, _ = random_requests(6, seed=2)
    params = SamplingParams(temperature=0, max_tokens=24)
    spec = dict(
        num_speculative_tokens_per_batch_size=((1, 1, 3), (2, 2, 0), (3, 4, 2)),
        draft_max_model_len=30,
    )
    llm = engine(model, spec, num_gpu_blocks_override=4 * LIMIT // 4)
    texts = [output.token_ids for output in llm.generate(prompts, params)]
    plain = engine(model, None, num_gpu_blocks_override=4 * LIMIT // 4)
    assert texts == [output.token_ids for output in plain.generate(prompts, params)]
    assert llm.metrics.mean_acceptance_length > 1.3
