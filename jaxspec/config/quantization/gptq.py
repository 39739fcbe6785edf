"""GPTQ: 4 bits, in the layouts of AutoGPTQ ("gptq") and GPTQModel ("gptq_v2")."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.config.quantization.forms import (
    GROUPS,
    KEPT,
    Form,
    Int4Form,
    Quantization,
    expect,
    scale_dtype_of,
)
from jaxspec.config.reading import ConfigError, shown


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the quantisation: all linear modules but the head, or those that the config lists."""
    expect(settings, "bits", 4)
    group = expect(settings, "group_size", *GROUPS)
    if settings.get("desc_act"):
        raise ConfigError(
            "quantization_config: expected desc_act false, whose groups are neighbours, got "
            f"{shown(settings['desc_act'])}"
        )
    if settings.get("dynamic"):
        raise ConfigError(
            f"quantization_config: expected one setting for all modules, got dynamic "
            f"{shown(settings['dynamic'])}"
        )
    expect(settings, "lm_head", False, None)
    layout = expect(settings, "checkpoint_format", "gptq", "gptq_v2", None)
    form = Int4Form(
        group,
        has_zeros=expect(settings, "sym", True, False, None) is False,
        source="gptq",
        zeros_from=0 if layout == "gptq_v2" else 1,
        scale_dtype=scale_dtype_of(settings),
    )
    return Quantization((*KEPT, *_targets(settings, form)))


def _targets(settings: Mapping[str, Any], form: Form) -> list[tuple[str, Form | None]]:
    """Return the rules of the modules that the config lists; all modules without a list."""
    key = "modules_in_block_to_quantize"
    listed = settings.get(key)
    if listed is None:
        return [(".*", form)]
    each = listed if isinstance(listed, list) else [None]
    flat = [name for part in each for name in (part if isinstance(part, list) else [part])]
    names = [name for name in flat if isinstance(name, str)]
    if len(names) < len(flat):
        raise ConfigError(
            f"quantization_config.{key}: expected lists of names, got {shown(listed)}"
        )
    return [(rf".*\.{re.escape(name)}\Z", form) for name in names]
