"""Settings of an engine that do not fit its models, and prompts with more than a prompt."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SpeculativeConfig
from tests.support.tiny import block_config
from tests.support.toys import ToyDraft, ToyTarget

V = 24
TABLE = {"table": jnp.zeros((V, V), jnp.float32)}
pytestmark = pytest.mark.usefixtures("toy_families")


def engine(*, K: int = 3, eos_token_ids: tuple[int, ...] = (), **config: Any) -> LLM:
    settings: dict[str, Any] = {"max_model_len": 64, "block_size": 16} | config
    return LLM(
        (ToyTarget(V), TABLE),
        (ToyDraft(V), TABLE),
        SpeculativeConfig(method="eagle", num_speculative_tokens=K),
        eos_token_ids=eos_token_ids,
        config=EngineConfig(**settings),
    )


@pytest.mark.parametrize("token", [V, -1, 2**31, 2**70])
def test_an_end_id_outside_the_vocabulary_is_refused(token: int) -> None:
    engine(eos_token_ids=(0, V - 1))
    with pytest.raises(ConfigError) as e:
        engine(eos_token_ids=(3, token))
    assert str(e.value) == (
        f"eos_token_id: expected token ids in 0..23, the target's vocabulary, got {token}"
    )


def test_more_drafts_than_a_text_can_hold_are_refused() -> None:
    engine(K=15, max_model_len=16)
    for K in (16, 10**6):
        with pytest.raises(ConfigError) as e:
            engine(K=K, max_model_len=16)
        assert str(e.value) == (
            f"num_speculative_tokens: expected fewer than max_model_len 16, got {K}"
        )


def test_more_drafts_than_a_loaded_heads_block_holds_are_refused() -> None:
    draft = block_config("dspark", draft_block_size=4), {}
    with pytest.raises(ConfigError, match="expected at most 4, the drafts of this head's block"):
        LLM((ToyTarget(V), TABLE), draft, SpeculativeConfig(num_speculative_tokens=5))


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt_token_ids": [1], "multi_modal_data": {"image": 1}},
        {"prompt": "a", "multi_modal_data": {"image": 1}},
    ],
)
def test_what_is_beside_a_prompt_is_not_dropped(prompt: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as e:
        engine().make_requests([prompt], None)
    assert str(e.value) == (
        "prompt 0: expected the keys prompt or prompt_token_ids alone, got multi_modal_data too"
    )


def test_keys_of_a_prompt_that_hold_nothing_are_fine() -> None:
    prompt = {"prompt": "a", "prompt_token_ids": [1, 2], "multi_modal_data": None}
    assert engine().make_requests(prompt, None)[0].prompt_token_ids == [1, 2]
