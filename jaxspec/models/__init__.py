"""Target models: one file per family, named by the Hugging Face model_type.

family         TargetFamily: the functions of a family
decoder        parts that families share
llama          Llama 2 and 3; the parts that qwen2, qwen3, qwen3_moe and mimo reuse
qwen2          Qwen2
qwen3          Qwen3
qwen3_moe      Qwen3-MoE: Qwen3 with experts
mimo           MiMo
gpt_oss        gpt-oss: attention sinks, windows, MXFP4 experts
llama4_text    Llama 4's text model
deepseek_v3    DeepSeek-V3: latent attention and experts
glm4_moe_lite  GLM-4.7-Flash
deepseek_v4    DeepSeek-V4

A family is a module with TargetFamily's functions. Its config names it by `model_type`; `family`
finds the module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxspec.config import ConfigError, TargetConfig
from jaxspec.config.reading import values_as_sentences
from jaxspec.models import (
    deepseek_v3,
    deepseek_v4,
    glm4_moe_lite,
    gpt_oss,
    llama,
    llama4_text,
    mimo,
    qwen2,
    qwen3,
    qwen3_moe,
)
from jaxspec.models.decoder import TargetOutput
from jaxspec.models.family import TargetFamily

FAMILIES: dict[str, TargetFamily] = {
    "deepseek_v3": deepseek_v3,
    "deepseek_v4": deepseek_v4,
    "glm4_moe_lite": glm4_moe_lite,
    "gpt_oss": gpt_oss,
    "llama": llama,
    "llama4_text": llama4_text,
    "mimo": mimo,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
}
__all__ = [
    "FAMILIES",
    "TargetConfig",
    "TargetFamily",
    "TargetOutput",
    "config_from_hf",
    "family",
]


def family(cfg: TargetConfig) -> TargetFamily:
    """Return the module of a config's family."""
    return FAMILIES[cfg.model_type]


def config_from_hf(config: Mapping[str, Any]) -> TargetConfig:
    """Read a checkpoint's config.json; ConfigError for an unsupported model_type."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ConfigError(f"model_type: expected one of {', '.join(FAMILIES)}, got {model_type!r}")
    with values_as_sentences():
        return FAMILIES[model_type].config_from_hf(config)
