"""Drafts, one file per method.

A draft is a module with param_specs, target_hidden, fuse, forward, logits, canonical_name, ignored_tensor and
config_from_checkpoint.
Its config names it by `method`, which is how propose finds the functions (through `family`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from jaxspec.drafts import eagle, eagle3, mtp
from jaxspec.drafts.eagle import EagleConfig
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.drafts.layer import DraftOutput
from jaxspec.drafts.mtp import MtpConfig

FAMILIES: dict[str, ModuleType] = {"eagle": eagle, "eagle3": eagle3, "mtp": mtp}
DraftConfig = Any  # EagleConfig | Eagle3Config, or any frozen config with the same fields that a new method brings

__all__ = ["FAMILIES", "DraftConfig", "DraftOutput", "Eagle3Config", "EagleConfig", "MtpConfig", "family"]


def family(cfg: DraftConfig) -> ModuleType:
    """The functions of a config's method."""
    return FAMILIES[cfg.method]
