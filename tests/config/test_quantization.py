"""quantization_config of each published format: what is read, and what is refused in a sentence."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from jaxspec import models
from jaxspec.config import ConfigError
from jaxspec.config.quantization import (
    FROM_FLOATS,
    Fp8Form,
    Int4Form,
    form_while_loading,
    forms,
    read_quantization,
    settled_quantize,
    with_form,
)
from jaxspec.config.quantization.forms import while_loading
from tests.support import quantized

Q_PROJ = "model.layers.3.self_attn.q_proj"
TOKEN = {
    "num_bits": 8,
    "type": "float",
    "strategy": "token",
    "symmetric": True,
    "dynamic": True,
}
CHANNEL = TOKEN | {"strategy": "channel", "dynamic": False}
DYNAMIC = quantized.compressed(CHANNEL, TOKEN, "float-quantized")
BLOCK = quantized.compressed(
    CHANNEL | {"strategy": "block", "block_structure": [128, 128]},
    TOKEN | {"strategy": "group", "group_size": 128},
    "float-quantized",
)
W4 = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 128,
    "symmetric": True,
    "dynamic": False,
    "actorder": None,
}
PACKED = quantized.compressed(W4, None, "pack-quantized")
STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
MODELOPT = {"quant_method": "modelopt", **quantized.MODELOPT["quantization"]}

FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "per channel": (DYNAMIC, Fp8Form("channel", "token", "compressed-tensors")),
    "blocks": (BLOCK, Fp8Form("block", "block", "compressed-tensors")),
    "static": (quantized.STATIC, Fp8Form("tensor", "static", "compressed-tensors")),
    "DeepSeek": (quantized.DEEPSEEK_FP8, Fp8Form("block", "block", "fp8")),
    "static fp8": (STATIC_FP8, Fp8Form("tensor", "static", "fp8")),
    "ModelOpt": (MODELOPT, Fp8Form("tensor", "static", "modelopt")),
    "packed": (PACKED, Int4Form(128, False, "compressed-tensors", scale_dtype="bfloat16")),
    "GPTQ": (
        quantized.GPTQ | {"sym": False},
        Int4Form(128, True, "gptq", zeros_from=1, scale_dtype="bfloat16"),
    ),
    "GPTQ symmetric": (
        quantized.GPTQ | {"sym": True, "checkpoint_format": "gptq_v2"},
        Int4Form(128, False, "gptq", scale_dtype="bfloat16"),
    ),
    "AWQ": (quantized.AWQ, Int4Form(128, True, "awq", scale_dtype="bfloat16")),
    "AWQ in capitals": (
        quantized.AWQ | {"version": "GEMM"},
        Int4Form(128, True, "awq", scale_dtype="bfloat16"),
    ),
}


def read(settings: dict[str, Any]) -> Any:
    return read_quantization({"torch_dtype": "bfloat16", "quantization_config": settings})


@pytest.mark.parametrize("name", FORMS)
def test_each_published_form_is_read_and_the_head_is_left(name: str) -> None:
    settings, form = FORMS[name]
    found = read(settings)
    assert found.form_of(Q_PROJ) == form
    assert found.form_of("lm_head") is None
    assert found.made_form is None
    assert hash(found) == hash(read(settings))  # part of a static config


@pytest.mark.parametrize("name", FROM_FLOATS)
def test_heads_and_routers_stay_plain_while_loading(name: Any) -> None:
    """So does the projection before a module of multi-token prediction, but not its layer."""
    found = while_loading(name, "float16")
    for kept in ("lm_head", "model.layers.1.mlp.gate", "model.mtp_layers.0.input_proj"):
        assert found.form_of(kept) is None
    form = found.form_of("model.mtp_layers.0.mlp.gate_proj")
    assert form is not None and found.made_form == name
    assert name != "int4" or form.scale_dtype == "float16"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "config", "form"),
    [
        ("fp8", {}, "fp8"),
        ("fp8", {"quant_method": "fp8"}, None),
        ("gptq_marlin", {"quant_method": "gptq"}, None),
        ("modelopt", {"quant_algo": "FP8"}, None),  # as hf_quant_config.json has it
        ("mxfp4", {"quant_method": "mxfp4"}, None),
        (None, {"quant_method": "awq"}, None),
    ],
)
def test_a_checkpoints_own_method_quantises_nothing(
    given: str | None, config: dict[str, Any], form: str | None
) -> None:
    settled = settled_quantize("quantize", given)
    assert form_while_loading(settled, {"quantization_config": config}) == form


@pytest.mark.parametrize("form", FROM_FLOATS)
def test_a_form_is_laid_over_plain_weights_alone(form: Any) -> None:
    plain = models.config_from_hf(quantized.NARROW)
    found: Any = with_form(plain, form, quantized.NARROW)
    assert found.quantization.made_form == form
    coded = quantized.NARROW | {"quantization_config": quantized.AWQ}
    cfg = models.config_from_hf(coded)
    assert with_form(cfg, None, coded) == with_form(cfg, "awq", coded) == cfg
    with pytest.raises(ConfigError) as error:
        with_form(cfg, form, coded, key="draft_quantize")
    assert str(error.value) == (
        "draft_quantize: expected None or 'awq' for a checkpoint that is quantised already, "
        f"got {form!r}"
    )
    with pytest.raises(ConfigError, match="one of fp8, fp8-block, int4 for plain weights, got"):
        with_form(plain, "awq", quantized.NARROW)


def test_no_quantization_config_is_plain() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


def test_blocks_that_loading_makes_plain_are_no_quantisation() -> None:
    blocks = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    assert read(blocks | {"dequantize": True}) is None
    assert read(blocks | {"dequantize": False}) == read(blocks) is not None
    static = {"quant_method": "fp8", "activation_scheme": "static", "dequantize": True}
    for settings in (static, DYNAMIC | {"dequantize": True}):
        with pytest.raises(ConfigError, match="expected dequantize with quant_method 'fp8' and"):
            read(settings)
    with pytest.raises(ConfigError, match="expected dequantize to be true or false"):
        read(blocks | {"dequantize": "yes"})


def test_names_come_before_patterns_and_these_before_classes() -> None:
    settings = copy.deepcopy(DYNAMIC)
    one = {"weights": W4, "input_activations": None, "format": "pack-quantized"}
    groups = settings["config_groups"]
    groups["group_1"] = one | {"targets": [r"re:.*layers\.3\..*"]}
    groups["group_2"] = one | {"targets": [Q_PROJ], "weights": W4 | {"group_size": 64}}
    settings["ignore"] += [r"re:.*\.gate$", "model.layers.3.mlp.up_proj"]
    found = read(settings)
    assert found.form_of(Q_PROJ).group_size == 64
    assert found.form_of("model.layers.3.mlp.down_proj").group_size == 128
    assert found.form_of("model.layers.2.mlp.down_proj").scales == "channel"
    assert found.form_of("model.layers.3.mlp.up_proj") is None
    assert found.form_of("model.layers.2.mlp.gate") is None
    assert found.form_of("model.layers.2.mlp.gate_proj") is not None


@pytest.mark.parametrize("swapped", [False, True])
def test_of_several_patterns_the_first_by_its_letters_counts(swapped: bool) -> None:
    """compressed-tensors sorts them: llm-compressor has written the form that it chose so."""
    settings = copy.deepcopy(DYNAMIC)
    fp8 = settings["config_groups"]["group_0"] | {"targets": ["re:.*mlp.*"]}
    four = {"weights": W4, "format": "pack-quantized", "targets": [r"re:.*down_proj"]}
    pair = (four, fp8) if swapped else (fp8, four)
    settings["config_groups"] = {"group_0": pair[0], "group_1": pair[1]}
    found = read(settings)
    assert isinstance(found.form_of("model.layers.3.mlp.down_proj"), Int4Form)
    assert isinstance(found.form_of("model.layers.3.mlp.up_proj"), Fp8Form)


@pytest.mark.oracle("compressed_tensors")
@pytest.mark.parametrize("targets", [["re:.*mlp.*", "re:.*down_proj"], ["Linear", Q_PROJ, "re:.*"]])
def test_the_target_that_counts_is_that_of_compressed_tensors(targets: list[str]) -> None:
    import torch
    from compressed_tensors.utils import match_targets

    sizes = (32, 64, 128)
    settings = copy.deepcopy(PACKED)
    settings["config_groups"] = {
        target: {"targets": [target], "weights": W4 | {"group_size": size}}
        for target, size in zip(targets, sizes, strict=False)
    }
    for module in (Q_PROJ, "model.layers.3.mlp.down_proj", "model.layers.3.mlp.up_proj"):
        first, *_ = [*match_targets(module, torch.nn.Linear(1, 1), targets), None]
        form = read(settings).form_of(module)
        assert (form and form.group_size) == (first and sizes[targets.index(first)])


@pytest.mark.parametrize(
    ("settings", "key", "names"),
    [
        (quantized.DEEPSEEK_FP8, "modules_to_not_convert", ["model.layers.3.mlp.gate", "fc"]),
        (quantized.DEEPSEEK_FP8, "ignored_layers", [r"model.layers.\d.mlp.gate", "fc"]),
        (MODELOPT, "exclude_modules", ["lm_head", "*.mlp.gate", "fc"]),
        (quantized.AWQ, "modules_to_not_convert", ["mlp.gate.", "fc"]),
    ],
)
def test_ignored_modules_are_named_as_each_format_does(
    settings: dict[str, Any], key: str, names: list[str]
) -> None:
    found = read(settings | {key: names})
    assert found.form_of("fc") is None
    assert found.form_of("model.layers.3.mlp.gate_proj") is not None
    if "gate." not in names[0]:
        assert found.form_of("model.layers.3.mlp.gate") is None


def test_gptq_may_list_its_modules() -> None:
    listed = {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]}
    found = read(quantized.GPTQ | listed)
    assert found.form_of(Q_PROJ) is not None
    assert found.form_of("model.layers.3.mlp.down_proj") is None


def test_scales_of_keys_and_values_have_each_formats_names() -> None:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    assert read(DYNAMIC).kv_scales == () and not read(DYNAMIC).has_fp8_caches
    assert read(DYNAMIC | {"kv_cache_scheme": scheme}).kv_scales == ("k_scale", "v_scale")
    assert read(DYNAMIC | {"kv_cache_scheme": scheme}).has_fp8_caches
    assert not read(DYNAMIC | {"kv_cache_scheme": scheme}).kv_scales_per_head
    by_head = read(DYNAMIC | {"kv_cache_scheme": scheme | {"strategy": "attn_head"}})
    assert by_head.kv_scales == ("k_scale", "v_scale") and by_head.kv_scales_per_head
    without = MODELOPT | {"kv_cache_quant_algo": None}
    assert read(without).kv_scales == () and not read(without).has_fp8_caches
    for settings in (MODELOPT, without | {"kv_cache_scheme": MODELOPT_KV}):
        found = read(settings)
        assert found.kv_scales == ("k_proj.k_scale", "v_proj.v_scale") and found.has_fp8_caches
    with pytest.raises(ConfigError, match="kv_cache_scheme: expected dynamic False or None"):
        read(DYNAMIC | {"kv_cache_scheme": scheme | {"dynamic": True}})


def test_scales_of_keys_and_values_may_be_static_beside_one_scale_a_tensor() -> None:
    """AutoFP8 and Quark write it, with ModelOpt's kind of scales under other names.

    vLLM does not read it, so that caches are in fp8 only where a caller says so.
    """
    assert read(STATIC_FP8).kv_scales == ()
    found = read(STATIC_FP8 | {"kv_cache_scheme": "static"})
    assert found.kv_scales == ("k_scale", "v_scale") and not found.kv_scales_per_head
    assert not found.has_fp8_caches


def test_zeros_that_are_stored_change_nothing() -> None:
    counted = {"format": "dense", "global_sparsity": 0.14, "sparsity_structure": "unstructured"}
    assert read(DYNAMIC | {"sparsity_config": counted}) == read(DYNAMIC)


MODELOPT_KV = {"dynamic": False, "num_bits": 8, "type": "float"}
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
KV_ONLY: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "format": "dense",
    "ignore": ["lm_head"],
    "kv_cache_scheme": KV_SCHEME | {"symmetric": True},
}
EMPTY_GROUP = {"targets": [], "weights": None, "input_activations": None}


@pytest.mark.parametrize("groups", [None, {}, {"group_0": EMPTY_GROUP}], ids=str)
def test_keys_and_values_alone_may_be_quantised(groups: Any) -> None:
    found = read(KV_ONLY | {"config_groups": groups})
    assert found.kv_scales == ("k_scale", "v_scale") and found.forms == ()
    assert found.form_of(Q_PROJ) is None
    with pytest.raises(ConfigError, match="quantization_config"):
        read(KV_ONLY | {"config_groups": groups or {}, "kv_cache_scheme": None})


def test_modelopts_keys_and_values_alone_may_be_quantised() -> None:
    found = read(MODELOPT | {"quant_algo": None})
    assert found.kv_scales == ("k_proj.k_scale", "v_proj.v_scale") and found.forms == ()
    with pytest.raises(ConfigError, match="expected quant_algo 'FP8' or"):
        read(MODELOPT | {"quant_algo": None, "kv_cache_quant_algo": None})


def changed(settings: dict[str, Any], *path: Any) -> dict[str, Any]:
    """A copy with another value: changed(settings, "key", ..., value)."""
    copied = copy.deepcopy(settings)
    *keys, last, value = path
    inner = copied
    for key in keys:
        inner = inner[key]
    inner[last] = value
    return copied


GROUP = ("config_groups", "group_0")
NEIGHBOURS = "a request's text would depend on its neighbours"
REFUSED: dict[str, dict[str, Any]] = {
    rf"one dynamic scale for all tokens, with which {NEIGHBOURS}": changed(
        DYNAMIC, *GROUP, "input_activations", "strategy", "tensor"
    ),
    rf"quantization_config: .* {NEIGHBOURS}": changed(STATIC_FP8, "activation_scheme", "dynamic"),
    "quant_method to be one of compressed-tensors, fp8, .*, got 'bitsandbytes'": {
        "quant_method": "bitsandbytes"
    },
    "expected config_groups as an object": changed(DYNAMIC, "config_groups", []),
    "expected format float-quantized or .*, got 'nvfp4-pack-quantized'": changed(
        DYNAMIC, "format", "nvfp4-pack-quantized"
    ),
    "group_0.weights: expected num_bits 4 or 8, got 2": changed(
        DYNAMIC, *GROUP, "weights", "num_bits", 2
    ),
    "group_0.weights: expected type 'float', got 'int'": changed(
        DYNAMIC, *GROUP, "weights", "type", "int"
    ),
    "expected input_activations beside float weights of 8 bits, got none": changed(
        DYNAMIC, *GROUP, "input_activations", None
    ),
    "expected no input_activations beside int weights": changed(
        PACKED, *GROUP, "input_activations", TOKEN
    ),
    r"expected block_structure \[128, 128\], got \[64, 64\]": changed(
        BLOCK, *GROUP, "weights", "block_structure", [64, 64]
    ),
    "expected group_size 32 or 64 or 128, got -1": changed(
        PACKED, *GROUP, "weights", "group_size", -1
    ),
    "expected actorder None or .*, got 'group'": changed(
        PACKED, *GROUP, "weights", "actorder", "group"
    ),
    "expected no sparsity_config": changed(DYNAMIC, "sparsity_config", {"format": "sparse-24"}),
    "expected no transform_config": changed(DYNAMIC, "transform_config", {"format": "dense"}),
    r"ignore: expected regular expressions .*, got '\('": changed(DYNAMIC, "ignore", ["re:("]),
    r"modules_to_not_convert or ignored_layers: expected regular .*, got '\(': missing": changed(
        quantized.DEEPSEEK_FP8, "ignored_layers", ["("]
    ),
    "kv_cache_scheme: expected num_bits 8, got 4": changed(
        MODELOPT, "kv_cache_scheme", MODELOPT_KV | {"num_bits": 4}
    ),
    "kv_cache_scheme: expected dynamic False, got True": changed(
        MODELOPT, "kv_cache_scheme", MODELOPT_KV | {"dynamic": True}
    ),
    "kv_cache_scheme: expected dynamic False, got None": changed(
        MODELOPT, "kv_cache_scheme", {"num_bits": 8, "type": "float"}
    ),
    "expected kv_cache_scheme 'static' or None, got 'dynamic'": changed(
        STATIC_FP8, "kv_cache_scheme", "dynamic"
    ),
    "ignore: expected a list of names, got 7": changed(DYNAMIC, "ignore", 7),
    r"weight_block_size \[128, 128\], got \[64, 64\]": changed(
        quantized.DEEPSEEK_FP8, "weight_block_size", [64, 64]
    ),
    "expected scale_fmt 'float' or None, got 'ue8m0'": changed(
        quantized.DEEPSEEK_FP8, "scale_fmt", "ue8m0"
    ),
    "expected quant_algo 'FP8' or .*, got 'NVFP4'": changed(MODELOPT, "quant_algo", "NVFP4"),
    "expected desc_act false, .* got True": changed(quantized.GPTQ, "desc_act", True),
    "modules_in_block_to_quantize: expected lists of names, got 5": changed(
        quantized.GPTQ, "modules_in_block_to_quantize", 5
    ),
    r"modules_in_block_to_quantize: expected lists of names, got \[\['a', 5\]\]": changed(
        quantized.GPTQ, "modules_in_block_to_quantize", [["a", 5]]
    ),
    "expected bits 4, got 8": changed(quantized.GPTQ, "bits", 8),
    "expected one setting for all modules, got dynamic": changed(
        quantized.GPTQ, "dynamic", {"-:.*": {}}
    ),
    "expected lm_head False or None, got True": changed(quantized.GPTQ, "lm_head", True),
    "expected version 'gemm' or None, got 'gemv'": changed(quantized.AWQ, "version", "GEMV"),
}


def test_a_pattern_may_begin_with_flags() -> None:
    found = read(changed(quantized.DEEPSEEK_FP8, "ignored_layers", ["(?i).*Q_proj"]))
    assert found.form_of(Q_PROJ) is None and found.form_of(Q_PROJ.replace("q_", "k_")) is not None


def test_a_pattern_that_takes_too_long_is_one_sentence() -> None:
    found = read(changed(DYNAMIC, "ignore", [r"re:(?:\w|\w\w|\.)*[!?]"]))
    with pytest.raises(ConfigError, match=r"that match within 1 s, got '\(\?:.* for model\."):
        found.form_of(f"{Q_PROJ}_{'x' * 40}")


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_implemented_is_one_sentence(message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(REFUSED[message])


def test_all_lists_of_ignored_names_count() -> None:
    config = quantized.DEEPSEEK_FP8 | {"modules_to_not_convert": [], "ignored_layers": ["fc"]}
    assert read(config).form_of("fc") is None
    config["modules_to_not_convert"] = ["model.layers.3.mlp.gate_proj"]
    assert read(config).form_of("fc") is None
    assert read(config).form_of("model.layers.3.mlp.gate_proj") is None
    assert read(config).form_of("model.layers.3.mlp.up_proj") is not None


def test_the_rules_are_tried_once_for_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables ask for each module several times, and some models have a hundred rules."""
    found, tried = read(quantized.DEEPSEEK_FP8), []
    match = forms._match_any

    def note(pattern: str, names: tuple[str, ...]) -> bool:
        tried.append(names)
        return match(pattern, names)

    monkeypatch.setattr(forms, "_match_any", note)
    first = found.form_of("model.layers.0.mlp.up_proj")
    times = len(tried)
    assert times and found.form_of("model.layers.0.mlp.up_proj") == first
    assert len(tried) == times
    assert found == read(quantized.DEEPSEEK_FP8)  # which knows no module yet
