"""Qwen3: the Llama decoder with an RMS norm on each head of q and k.

A config that uses a sliding window is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.config import read_bool, read_int, refuse_unless
from jaxspec.models.llama import (
    LlamaConfig,
    decoder_config,
    forward,
    ignored_tensor,
    logits,
    param_specs,
)

__all__ = ["config_from_hf", "forward", "ignored_tensor", "logits", "param_specs"]


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """Read a checkpoint's config.json."""
    refuse_unless(config, "use_sliding_window", False)
    bias = read_bool(config, "attention_bias", False)
    return decoder_config(
        {**config, "head_dim": read_int(config, "head_dim", 128)},
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
    )
