"""Options of a draft that its method does not read are refused, unless they change nothing."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from jaxspec.config import (
    AttentionConfig,
    ConfigError,
    SpeculativeConfig,
    check_options,
    check_verify_tokens,
)
from jaxspec.config.speculative import OPTIONS
from jaxspec.drafts import METHODS

OTHER_VALUES: dict[str, Any] = {
    "draft_quantize": "fp8",
    "draft_kv_cache_dtype": "bfloat16",
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


@pytest.mark.parametrize("value", [3, 0, -1, 4.5, True, "16"])
def test_a_verify_pass_holds_a_request_with_all_of_its_drafts(value: Any) -> None:
    SpeculativeConfig(num_speculative_tokens=3, max_num_verify_tokens=4)
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig(num_speculative_tokens=3, max_num_verify_tokens=value)
    assert str(error.value) == (
        "max_num_verify_tokens: expected an integer of at least 4 (num_speculative_tokens + 1) "
        f"or none, got {value!r}"
    )


def test_a_verify_pass_holds_a_token_of_each_request() -> None:
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    some = SpeculativeConfig(max_num_verify_tokens=16)
    check_verify_tokens(some, max_num_seqs=16, attention=attention)
    check_verify_tokens(SpeculativeConfig(), max_num_seqs=17, attention=attention)
    with pytest.raises(ConfigError) as error:
        check_verify_tokens(some, max_num_seqs=17, attention=attention)
    assert str(error.value) == (
        "max_num_verify_tokens: expected at least max_num_seqs 17, a token of each request, got 16"
    )


def test_a_verify_pass_holds_the_drafts_of_a_k_that_was_left_open() -> None:
    attention = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
    most = SpeculativeConfig().max_drafts
    with pytest.raises(ConfigError, match=f"expected at least {most + 1} .*, got {most}"):
        check_verify_tokens(
            SpeculativeConfig(max_num_verify_tokens=most), max_num_seqs=1, attention=attention
        )
