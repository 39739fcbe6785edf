"""quant_method "fp8": DeepSeek's and Qwen's blocks, and one scale a tensor with static inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.config.quantization.compressed_tensors import dynamic_scale_of_all_rows
from jaxspec.config.quantization.forms import (
    BLOCK,
    KEPT,
    Fp8Form,
    Quantization,
    block_sizes,
    checked_pattern,
    expect,
    left_plain,
    read_names,
)
from jaxspec.config.reading import ConfigError, shown

# The end of a part of a module's name, as transformers has it.
BOUNDARY = r"(?:(?<=\.)|(?=\.|\Z))"


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the quantisation: all linear modules but the head and those that the config names."""
    scheme = expect(settings, "activation_scheme", "dynamic", "static", None)
    expect(settings, "fmt", "e4m3", None)
    expect(settings, "scale_fmt", "float", None)
    if settings.get("modules_to_convert"):
        raise ConfigError(
            "quantization_config: expected no modules_to_convert, "
            f"got {shown(settings['modules_to_convert'])}"
        )
    block = settings.get("weight_block_size")
    if block is None:
        if scheme != "static":
            raise dynamic_scale_of_all_rows("")
        form = Fp8Form("tensor", "static", "fp8")
    else:
        if block_sizes(block) != (BLOCK, BLOCK):
            raise ConfigError(
                f"quantization_config: expected weight_block_size [{BLOCK}, {BLOCK}], "
                f"got {shown(block)}"
            )
        if scheme == "static":
            raise ConfigError(
                "quantization_config: expected activation_scheme 'dynamic' with blocks, "
                "got 'static'"
            )
        form = Fp8Form("block", "block", "fp8")
    keys = ("modules_to_not_convert", "ignored_layers")
    names = read_names(settings, *keys)
    ignored = left_plain(names, lambda name: _pattern(name, " or ".join(keys)))
    # AutoFP8 and Quark; others leave it out. vLLM does not read it: caches are in fp8 on request.
    kv_scheme = expect(settings, "kv_cache_scheme", "static", None)
    kv_scales = ("k_scale", "v_scale") if kv_scheme else ()
    return Quantization((*ignored, *KEPT, (".*", form)), kv_scales)


def _pattern(name: str, key: str) -> str:
    """Return the pattern of the modules that a name, or a regular expression, stands for."""
    checked_pattern(name, key)  # its message shows the name as it is
    return checked_pattern(rf"(?:{name}){BOUNDARY}|.*{re.escape(name)}\Z", key)
