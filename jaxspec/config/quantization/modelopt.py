"""NVIDIA's ModelOpt: FP8 with one scale for each weight and each input, in the checkpoint."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from jaxspec.config.quantization.forms import (
    Fp8Form,
    Quantization,
    check_fp8_scheme,
    checked_pattern,
    expect,
    left_plain,
    read_names,
)
from jaxspec.config.reading import read_object

ALGORITHMS: dict[str, Fp8Form] = {
    "FP8": Fp8Form("tensor", "static", "modelopt"),
    "FP8_PER_CHANNEL_PER_TOKEN": Fp8Form("channel", "token", "modelopt"),
}


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the quantisation: all linear modules but those that a wildcard names.

    Without a quant_algo, keys and values alone are quantised.
    """
    algorithm_of_kv = expect(settings, "kv_cache_quant_algo", "FP8", None)
    scheme = read_object(settings, "kv_cache_scheme")
    if scheme:
        check_fp8_scheme(scheme, False)  # as in vLLM, which takes no other scheme as fp8
    has_scales = algorithm_of_kv is not None or bool(scheme)
    plain = (None,) if has_scales else ()
    algorithm = expect(settings, "quant_algo", *ALGORITHMS, *plain)
    form = None if algorithm is None else ALGORITHMS[algorithm]
    excluded = left_plain(
        read_names(settings, "exclude_modules", "ignore"),
        lambda name: checked_pattern(fnmatch.translate(name), "exclude_modules"),
    )
    kv_scales = ("k_proj.k_scale", "v_proj.v_scale") if has_scales else ()
    return Quantization((*excluded, (".*", form)), kv_scales, has_fp8_caches=has_scales)
