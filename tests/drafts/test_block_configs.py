"""Configs of DFlash and DSpark heads: every key is read, or refused in one sentence."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.drafts import dflash, dspark
from jaxspec.drafts.dflash import DFlashConfig
from tests.parity.ours import TARGET

K = 3
FLAT: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "hidden_size": TARGET.hidden_size,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "block_size": 4,
    "mask_token_id": 7,
    "target_layer_ids": [1, 3],
}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 8}


def read(family: Any = dflash, K: int | None = K, **changes: Any) -> DFlashConfig:
    """Return the config of a head without tensors of its own, with these keys changed."""
    speculative = SpeculativeConfig(num_speculative_tokens=K)
    return family.config_from_checkpoint({**FLAT, **changes}, {}, TARGET, speculative)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None, None)),
        ({"sliding_window": 8, "use_sliding_window": False}, (None, None)),
        ({"sliding_window": None, "use_sliding_window": True}, (None, None)),
        (SLIDING, (8, 8)),
        (SLIDING | {"use_sliding_window": True}, (8, 8)),
    ],
)
def test_a_window_is_that_of_the_layer_types(changes: dict[str, Any], windows: Any) -> None:
    assert read(**changes).windows == windows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 8},
            "layer_types: expected the kind of each of 2 layers beside use_sliding_window, in the "
            "draft's config, got none",
        ),
        (
            SLIDING | {"use_sliding_window": False},
            "use_sliding_window: expected true beside layer_types with sliding_attention, in the "
            "draft's config, got false",
        ),
        *(
            (
                {"layer_types": kinds},
                "layer_types: expected full_attention or sliding_attention for each of 2 layers "
                f"of the draft, got {kinds!r}",
            )
            for kinds in (5, "ab", ["full_attention"], [["full_attention"]] * 2)
        ),
        *(
            (
                {"quantization_config": {"quant_method": method, **more}},
                "quantization_config: expected none, or quant_method 'fp8' with weight_block_size, "
                f"in a dflash head, got quant_method {method!r}",
            )
            for method, more in (("fp8", {}), ("awq", {"weight_block_size": [128, 128]}))
        ),
        (
            {"quantization_config": FP8, "model": {"quantization_config": FP8 | {"fmt": "e5m2"}}},
            "quantization_config: expected none, or quant_method 'fp8' with weight_block_size, in "
            "a dflash head, got quant_method 'fp8'",
        ),
    ],
)
def test_what_cannot_be_read_is_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        read(**changes)
    assert str(error.value) == message


@pytest.mark.parametrize("family", [dflash, dspark])
def test_weights_in_blocks_of_float8_are_read_as_plain_ones(family: Any) -> None:
    plain = read(family, sample_from_anchor=True)
    assert read(family, sample_from_anchor=True, quantization_config=FP8) == plain
    nested = {"quantization_config": dict(FP8)}  # the same once more, as some writers have it
    assert read(family, sample_from_anchor=True, quantization_config=FP8, model=nested) == plain


@pytest.mark.parametrize("family", [dflash, dspark])
@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("nested", [True, False])
def test_sample_from_anchor_is_read_in_each_place_without_a_warning(
    family: Any, value: bool, nested: bool, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"sample_from_anchor": value}
    changes = {"dflash_config": keys} if nested else keys
    with caplog.at_level(logging.WARNING):
        assert read(family, architectures=["Other"], **changes).sample_from_anchor is value
    assert not caplog.records


@pytest.mark.parametrize(
    ("changes", "warnings"),
    [
        ({"architectures": ["qwen3dsparkmodel"]}, 0),
        ({"architectures": ["qwen3dsparkmodel"], "dflash_config": {"markov_rank": None}}, 0),
        ({"architectures": ["Other"]}, 1),
        ({"rms_norm_eps": None, "rope_theta": None}, 2),
    ],
)
def test_what_is_guessed_is_said_without_a_tool_for_other_heads(
    changes: dict[str, Any], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """`jaxspec doctor` reads EAGLE heads."""
    with caplog.at_level(logging.WARNING):
        assert read(dspark, **changes).sample_from_anchor is True
    assert len(caplog.messages) == warnings
    assert all("not in the head's config, taken as" in text for text in caplog.messages)
    assert not any("doctor" in text for text in caplog.messages)


def test_a_block_drafts_all_its_rows_but_an_anchors_that_drafts_nothing() -> None:
    assert read(block_size=4).block_capacity == 3
    assert read(block_size=4, sample_from_anchor=True).block_capacity == 4
    assert read(K=None, block_size=2).block_capacity == 1  # no K is given that it has to hold
    with pytest.raises(ConfigError, match="block_size: expected at least 2 in a head whose first"):
        read(K=None, block_size=1)
