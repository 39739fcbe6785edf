"""Two LLMs share weights if they are the same arrays, the target's and the draft's."""

from __future__ import annotations

import jax
import pytest

from jaxspec import LLM, EngineConfig, SpeculativeConfig
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.once
HEAD = SpeculativeConfig(method="eagle3", model="none", num_speculative_tokens=2)
CONFIG = EngineConfig(max_model_len=64, block_size=4)


def test_another_drafts_weights_are_not_taken() -> None:
    model, other = tiny_model("eagle3"), tiny_model("eagle3", seed=1)
    target = model.target, model.params["target"]

    def make(draft: object, weights: object = ()) -> LLM:
        pair = model.draft, draft
        return LLM(target, pair, HEAD, config=CONFIG, eos_token_ids=(), weights=weights)  # type: ignore[arg-type]

    first = make(model.params["draft"])
    same = make(model.params["draft"], first.weights)
    assert same.weights[0] is first.weights[0]
    second = make(other.params["draft"], first.weights)
    assert second.weights[0]["draft"] is other.params["draft"]
    plain = first.on_same_weights(speculative=False)
    assert plain.weights[0]["target"] is first.weights[0]["target"]
    assert not jax.tree.leaves(plain.weights[0]["draft"])
