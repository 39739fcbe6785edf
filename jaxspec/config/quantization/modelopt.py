"""NVIDIA's ModelOpt: FP8 with one scale for each weight and each input, in the checkpoint."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from jaxspec.config.quantization.forms import (
    Fp8Form,
    Quantization,
    checked_pattern,
    expect,
    read_names,
)

ALGORITHMS: dict[str, Fp8Form] = {
    "FP8": Fp8Form("tensor", "static", "modelopt"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Form("channel", "token", "modelopt"),
}


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the quantisation: all linear modules but those that a wildcard names."""
    algorithm = expect(settings, "quant_algo", *ALGORITHMS)
    excluded = [
        (checked_pattern(fnmatch.translate(name), "exclude_modules"), None)
        for name in read_names(settings, "exclude_modules", "ignore")
    ]
    has_scales = any(settings.get(key) for key in ("kv_cache_quant_algo", "kv_cache_scheme"))
    return Quantization((*excluded, (".*", ALGORITHMS[algorithm])), kv_scales=has_scales)
