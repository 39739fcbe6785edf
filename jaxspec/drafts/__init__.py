"""What drafts: one file per method.

autoregressive   the draft step, and the loop that drives it K times
eagle            EAGLE-1
eagle3           EAGLE-3
eagle_llama4     EAGLE for Llama 4
mtp              multi-token prediction layers of a checkpoint
mtp_deepseek_v4  the MTP layer of DeepSeek-V4
layer            parts that drafts share
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from jaxspec.drafts import eagle, eagle3, eagle_llama4, mtp, mtp_deepseek_v4
from jaxspec.drafts.eagle import EagleConfig
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.drafts.layer import DraftOutput
from jaxspec.drafts.mtp import MtpConfig

FAMILIES: dict[str, ModuleType] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "eagle_llama4": eagle_llama4,
    "mtp": mtp,
    "mtp_deepseek_v4": mtp_deepseek_v4,
}
DraftConfig = Any  # EagleConfig | Eagle3Config, or any frozen config with the same fields that a new method brings

__all__ = [
    "FAMILIES",
    "DraftConfig",
    "DraftOutput",
    "Eagle3Config",
    "EagleConfig",
    "MtpConfig",
    "family",
    "family_of_checkpoint",
    "hidden_width",
]


def family(cfg: DraftConfig) -> ModuleType:
    """The functions of a config's method."""
    return FAMILIES[cfg.method]


def family_of_checkpoint(method: str, config: Mapping[str, Any]) -> ModuleType:
    """The functions of a checkpoint with this config.json: a family whose layers are its own has drafts made of them."""
    model_type = config.get("model_type")
    if method == "eagle" and model_type in eagle_llama4.MODEL_TYPES:
        return eagle_llama4
    return (
        mtp_deepseek_v4
        if method == "mtp" and model_type == mtp_deepseek_v4.MODEL_TYPE
        else FAMILIES[method]
    )


def hidden_width(cfg: DraftConfig, target: Any) -> int:
    """Of what a draft keeps of a row of the target: its last hidden state, or the residual, of one stream or several, at the aux layers."""
    return (
        getattr(target, "streams_size", target.hidden_size) * len(cfg.aux_layers)
        if cfg.aux_layers
        else target.hidden_size
    )
