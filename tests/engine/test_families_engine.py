"""The engine with targets of several KV-cache groups and with latent caches: text equals plain
decoding's."""

from __future__ import annotations

import pytest

from jaxspec import LLM, EngineConfig, SamplingParams, SpeculativeConfig
from tests.support.families import family_model
from tests.support.slow import slow
from tests.support.tiny import random_prompts

pytestmark = pytest.mark.once

CONFIG = EngineConfig(max_model_len=64, max_num_seqs=2, block_size=4, max_num_batched_tokens=16)
GREEDY = [SamplingParams(temperature=0, max_tokens=n) for n in (20, 9, 14)]
LENGTHS = (18, 3, 7)  # more requests than slots; longer than a window and than a prefill chunk


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("gpt_oss", "eagle"),
        # tests/llm/test_quantized_text.py has latent caches, test_engine_groups.py MTP drafts.
        slow("glm4_moe_lite", "mtp"),
        slow("llama4_text", "eagle_llama4"),
    ],
)
def test_the_engine_gives_plain_decodings_text(family: str, method: str) -> None:
    model = family_model(family, method, window=6 if method == "eagle" else None)
    target = model.target, model.params["target"]
    plain = LLM(target, config=CONFIG).generate(random_prompts(LENGTHS), GREEDY)
    speculative = SpeculativeConfig(
        method="mtp" if method == "mtp" else "eagle", num_speculative_tokens=3
    )
    llm = LLM(target, (model.draft, model.params["draft"]), speculative, config=CONFIG)
    outputs = llm.generate(random_prompts(LENGTHS), GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert llm.metrics.mean_acceptance_length > 1.3
