"""Quantised checkpoints: the quantization_config of each published format, read and checked.

The forms that plain weights get while they load are here too.

forms               Fp8Form, Int4Form: the numbers of a linear module; Quantization: which has which
compressed_tensors  llm-compressor's float-quantized and pack-quantized
fp8                 DeepSeek's and Qwen's blocks, and one static scale a tensor
modelopt            NVIDIA's FP8, in config.json or hf_quant_config.json
gptq                GPTQ's 4 bits
awq                 AWQ's 4 bits
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from jaxspec.config.quantization import awq, compressed_tensors, fp8, gptq, modelopt
from jaxspec.config.quantization.forms import (
    BLOCK,
    FROM_FLOATS,
    GROUPS,
    Config,
    Form,
    Fp8Form,
    Int4Form,
    OwnMethod,
    Quantization,
    Quantize,
    block_sizes,
    form_of_floats,
    quantization_of,
    scale_dtype_of,
    settled_quantize,
    while_loading,
)
from jaxspec.config.reading import ConfigError, read_bool, read_object, shown

__all__ = [
    "BLOCK",
    "FROM_FLOATS",
    "GROUPS",
    "Form",
    "Fp8Form",
    "Int4Form",
    "OwnMethod",
    "Quantization",
    "Quantize",
    "block_sizes",
    "form_of_floats",
    "form_while_loading",
    "is_made_plain",
    "quantization_of",
    "read_quantization",
    "scale_dtype_of",
    "settled_quantize",
    "with_form",
]

METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "compressed-tensors": compressed_tensors.read,
    "fp8": fp8.read,
    "modelopt": modelopt.read,
    "gptq": gptq.read,
    "awq": awq.read,
}


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return the quantisation of a checkpoint by its config.json, None for plain weights.

    Blocks of float8 with transformers' switch `dequantize` are plain once they are loaded
    (jaxspec.loading.fp8).

    ConfigError for a format, or a setting of one, that is not implemented.
    """
    settings = read_object(config, "quantization_config")
    if not settings:
        return None
    method = _method(settings)
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"quantization_config: expected quant_method to be one of {', '.join(METHODS)}, "
            f"got {shown(method)}"
        )
    if is_made_plain(config):
        return None
    dtype = config.get("dtype") or config.get("torch_dtype")
    return METHODS[method]({**settings, "dtype": dtype})


def is_made_plain(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json says that loading makes its blocks of float8 plain.

    ConfigError if it says so of another form.
    """
    settings = read_object(config, "quantization_config")
    if not read_bool(settings, "dequantize", False):
        return False
    method = _method(settings)
    if method != "fp8" or not settings.get("weight_block_size"):
        raise ConfigError(
            "quantization_config: expected dequantize with quant_method 'fp8' and "
            f"weight_block_size alone, got it with {shown(method)}"
        )
    return True


def form_while_loading(
    quantize: Quantize | OwnMethod | None, config: Mapping[str, Any], *, key: str = "quantize"
) -> Quantize | None:
    """Return the name of the form, a key of FROM_FLOATS, that plain weights get while they load.

    quantize: a form, or the checkpoint's own method, which needs none (None)
    config:   its config.json
    key:      the setting, for messages

    ConfigError for another method than the checkpoint's, and for a method with plain weights.
    """
    own = None if is_made_plain(config) else _method(read_object(config, "quantization_config"))
    if quantize is None or quantize == own:
        return None
    if own is not None:
        raise ConfigError(
            f"{key}: expected None or {own!r} for a checkpoint that is quantised already, "
            f"got {quantize!r}"
        )
    if quantize not in FROM_FLOATS:
        raise ConfigError(
            f"{key}: expected None or one of {', '.join(FROM_FLOATS)} for plain weights, "
            f"got {quantize!r}"
        )
    return quantize


def with_form(
    cfg: Config,
    quantize: Quantize | OwnMethod | None,
    config: Mapping[str, Any],
    *,
    key: str = "quantize",
) -> Config:
    """Return a model's config with the form that its plain weights get while they load.

    quantize, config, key: see form_while_loading

    ConfigError for what form_while_loading refuses, and for a family without quantised weights.
    """
    form = quantize and form_while_loading(quantize, config, key=key)
    if form is None:
        return cfg
    held: Any = cfg
    if not hasattr(held, "quantization"):
        name = getattr(held, "model_type", None) or held.method
        raise ConfigError(f"{key}: expected None for {name!r}, got {form!r}")
    return replace(held, quantization=while_loading(form, scale_dtype_of(config)))


def _method(settings: Mapping[str, Any]) -> object:
    """Return what a quantization_config names as its method, None where it names none."""
    method = settings.get("quant_method")
    return "modelopt" if method is None and "quant_algo" in settings else method
