"""Qwen2: the Llama decoder with a bias on q, k and v.

Its sliding window is not implemented: a config that uses it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.config import refuse_unless
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
    return decoder_config(config, qkv_bias=True)
