"""GLM-4.7-Flash (and -4.5-Air's lite line): DeepSeek-V3's decoder with other defaults.

Its config lists the dense layers one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.config import ConfigError, read_int
from jaxspec.models.deepseek_v3 import (
    DeepseekV3Config,
    decoder_layer,
    forward,
    ignored_tensor,
    layer_specs,
    logits,
    mla_moe_config,
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


def config_from_hf(config: Mapping[str, Any]) -> DeepseekV3Config:
    """Read a checkpoint's config.json."""
    num_layers = read_int(config, "num_hidden_layers")
    kinds = list(
        config.get("mlp_layer_types")
        or ["dense"] * read_int(config, "first_k_dense_replace", 1, least=0)
    )
    kinds += ["sparse"] * (num_layers - len(kinds))
    dense = kinds.count("dense")
    if kinds != ["dense"] * dense + ["sparse"] * (num_layers - dense):
        raise ConfigError(
            f"mlp_layer_types: expected {num_layers}, 'dense' ones before 'sparse' ones, "
            f"got {kinds}"
        )
    return mla_moe_config(
        {"rms_norm_eps": 1e-5, "routed_scaling_factor": 1.8, **config}, num_dense_layers=dense
    )
