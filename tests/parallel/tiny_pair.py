"""An LLM of a tiny target with an EAGLE-3 head, for programs of several devices or processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec import LLM, EngineConfig, SpeculativeConfig
from tests.support.tiny import Model


def make_llm(
    model: Model, *, drafts: bool = True, options: Mapping[str, Any] = {}, **config: Any
) -> LLM:
    """Return an LLM that prefills prompts in chunks.

    options, config: further fields of SpeculativeConfig and of EngineConfig
    """
    head = SpeculativeConfig(method="eagle3", model="none", num_speculative_tokens=3, **options)
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]) if drafts else None,
        head if drafts else None,
        config=EngineConfig(max_model_len=64, block_size=4, max_num_batched_tokens=16, **config),
        eos_token_ids=(7,),
    )
