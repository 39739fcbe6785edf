"""An LLM of parts that are loaded already: which settings may stand beside a loaded draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jaxspec import LLM, ConfigError, EngineConfig, SpeculativeConfig
from jaxspec.config.draft_methods import HELD_BY_DRAFT, OPTIONS
from jaxspec.drafts.ngram import NgramConfig
from jaxspec.drafts.suffix import SuffixConfig
from tests.config.test_speculative import OTHER_VALUES
from tests.support.families import family_model
from tests.support.tiny import VOCAB, Model, agreeing_block_model, tiny_model

pytestmark = pytest.mark.once


def engine(model: Model, spec: dict[str, Any]) -> LLM:
    return LLM(
        (model.target, model.params["target"]),
        (model.draft, model.params["draft"]),
        SpeculativeConfig(method=model.draft.method, num_speculative_tokens=3, **spec),
        config=EngineConfig(max_model_len=32, max_num_seqs=2, block_size=4),
    )


def looked_up(draft: NgramConfig) -> Model:
    model = tiny_model("eagle")
    return Model(model.target, draft, {**model.params, "draft": {}})


LOADED: dict[str, Callable[[], Model]] = {
    "eagle": lambda: tiny_model("eagle"),
    "eagle3": lambda: tiny_model("eagle3"),
    "dspark": lambda: agreeing_block_model("dspark"),
    "dflash": lambda: agreeing_block_model("dflash"),
    "draft_model": lambda: family_model("gpt_oss", "draft_model"),
    "mtp": lambda: family_model("glm4_moe_lite", "mtp"),
    "ngram": lambda: looked_up(NgramConfig(VOCAB, 3, 1)),
    "suffix": lambda: looked_up(SuffixConfig(VOCAB, 3, 1)),
}
BY_ENGINE = ("draft_kv_cache_dtype", "draft_tensor_parallel_size")
SETTLED = [
    (method, option)
    for method, options in OPTIONS.items()
    for option in options
    if option not in BY_ENGINE
]
OTHERS: dict[str, Any] = OTHER_VALUES | {
    "prompt_lookup_min": 4,
    "norm_before_fc": True,
    "norm_output": True,
}
# Values of the drafts above, where they are not the options' defaults.
OWN: dict[tuple[str, str], Any] = {
    ("eagle3", "eagle_aux_hidden_state_layer_ids"): (0, 1, 2),
    ("eagle3", "norm_before_residual"): False,
    ("eagle3", "norm_before_fc"): False,
    ("eagle3", "fc_norm"): False,
    ("eagle3", "norm_output"): False,
    ("mtp", "mtp_zero_first_embedding"): True,
    ("ngram", "prompt_lookup_max"): 3,
    ("ngram", "prompt_lookup_min"): 1,
}


def test_every_option_is_the_drafts_or_the_engines() -> None:
    """A new option that is neither would have no effect beside a loaded draft."""
    settled = {*HELD_BY_DRAFT, "draft_quantize"}
    assert settled.isdisjoint(BY_ENGINE)
    assert settled | {*BY_ENGINE} == {name for names in OPTIONS.values() for name in names}


@pytest.mark.parametrize(("method", "option"), SETTLED)
def test_what_loading_settles_is_refused_beside_a_loaded_draft(method: str, option: str) -> None:
    default, value = getattr(SpeculativeConfig(), option), OTHERS[option]
    own = OWN.get((method, option))
    other = "for a draft that is loaded already" if own is None else f"or the draft's own {own!r}"
    with pytest.raises(ConfigError) as error:
        engine(LOADED[method](), {option: value})
    sentence = f"{option}: expected {default!r} (unset) {other}, got {value!r}"
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("make", "spec"),
    [
        (lambda: tiny_model("eagle3", window=7), {"draft_sliding_window": 7, "fc_norm": False}),
        (LOADED["mtp"], {"mtp_zero_first_embedding": True}),
        (LOADED["eagle3"], {"eagle_aux_hidden_state_layer_ids": []}),
        (LOADED["ngram"], {"prompt_lookup_max": 3, "prompt_lookup_min": 1}),
        (LOADED["eagle"], {"fallback_method": "ngram", "prompt_lookup_max": 3}),
    ],
)
def test_what_a_loaded_draft_has_may_be_repeated(
    make: Callable[[], Model], spec: dict[str, Any]
) -> None:
    """The options of a fallback are the engine's."""
    model = make()
    assert engine(model, spec).draft_config == model.draft
