"""Options of a draft that its method does not read are refused, unless they change nothing."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec.config import (
    AttentionConfig,
    ConfigError,
    SpeculativeConfig,
    check_options,
    check_verify_tokens,
    speculative,
)
from jaxspec.config.draft_methods import ADVICE, OPTIONS, READERS
from jaxspec.config.speculative import DEFAULT_K
from jaxspec.drafts import FAMILIES, METHODS, MODEL_FREE, method_name
from jaxspec.drafts.ngram import NgramConfig
from jaxspec.loading.pair import with_draft_quantize, with_k

OTHER_VALUES: dict[str, Any] = {
    "draft_quantize": "fp8",
    "draft_sliding_window": 128,
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


@pytest.mark.parametrize("key", OTHER_VALUES)
def test_every_option_of_a_method_is_checked(key: str) -> None:
    """A new option without a check would take any value."""
    for wrong in ({}, "no such value"):
        with pytest.raises(ConfigError, match=key):
            SpeculativeConfig(**{key: wrong})


@pytest.mark.parametrize("method", METHODS)
def test_values_that_change_nothing_are_accepted(method: str) -> None:
    defaults = {f.name: f.default for f in fields(SpeculativeConfig)}
    check_options(SpeculativeConfig(**defaults), method)  # type: ignore[arg-type]
    check_options(SpeculativeConfig(draft_tensor_parallel_size=1), method)


def test_the_sentence_names_the_methods() -> None:
    with pytest.raises(ConfigError) as error:
        check_options(SpeculativeConfig(draft_quantize="int4"), "dspark")
    assert str(error.value) == (
        "draft_quantize: expected it only with method 'eagle' or 'eagle3' or 'draft_model', "
        "got it with 'dspark'"
    )


def test_advice_stands_with_its_method_and_ends_the_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    advice = {"dspark": {"draft_quantize": "convert the head"}}
    monkeypatch.setattr(speculative, "ADVICE", advice)
    with pytest.raises(ConfigError, match="got it with 'dspark'; convert the head$"):
        check_options(SpeculativeConfig(draft_quantize="int4"), "dspark")
    with pytest.raises(ConfigError, match="got it with 'dflash'$"):
        check_options(SpeculativeConfig(draft_quantize="int4"), "dflash")


def test_advice_is_for_options_that_the_method_does_not_read() -> None:
    for method, advice in ADVICE.items():
        assert advice and set(advice) <= set(OTHER_VALUES) - set(OPTIONS[method])


def test_the_sentence_names_drafts_where_a_method_alone_does_not_tell() -> None:
    assert set(READERS) <= set(OTHER_VALUES)
    with pytest.raises(ConfigError) as error:
        check_options(SpeculativeConfig(draft_confidence_threshold=0.5), "eagle")
    assert str(error.value) == (
        "draft_confidence_threshold: expected it only with a draft that has a confidence head, "
        "got it with 'eagle'"
    )


def test_an_mtp_module_follows_quantize() -> None:
    """And the method of the target's checkpoint may be named, as for other drafts."""
    target: Any = SimpleNamespace(model_type="mimo", num_layers=1)
    tensors = {"model.mtp_layers.0.input_proj.weight": (8, 16)}
    plain = {"model_type": "mimo"}
    given = SpeculativeConfig(draft_quantize="fp8")
    with pytest.raises(ConfigError) as error:
        FAMILIES["mtp"].config_from_checkpoint(plain, tensors, target, given)
    assert str(error.value) == (
        "draft_quantize: expected it only with method 'eagle' or 'eagle3' or 'draft_model', "
        "got it with 'mtp'; set quantize, which its module follows"
    )
    coded = plain | {"quantization_config": {"quant_method": "fp8"}}
    settled = with_draft_quantize(given, coded)
    assert FAMILIES["mtp"].config_from_checkpoint(coded, tensors, target, settled).method == "mtp"


def test_no_ids_of_layers_are_the_heads_own() -> None:
    assert SpeculativeConfig(eagle_aux_hidden_state_layer_ids=[]) == SpeculativeConfig()  # type: ignore[arg-type]


def test_a_fallback_is_a_method_without_a_model_and_stands_beside_a_head() -> None:
    schedule = ((1, 2, 1),)
    for values, message in (
        (
            dict(fallback_method="eagle"),
            "fallback_method: expected 'ngram' or 'suffix', or none, got 'eagle'",
        ),
        (
            dict(fallback_method="ngram", num_speculative_tokens_per_batch_size=schedule),
            "fallback_method: expected it without num_speculative_tokens_per_batch_size, "
            "got ((1, 2, 1),) beside it",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            SpeculativeConfig(**values)  # type: ignore[arg-type]
        assert str(error.value) == message


@pytest.mark.parametrize("method", ["draft_model", "ngram", "suffix"])
def test_a_fallback_is_refused_where_it_cannot_stand_in(method: str) -> None:
    """As the caller names the method, and as the files do."""
    sentence = f"fallback_method: expected none with method {method!r}, got 'suffix'"
    with pytest.raises(ConfigError) as error:
        SpeculativeConfig(method=method, fallback_method="suffix")
    assert str(error.value) == sentence
    with pytest.raises(ConfigError) as error:
        check_options(SpeculativeConfig(fallback_method="suffix"), method)
    assert str(error.value) == sentence


def test_a_head_with_a_fallback_takes_the_options_of_that_method_alone() -> None:
    check_options(SpeculativeConfig(fallback_method="ngram", prompt_lookup_max=7), "eagle3")
    with pytest.raises(ConfigError) as error:
        check_options(SpeculativeConfig(fallback_method="suffix", prompt_lookup_max=7), "eagle3")
    assert str(error.value) == (
        "prompt_lookup_max: expected it only with method 'ngram', got it with 'eagle3'"
    )


def test_a_head_of_llama_4_has_no_window() -> None:
    given, target = SpeculativeConfig(draft_sliding_window=7), SimpleNamespace()
    with pytest.raises(ConfigError) as error:
        FAMILIES["eagle_llama4"].config_from_checkpoint({}, {}, target, given)  # type: ignore[arg-type]
    assert str(error.value) == (
        "draft_sliding_window: expected None with a head of Llama 4, whose layer has no window, "
        "got 7"
    )


@pytest.mark.parametrize("value", [0, -1, 4.5, True, "16"])
def test_a_window_is_a_number_of_tokens(value: Any) -> None:
    with pytest.raises(ConfigError, match="^draft_sliding_window: expected an integer of at least"):
        SpeculativeConfig(draft_sliding_window=value)


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
    """It is settled by the draft; prompt lookup proposes no number."""
    settings = SpeculativeConfig(method="ngram", max_num_verify_tokens=DEFAULT_K)
    draft = NgramConfig(8, lookup_max=2, lookup_min=1)
    with pytest.raises(
        ConfigError, match=f"expected an integer of at least {DEFAULT_K + 1} .*, got {DEFAULT_K}"
    ):
        with_k(settings, draft, {})


def test_every_method_that_drafts_has_a_name_and_its_options() -> None:
    """A family of FAMILIES may be a method's variant for some targets, as eagle_llama4."""
    families: list[Any] = [SimpleNamespace(method=name) for name in FAMILIES]
    assert {*map(method_name, families), *MODEL_FREE} == set(METHODS)
