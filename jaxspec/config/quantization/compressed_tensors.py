"""compressed-tensors (llm-compressor): groups of modules with a scheme each."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from jaxspec.config.quantization.forms import (
    BLOCK,
    GROUPS,
    Form,
    Fp8Form,
    Int4Form,
    Quantization,
    block_sizes,
    check_fp8_scheme,
    checked_pattern,
    exactly,
    expect,
    left_plain,
    read_names,
    scale_dtype_of,
)
from jaxspec.config.reading import ConfigError, read_object, shown

FORMATS = ("float-quantized", "pack-quantized", "naive-quantized")
REGEX = "re:"
ACTIVATIONS = ("input_activations", "output_activations")


def read(settings: Mapping[str, Any]) -> Quantization:
    """Return the modules that each group of the config targets, but for those that it ignores."""
    scheme = read_object(settings, "kv_cache_scheme")
    groups = settings.get("config_groups")
    if groups is None and scheme:  # keys and values alone are quantised
        groups = {}
    if not isinstance(groups, Mapping) or not (groups or scheme):
        raise ConfigError(
            f"quantization_config: expected config_groups as an object of groups, "
            f"got {shown(groups)}"
        )
    expect(settings, "quantization_status", "compressed", "frozen", None)
    for key in ("sparsity_config", "transform_config"):
        if settings.get(key) and not _is_dense(settings, key):
            raise ConfigError(f"quantization_config: expected no {key}, got {shown(settings[key])}")
    ignored = left_plain(read_names(settings, "ignore"), lambda name: _pattern(name, "ignore"))
    # As compressed-tensors writes: of groups with the same target, the last counts.
    by_class: dict[str, Form | None] = {}
    named: dict[str, Form | None] = {}
    matched: dict[str, Form | None] = {}
    for name, group in groups.items():
        if not isinstance(group, Mapping):
            raise ConfigError(f"quantization_config.{name}: expected an object, got {shown(group)}")
        form = None if scheme and _is_empty(group) else _form(group, settings, f".{name}")
        for target in read_names(group, "targets"):
            if target == "Linear":
                by_class[".*"] = form
            else:  # a name comes before a regular expression, and that before a class
                kind = matched if target.startswith(REGEX) else named
                kind[_pattern(target, f"{name}.targets")] = form
    per_head = False
    if scheme:
        where = ".kv_cache_scheme"
        check_fp8_scheme(scheme, False, None)
        per_head = expect(scheme, "strategy", "tensor", "attn_head", where=where) == "attn_head"
        expect(scheme, "symmetric", True, None, where=where)
    kv_scales = ("k_scale", "v_scale") if scheme else ()
    # Regular expressions count in the order of their letters, not of their groups.
    targets = (*named.items(), *sorted(matched.items(), key=itemgetter(0)), *by_class.items())
    return Quantization((*ignored, *targets), kv_scales, per_head, has_fp8_caches=bool(scheme))


def _is_dense(settings: Mapping[str, Any], key: str) -> bool:
    """Return whether a sparsity_config counts zeros alone, of weights that are stored whole."""
    return key == "sparsity_config" and read_object(settings, key).get("format") == "dense"


def _is_empty(group: Mapping[str, Any]) -> bool:
    """Return whether a group quantises nothing, as beside a kv_cache_scheme alone."""
    return not any(group.get(part) for part in ("weights", *ACTIVATIONS))


def _pattern(target: str, key: str) -> str:
    if target.startswith(REGEX):
        return checked_pattern(target.removeprefix(REGEX), key)
    return exactly(target)


def _form(group: Mapping[str, Any], settings: Mapping[str, Any], where: str) -> Form:
    """Return the form of a group's modules."""
    form = group.get("format") or settings.get("format")
    if form not in FORMATS:
        raise ConfigError(
            f"quantization_config{where}: expected format {' or '.join(FORMATS)}, got {shown(form)}"
        )
    weights = read_object(group, "weights")
    if not weights:
        raise ConfigError(f"quantization_config{where}: expected weights, got none")
    if group.get("output_activations"):
        raise ConfigError(
            f"quantization_config{where}: expected no output_activations, "
            f"got {shown(group['output_activations'])}"
        )
    inputs = read_object(group, "input_activations")
    expect(weights, "dynamic", False, None, where=f"{where}.weights")
    bits = expect(weights, "num_bits", 4, 8, where=f"{where}.weights")
    if bits == 4:
        return _int4(weights, inputs, settings, where)
    return _fp8(weights, inputs, where)


def _fp8(weights: Mapping[str, Any], inputs: Mapping[str, Any], where: str) -> Fp8Form:
    own, of_inputs = f"{where}.weights", f"{where}.input_activations"
    expect(weights, "type", "float", where=own)
    expect(weights, "symmetric", True, None, where=own)
    scales = expect(weights, "strategy", "tensor", "channel", "block", where=own)
    if not inputs:
        raise ConfigError(
            f"quantization_config{where}: expected input_activations beside float weights of 8 "
            "bits, got none"
        )
    expect(inputs, "type", "float", where=of_inputs)
    expect(inputs, "num_bits", 8, where=of_inputs)
    expect(inputs, "symmetric", True, None, where=of_inputs)
    dynamic = expect(inputs, "dynamic", True, False, None, where=of_inputs)
    if scales == "block":
        structure = weights.get("block_structure")
        if block_sizes(structure) != (BLOCK, BLOCK) and structure != f"{BLOCK}x{BLOCK}":
            raise ConfigError(
                f"quantization_config{own}: expected block_structure [{BLOCK}, {BLOCK}], "
                f"got {shown(structure)}"
            )
        expect(inputs, "dynamic", True, where=of_inputs)
        expect(inputs, "strategy", "group", where=of_inputs)
        expect(inputs, "group_size", BLOCK, where=of_inputs)
        return Fp8Form("block", "block", "compressed-tensors")
    if dynamic:
        if inputs.get("strategy") == "tensor":
            raise dynamic_scale_of_all_rows(of_inputs)
        expect(inputs, "strategy", "token", where=of_inputs)
        return Fp8Form(scales, "token", "compressed-tensors")
    expect(inputs, "strategy", "tensor", where=of_inputs)
    return Fp8Form(scales, "static", "compressed-tensors")


def dynamic_scale_of_all_rows(where: str) -> ConfigError:
    """Return the error for activations whose scale follows from all rows of a batch."""
    return ConfigError(
        f"quantization_config{where}: expected a scale for each token, for {BLOCK} activations of "
        "one, or in the checkpoint, got one dynamic scale for all tokens, with which a request's "
        "text would depend on its neighbours"
    )


def _int4(
    weights: Mapping[str, Any], inputs: Mapping[str, Any], settings: Mapping[str, Any], where: str
) -> Int4Form:
    own = f"{where}.weights"
    expect(weights, "type", "int", where=own)
    expect(weights, "strategy", "group", where=own)
    group = expect(weights, "group_size", *GROUPS, where=own)
    symmetric = expect(weights, "symmetric", True, False, None, where=own)
    expect(weights, "actorder", None, False, "weight", "static", where=own)
    if inputs:
        raise ConfigError(
            f"quantization_config{where}: expected no input_activations beside int weights of 4 "
            f"bits, got {shown(inputs)}"
        )
    return Int4Form(
        group,
        has_zeros=symmetric is False,
        source="compressed-tensors",
        scale_dtype=scale_dtype_of(settings),
    )
