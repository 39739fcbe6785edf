"""Options of a draft that its method does not read are refused, unless they change nothing."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from jaxspec.config import ConfigError, SpeculativeConfig, check_options
from jaxspec.config.speculative import OPTIONS
from jaxspec.drafts import METHODS

OTHER_VALUES: dict[str, Any] = {
    "draft_quantize": "fp8",
    "draft_tensor_parallel_size": 2,
    "draft_confidence_threshold": 0.5,
    "eagle_aux_hidden_state_layer_ids": (1, 2),
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": True,
    "norm_output": False,
    "mtp_zero_first_embedding": False,
    "prompt_lookup_max": 7,
    "prompt_lookup_min": 1,
    "suffix_decoding_max_tree_depth": 9,
    "suffix_decoding_max_spec_factor": 2.0,
    "suffix_decoding_min_token_prob": 0.2,
}


@pytest.mark.parametrize("method", METHODS)
def test_an_option_of_another_method_is_refused(method: str) -> None:
    for key, value in OTHER_VALUES.items():
        given = SpeculativeConfig(**{key: value})
        if key in OPTIONS[method]:
            check_options(given, method)
            continue
        with pytest.raises(ConfigError, match=f"^{key}: expected it only with .*, got it with '"):
            check_options(given, method)


def test_every_option_of_a_method_is_tried_above() -> None:
    assert {key for keys in OPTIONS.values() for key in keys} == set(OTHER_VALUES)
    assert set(OTHER_VALUES) <= {f.name for f in fields(SpeculativeConfig)}


@pytest.mark.parametrize("method", METHODS)
def test_values_that_change_nothing_are_accepted(method: str) -> None:
    defaults = {f.name: f.default for f in fields(SpeculativeConfig)}
    check_options(SpeculativeConfig(**defaults), method)  # type: ignore[arg-type]
    check_options(SpeculativeConfig(draft_tensor_parallel_size=1), method)


def test_the_sentence_names_the_methods() -> None:
    with pytest.raises(ConfigError) as error:
        check_options(SpeculativeConfig(draft_quantize="int4"), "dspark")
    assert str(error.value) == (
        "draft_quantize: expected it only with method 'eagle' or 'eagle3' or 'mtp' or "
        "'draft_model', got it with 'dspark'"
    )
