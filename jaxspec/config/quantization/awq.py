"""AWQ: 4 bits with a zero for each group, in AutoAWQ's "gemm" layout."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from jaxspec.config.quantization.forms import (
    GROUPS,
    KEPT,
    Int4Form,
    Quantization,
    expect,
    left_plain,
    read_names,
    scale_dtype_of,
)


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the quantisation: all linear modules but the head and those whose name has a part."""
    lower = {
        key: value.lower() if isinstance(value, str) else value for key, value in settings.items()
    }
    expect(lower, "version" if "version" in lower else "format", "gemm", None)
    bits = "bits" if "bits" in settings else "w_bit"
    expect(settings, bits, 4)
    group = expect(settings, "group_size" if "group_size" in settings else "q_group_size", *GROUPS)
    form = Int4Form(
        group,
        has_zeros=expect(settings, "zero_point", True, False, None) is not False,
        source="awq",
        scale_dtype=scale_dtype_of(settings),
    )
    names = read_names(settings, "modules_to_not_convert")
    kept = left_plain(names, lambda part: rf".*{re.escape(part)}")
    return Quantization((*kept, *KEPT, (".*", form)))
