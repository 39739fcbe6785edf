"""MiMo: Qwen2's decoder, with modules of multi-token prediction, which drafts/mtp.py reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.config import read_bool, refuse_unless
from jaxspec.models import decoder
from jaxspec.models.llama import (
    LlamaConfig,
    decoder_config,
    decoder_layer,
    forward,
    layer_specs,
    logits,
    param_specs,
)

__all__ = [
    "config_from_hf",
    "decoder_layer",
    "forward",
    "ignored_tensor",
    "layer_specs",
    "logits",
    "param_specs",
]


def config_from_hf(config: Mapping[str, Any]) -> LlamaConfig:
    """Read a checkpoint's config.json."""
    refuse_unless(config, "use_sliding_window", False)
    return decoder_config(config, qkv_bias=read_bool(config, "attention_bias", True))


def ignored_tensor(cfg: LlamaConfig, name: str) -> bool:
    """Return whether the decoder does not need this checkpoint tensor.

    Beside those of any decoder, it needs no modules of multi-token prediction.
    """
    return decoder.ignored_tensor(cfg, name) or name.startswith("model.mtp_layers.")
