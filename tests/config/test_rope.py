"""Settings of rotary embedding are read back from what is written of them."""

from __future__ import annotations

import dataclasses

import pytest

from jaxspec.config.rope import RopeConfig

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
DEEPSEEK = {**YARN, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.8, "beta_fast": 16}
ROPES = {
    "default": RopeConfig(5e5),
    "llama3": RopeConfig(5e5, "llama3", 8.0, 2.0, 5.0, 16384),
    "gpt-oss": RopeConfig.from_hf({"rope_theta": 150000.0, "rope_scaling": YARN}),
    "yarn": RopeConfig(
        1e6,
        "yarn",
        4.0,
        original_max_position_embeddings=32768,
        beta_fast=24.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=1.3,
    ),
}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_settings_come_back(rope: RopeConfig) -> None:
    assert RopeConfig.from_hf({"rope_parameters": rope.to_hf()}) == rope


def test_the_factor_of_the_softmax_comes_back_up_to_rounding() -> None:
    rope = RopeConfig.from_hf({"rope_scaling": DEEPSEEK})
    assert rope.softmax_factor > 1.5 and rope.attention_factor != 1.0
    back = RopeConfig.from_hf({"rope_parameters": rope.to_hf()})
    assert back.softmax_factor == pytest.approx(rope.softmax_factor, rel=1e-12)
    assert dataclasses.replace(back, softmax_factor=rope.softmax_factor) == rope
