"""Tables of quantised checkpoints: strict names and shapes, joined projections, several devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import load_file, save_file

from jaxspec import models
from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.config.ops import REFERENCE_OPS
from jaxspec.config.quantization import BLOCK, Fp8Form, Int4Form, Quantization
from jaxspec.engine.first_logits import largest_weight
from jaxspec.layers.params import Weight, init_random, is_spec, joined, matrix, weight
from jaxspec.layers.products import project
from jaxspec.layers.quantized import files, stored
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.weights import check_cuts
from jaxspec.parallel.layout import Placement
from jaxspec.parallel.mesh import MODEL
from jaxspec.tools.benchmark.workload import random_params
from pallas_kernels.fp8_matmul import Fp8Weight
from pallas_kernels.fp8_matmul.weight import BLOCK as KERNELS_BLOCK
from tests.support import quantized

FORMS = {
    "fp8": Fp8Form("channel", "token", "compressed-tensors"),
    "blocks": Fp8Form("block", "block", "fp8"),
    "static": Fp8Form("tensor", "static", "modelopt"),
    "int4": Int4Form(64, True, "awq", scale_dtype="float16"),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized.plain_checkpoint(tmp_path_factory.mktemp("plain") / "wide", quantized.WIDE)


def quantised_config(form: Any, config: dict[str, Any] = quantized.WIDE) -> Any:
    rules = ((r"lm_head\Z", None), (".*", form))
    cfg: Any = models.config_from_hf(config)
    return replace(cfg, quantization=Quantization(rules))


CODES: dict[str, dict[str, tuple[int, ...]]] = {
    "compressed-tensors": {"fc.weight_packed": (24, 2), "fc.weight_shape": (2,)},
    "GPTQ": {"fc.qweight": (2, 24), "fc.g_idx": (16,)},
    "AWQ": {"fc.qweight": (16, 3)},
}


@pytest.mark.parametrize("layout", CODES)
def test_codes_of_4_bits_tell_the_rows_and_columns_of_their_weight(layout: str) -> None:
    shapes = files.weight_shapes(CODES[layout] | {"fc.bias": (24,), "norm.weight": (7,)})
    assert shapes["fc.weight"] == (24, 16)
    assert (shapes["fc.bias"], shapes["norm.weight"]) == ((24,), (7,))


@pytest.mark.parametrize("form", FORMS)
def test_random_weights_have_the_shapes_and_dtypes_of_the_table(form: str) -> None:
    cfg = quantised_config(FORMS[form])
    specs = models.family(cfg).param_specs(cfg)
    params = init_random(specs, jax.random.key(0), jnp.dtype(jnp.bfloat16))

    def compare(spec: Any, array: jax.Array) -> None:
        assert array.shape == spec.shape, spec.name
        assert array.dtype == jnp.dtype(spec.dtype or jnp.bfloat16), spec.name

    jax.tree.map(compare, specs, params, is_leaf=is_spec)
    down = params["layers"][0]["down_proj"].to_array(jnp.float32)
    assert 0.5 < float(down.std()) * 16 < 2  # 1/sqrt(256)


def test_blocks_that_do_not_end_with_a_projection_keep_it_apart(source: Path) -> None:
    parts = [matrix(f"{n}.weight", 256, n, (None, None)) for n in (128, 64, 64)]
    quantization = Quantization(((".*", FORMS["blocks"]),))
    whole = stored({"qkv": weight(joined("qkv", parts[:2]))}, quantization, num_kv_heads=1)["qkv"]
    assert isinstance(whole, Fp8Weight) and whole.scales.shape == (2, 2)
    apart = stored({"qkv": weight(joined("qkv", parts))}, quantization, num_kv_heads=1)["qkv"]
    assert [each.codes.shape for each in apart] == [(128, 256), (64, 256), (64, 256)]


def test_projections_of_one_input_have_one_form() -> None:
    parts = [matrix(f"{n}.weight", 256, 128, (None, None)) for n in "qk"]
    quantization = Quantization((("q", FORMS["fp8"]),))
    named = "got fp8 with a scale per channel, activations with a scale per token and plain weights"
    with pytest.raises(ConfigError, match=f"expected one form for qkv, .* {named}"):
        stored({"qkv": weight(joined("qkv", parts))}, quantization, num_kv_heads=1)


@pytest.mark.parametrize("other", ["plain", "group", "static"])
@pytest.mark.parametrize("projection", ["gate_proj", "up_proj"])
def test_gate_and_up_have_one_form(projection: str, other: str) -> None:
    """One product reads both."""
    forms: dict[str, tuple[Any, Any]] = {
        "plain": (FORMS["fp8"], None),
        "group": (FORMS["int4"], replace(FORMS["int4"], group_size=128)),
        "static": (Fp8Form("tensor", "token", "compressed-tensors"), FORMS["static"]),
    }
    most, one = forms[other]
    rules = ((r"lm_head\Z", None), (rf".*\.1\.mlp\.{projection}", one), (".*", most))
    cfg = replace(quantised_config(None), quantization=Quantization(rules))
    with pytest.raises(ConfigError, match=r"expected one form for .*1\.mlp\.{gate,up}_proj") as e:
        models.family(cfg).param_specs(cfg)
    assert "Form(" not in str(e.value)
    named = {
        "plain": "fp8 with a scale per channel, activations with a scale per token",
        "group": "4 bits in groups of 128",
        "static": "fp8 with a scale per tensor, activations with the checkpoint's scale",
    }
    assert named[other] in str(e.value)


def test_a_product_reads_weights_of_one_form() -> None:
    plain = Weight(jnp.ones((64, 64)))
    codes = Fp8Weight(jnp.ones((64, 64), jnp.float8_e4m3fn), jnp.ones(64))
    for pair in ((plain, codes), (codes, plain)):
        with pytest.raises(AssertionError, match="weights of several forms"):
            project(jnp.ones((1, 1, 64)), pair, REFERENCE_OPS)


def test_four_bits_take_the_largest_groups_that_all_widths_fill(tmp_path: Path) -> None:
    """SmolLM2's 576 columns are nine groups of 64."""
    odd = quantized.WIDE | {"hidden_size": 192}
    source = quantized.plain_checkpoint(tmp_path / "odd", odd)
    _, params = load_target(source, jnp.float32, quantize="int4")
    layer = params["layers"][0]
    assert {layer["down_proj"].group, layer["gate_proj"].group} == {64}
    out = convert_checkpoint(source, tmp_path / "out", "int4", group_size=64)
    _, converted = load_target(out, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, params, converted)
    narrow = quantized.plain_checkpoint(tmp_path / "narrow", odd | {"hidden_size": 96})
    with pytest.raises(ConfigError, match="expected columns in 64s and rows in 16s .*, got 96"):
        load_target(narrow, jnp.float32, quantize="int4")


@pytest.mark.parametrize(
    ("width", "form", "message"),
    [
        (192, Int4Form(128, False, "awq"), "whole groups of 128 .*, got 192 columns"),
        (96, Int4Form(32, False, "awq"), "columns in 64s and rows in 16s .*, got 96 columns"),
    ],
)
def test_shapes_that_a_form_does_not_take_are_one_sentence(
    width: int, form: Any, message: str
) -> None:
    table = {"w": weight(matrix("w.weight", width, 32, (None, None)))}
    with pytest.raises(ConfigError, match=message):
        specs = stored(table, Quantization(((".*", form),)), num_kv_heads=2)
        [spec.tensors for spec in jax.tree.leaves(specs, is_leaf=is_spec)]


def rewrite(folder: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> Path:
    tensors = quantized.tensors_of(folder)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


DOWN = "model.layers.1.mlp.down_proj"
FAULTS: dict[str, tuple[str, Callable[[dict[str, np.ndarray]], Any]]] = {
    f"1 missing: {DOWN}.weight_scale": ("fp8", lambda t: t.pop(f"{DOWN}.weight_scale")),
    f"1 unexpected: {DOWN}.weight_extra": (
        "fp8",
        lambda t: t.update({f"{DOWN}.weight_extra": np.zeros(1, np.float32)}),
    ),
    rf"misshapen: {DOWN}.weight_scale \(expected \(128, 1\), got \(127, 1\)\)": (
        "fp8",
        lambda t: t.update({f"{DOWN}.weight_scale": t[f"{DOWN}.weight_scale"][1:]}),
    ),
    f"{DOWN}.weight: expected float8_e4m3fn by quantization_config, got float32": (
        "fp8",
        lambda t: t.update({f"{DOWN}.weight": np.zeros((128, 256), np.float32)}),
    ),
    f"{DOWN}.weight: expected finite numbers, got NaN in 1 of": (
        "fp8",
        lambda t: t[f"{DOWN}.weight"].view(np.uint8).__setitem__((3, 5), 0x7F),
    ),
    rf"{DOWN}.weight_shape: expected \[128, 256\], got \[256, 128\]": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_shape": np.array([256, 128])}),
    ),
    f"1 missing: {DOWN}.g_idx": ("gptq", lambda t: t.pop(f"{DOWN}.g_idx")),
    rf"{DOWN}.g_idx: expected groups of 128 neighbours, got another order \(desc_act\)": (
        "gptq",
        lambda t: t.update({f"{DOWN}.g_idx": t[f"{DOWN}.g_idx"][::-1].copy()}),
    ),
    f"{DOWN}.qzeros: expected zeros of 8 in a symmetric checkpoint, got 9": (
        "gptq",
        lambda t: t[f"{DOWN}.qzeros"].__setitem__((0, 0), 0x77777778),
    ),
    f"{DOWN}.qweight: expected int32 by quantization_config, got float32": (
        "gptq",
        lambda t: t.update({f"{DOWN}.qweight": t[f"{DOWN}.qweight"].view(np.float32)}),
    ),
    f"{DOWN}.qzeros: expected int32 by quantization_config, got int64": (
        "awq",
        lambda t: t.update({f"{DOWN}.qzeros": t[f"{DOWN}.qzeros"].astype(np.int64)}),
    ),
    f"{DOWN}.weight_packed: expected int32 by quantization_config, got int64": (
        "int4",
        lambda t: t.update({f"{DOWN}.weight_packed": t[f"{DOWN}.weight_packed"].astype(np.int64)}),
    ),
    f"{DOWN}.scales: expected bfloat16 or .* by quantization_config, got int32": (
        "gptq",
        lambda t: t.update({f"{DOWN}.scales": np.ones((2, 128), np.int32)}),
    ),
    f"{DOWN}.weight_scale: expected bfloat16 or .* by quantization_config, got int32": (
        "fp8",
        lambda t: t.update({f"{DOWN}.weight_scale": np.ones((128, 1), np.int32)}),
    ),
    f"{DOWN}.input_scale: expected a positive, finite scale, got 0.0": (
        "static",
        lambda t: t[f"{DOWN}.input_scale"].__setitem__((), 0),
    ),
    f"{DOWN}.input_scale: expected a positive, finite scale, got nan": (
        "static",
        lambda t: t[f"{DOWN}.input_scale"].__setitem__((), np.nan),
    ),
    "1.self_attn.k_proj.k_scale: expected a positive, finite scale, got -0.5": (
        "static",
        lambda t: t["model.layers.1.self_attn.k_proj.k_scale"].__setitem__((), -0.5),
    ),
    "1.self_attn.v_proj.v_scale: expected a positive, finite scale, got inf": (
        "static",
        lambda t: t["model.layers.1.self_attn.v_proj.v_scale"].__setitem__((), np.inf),
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_tensor_that_is_wrong_is_named(message: str, source: Path, tmp_path: Path) -> None:
    form, edit = FAULTS[message]
    out = tmp_path / "out"
    if form == "gptq":
        quantized.gptq(source, out, sym=True)
    elif form == "awq":
        quantized.awq(source, out)
    elif form == "static":
        quantized.modelopt_fp8(source, out)
    else:
        convert_checkpoint(source, out, form)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        load_target(rewrite(out, edit), jnp.float32)


# What writes each form, and a tensor of its scales.
OF_SCALES: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "channel": (lambda a, b: convert_checkpoint(a, b, "fp8"), f"{DOWN}.weight_scale"),
    "block": (lambda a, b: convert_checkpoint(a, b, "fp8-block"), f"{DOWN}.weight_scale"),
    "deepseek": (quantized.deepseek_fp8, f"{DOWN}.weight_scale_inv"),
    "modelopt": (quantized.modelopt_fp8, f"{DOWN}.weight_scale"),
    "tensor": (quantized.compressed_static_fp8, f"{DOWN}.weight_scale"),
    "int4": (lambda a, b: convert_checkpoint(a, b, "int4"), f"{DOWN}.weight_scale"),
    "gptq": (partial(quantized.gptq, sym=True), f"{DOWN}.scales"),
    "awq": (quantized.awq, f"{DOWN}.scales"),
}
FOUR_BITS = ("int4", "gptq", "awq")
EIGHTS = np.uint32(0x88888888).view(np.int32)  # codes of weights of 0


@pytest.mark.parametrize("form", OF_SCALES)
def test_scales_of_weights_that_are_no_numbers_are_named(
    form: str, source: Path, tmp_path: Path
) -> None:
    write, name = OF_SCALES[form]
    folder = write(source, tmp_path / "out")
    right = quantized.tensors_of(folder)[name]
    for wrong in (np.nan, np.inf, -np.inf, *(() if form in FOUR_BITS else (-0.5,))):

        def spoil(tensors: dict[str, np.ndarray], wrong: float = wrong) -> None:
            tensors[name] = right.copy()
            tensors[name].flat[-1] = wrong

        rewrite(folder, spoil)
        kind = "finite" if form in FOUR_BITS else "positive, finite"
        with pytest.raises(ConfigError, match=f"^{name}: expected {kind} scales, got {wrong}$"):
            load_target(folder, jnp.float32)


@pytest.mark.parametrize("form", OF_SCALES)
def test_a_scale_of_zero_is_one_of_weights_of_zero(form: str, source: Path, tmp_path: Path) -> None:
    """All scales of a matrix are 0 here: float16 does not round that many to 0."""
    write, name = OF_SCALES[form]
    folder = write(source, tmp_path / "out")
    rewrite(folder, lambda t: t.update({name: np.zeros_like(t[name])}))
    with pytest.raises(
        ConfigError, match=f"^{name}: expected positive scales of weights other than 0, got 0.0$"
    ):
        load_target(folder, jnp.float32)

    def without_weights(t: dict[str, np.ndarray]) -> None:
        codes = next(
            f"{DOWN}.{n}" for n in ("weight", "weight_packed", "qweight") if f"{DOWN}.{n}" in t
        )
        if form == "awq":  # each group's codes are its zero
            t[codes] = np.repeat(t[f"{DOWN}.qzeros"], 128, axis=0)
        else:
            t[codes] = np.full_like(t[codes], EIGHTS if form in FOUR_BITS else 0)

    rewrite(folder, without_weights)
    _, params = load_target(folder, jnp.float32)
    assert not params["layers"][1]["down_proj"].to_array(jnp.float32).any()
    assert params["layers"][0]["down_proj"].to_array(jnp.float32).any()


def static_experts(source: Path, folder: Path) -> Path:
    quantise = partial(quantized.static_fp8, shape=(), inputs=quantized.INPUT_SCALES)
    return quantized.rewritten(source, folder, quantized.STATIC_FP8, quantise)


@pytest.mark.parametrize("write", [quantized.deepseek_fp8, static_experts])
def test_scales_of_experts_are_named(write: Callable[[Path, Path], Path], tmp_path: Path) -> None:
    """Experts that keep their codes, and experts that are dequantised."""
    plain = quantized.plain_checkpoint(tmp_path / "plain", quantized.EXPERTS)
    folder = write(plain, tmp_path / "out")
    tensors = quantized.tensors_of(folder)
    module = "model.layers.1.mlp.experts.2.up_proj"
    name = next(n for n in tensors if n.startswith(f"{module}.weight_scale"))
    for wrong, message in {
        -0.5: "positive, finite scales, got -0.5",
        0.0: "positive scales of weights other than 0, got 0.0",
    }.items():
        rewrite(folder, lambda t, wrong=wrong: t.update({name: np.full_like(t[name], wrong)}))
        with pytest.raises(ConfigError, match=f"^{name}: expected {message}$"):
            load_target(folder, jnp.float32)


def test_scales_that_float16_rounds_to_zero_give_weights_of_zero(
    source: Path, tmp_path: Path
) -> None:
    folder = quantized.gptq(source, tmp_path / "out", sym=True)
    rewrite(folder, lambda t: t[f"{DOWN}.scales"].__setitem__((1, 5), 0))
    _, params = load_target(folder, jnp.float32)
    weight = np.asarray(params["layers"][1]["down_proj"].to_array(jnp.float32))
    assert not weight[128:256, 5].any() and weight[:128, 5].any() and weight[128:, 6].any()


def test_four_bits_may_have_scales_below_zero(source: Path, tmp_path: Path) -> None:
    """AutoRound's, whose largest weight of a group has the code 0."""
    folder = quantized.gptq(source, tmp_path / "out", sym=True)
    _, right = load_target(folder, jnp.float32)
    rewrite(folder, lambda t: t.update({f"{DOWN}.scales": -t[f"{DOWN}.scales"]}))
    _, params = load_target(folder, jnp.float32)
    weights = [p["layers"][1]["down_proj"].to_array(jnp.float32) for p in (params, right)]
    np.testing.assert_array_equal(weights[0], -weights[1])


def test_gptq_stores_a_zero_of_0_as_15() -> None:
    """Zeros are stored less one, in four bits: AutoGPTQ adds the one and drops what is above."""
    words = np.array([[0x0F7E6F0F]], np.int32)  # F 0 F 6 E 7 F 0 from the lowest
    form = Int4Form(32, True, "gptq", zeros_from=1)
    zeros = files.read(form, "zeros", "w", (8, 32), [words])
    assert zeros.dtype == np.uint8 and zeros[:, 0].tolist() == [0, 1, 0, 7, 15, 8, 0, 1]


def test_gptqs_biases_of_zeros_are_left_out(source: Path, tmp_path: Path) -> None:
    """AutoGPTQ gave one to each module until 2023. Another bias is none of the model's."""
    out = quantized.gptq(source, tmp_path / "out", sym=True)
    _, expected = load_target(out, jnp.float32)
    biases = {
        f"{DOWN}.bias": np.zeros(128, np.float16),
        f"{DOWN[:-9]}up_proj.bias": np.zeros(256, np.float16),
    }
    rewrite(out, lambda tensors: tensors.update(biases))
    _, found = load_target(out, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    rewrite(out, lambda tensors: tensors[f"{DOWN}.bias"].__setitem__(3, 1))
    with pytest.raises(ConfigError, match=rf"1 unexpected: {DOWN}\.bias"):
        load_target(out, jnp.float32)


@pytest.mark.parametrize("projection", ["k_proj", "gate_proj"])
def test_inputs_of_joined_projections_share_a_scale(
    projection: str, source: Path, tmp_path: Path
) -> None:
    """Rows are quantised once for q, k and v, and once for gate and up."""
    uneven = quantized.INPUT_SCALES | {projection: 0.03}
    out = quantized.modelopt_fp8(source, tmp_path / "out", uneven)
    with pytest.raises(ConfigError, match="expected one input_scale for projections of one input"):
        load_target(out, jnp.float32)


@pytest.mark.parametrize("form", ["awq", "gptq", "compressed"])
def test_scales_of_another_dtype_than_the_config_says_are_kept(
    form: str, source: Path, tmp_path: Path
) -> None:
    """Writers of 4 bits may store float16, and leave the plain model's dtype in config.json."""
    write: dict[str, Callable[[Path, Path], Path]] = {
        "awq": quantized.awq,
        "gptq": partial(quantized.gptq, sym=False),
        "compressed": quantized.compressed_int4,
    }
    out = write[form](source, tmp_path / "out")
    _, expected = load_target(out, jnp.float32)
    _, found = load_target(quantized.with_dtype(out, "bfloat16"), jnp.float32)
    assert found["layers"][0]["down_proj"].scales.dtype == jnp.float16
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "draft_model"])
def test_scales_of_a_draft_are_kept_too(method: str, source: Path, tmp_path: Path) -> None:
    if method == "draft_model":
        draft = quantized.awq(source, tmp_path / "draft")
    else:
        draft = quantized.four_bit_head(tmp_path, "awq", method=method)
    settings = SpeculativeConfig(str(quantized.with_dtype(draft, "bfloat16")), method)
    _, found = load_draft(draft, *load_target(source, jnp.float32), settings, jnp.float32)
    weight = found["layers"][0]["down_proj"] if method == "draft_model" else found["fc"]
    assert weight.scales.dtype == jnp.float16


def test_scales_of_a_head_are_looked_up_by_its_tables_names(source: Path, tmp_path: Path) -> None:
    """Names of the files become the table's first, since the config's rules match those."""
    head = quantized.with_dtype(quantized.four_bit_head(tmp_path, "int4"), "bfloat16")
    tensors = {f"model.{name}": array for name, array in quantized.tensors_of(head).items()}
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((head / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]
    group["targets"] = ["fc", r"re:layers\.0\..*"]
    (head / "config.json").write_text(json.dumps(config))
    settings = SpeculativeConfig(str(head), "eagle")
    _, found = load_draft(head, *load_target(source, jnp.float32), settings, jnp.float32)
    assert found["fc"].scales.dtype == jnp.float16
    assert found["layers"][0]["down_proj"].scales.dtype == jnp.float16


@pytest.mark.parametrize("rule", ["midlayer.mlp.down_proj", "layers.0.mlp.down_proj"])
def test_rules_of_a_head_name_its_modules_as_its_file_or_its_table(
    rule: str, source: Path, tmp_path: Path
) -> None:
    head = quantized.four_bit_head(tmp_path, "int4", method="eagle3")
    plain = load_file(quantized.eagle3_head(tmp_path / "plain") / "model.safetensors")
    module = "layers.0.mlp.down_proj"
    tensors = {n: a for n, a in quantized.tensors_of(head).items() if not n.startswith(module)}
    tensors[f"{module}.weight"] = plain[f"{module}.weight"]
    tensors = {n.replace("layers.0.", "midlayer."): a for n, a in tensors.items()}
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((head / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", rule]
    (head / "config.json").write_text(json.dumps(config))
    settings = SpeculativeConfig(str(head), "eagle3")
    _, found = load_draft(head, *load_target(source, jnp.float32), settings, jnp.float32)
    layer = found["layers"][0]
    assert layer["down_proj"].values.dtype == jnp.float32
    assert layer["self_attn"]["o_proj"].words.dtype == jnp.int32


def test_scales_of_several_dtypes_are_not_rounded(source: Path, tmp_path: Path) -> None:
    out = quantized.with_dtype(quantized.awq(source, tmp_path / "out"), "bfloat16")
    name = "model.layers.1.mlp.down_proj.scales"
    rewrite(out, lambda tensors: tensors.update({name: tensors[name].astype(np.float32)}))
    with pytest.raises(ConfigError, match="scales in config.json's dtype bfloat16, got float16"):
        load_target(out, jnp.float32)


def test_a_layer_with_one_of_both_scales_is_named(source: Path, tmp_path: Path) -> None:
    folder = convert_checkpoint(source, tmp_path / "fp8", "fp8")
    quantized.with_kv_scales(folder, "tensor", 0.25)
    name = "model.layers.1.self_attn.v_scale"
    rewrite(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=f"1 missing: {name}"):
        load_target(folder, jnp.float32)
    rewrite(folder, lambda tensors: tensors.pop(name.replace("v_scale", "k_scale")))
    _, params = load_target(folder, jnp.float32)
    assert [float(layer["self_attn"]["v_scale"][0]) for layer in params["layers"]] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("strategy", "scales", "expected"),
    [
        ("tensor", 0.25, [0.25]),
        ("tensor", [0.25], [0.25]),
        ("attn_head", [[[0.25]], [[2.0]]], [0.25, 2.0]),
        ("attn_head", [0.25, 2.0], [0.25, 2.0]),
        ("tensor", [0.25, 2.0], r"misshapen: .*k_scale \(expected \(1,\), got \(2,\)\)"),
        ("attn_head", 0.25, r"misshapen: .*k_scale \(expected \(2,\), got \(1,\)\)"),
        ("attn_head", [0.25, 0.0], "k_scale: expected a positive, finite scale, got 0.0"),
        ("channel", [0.25], "kv_cache_scheme: expected strategy 'tensor' or 'attn_head', got"),
    ],
)
def test_scales_of_keys_are_one_or_one_a_head(
    strategy: str, scales: Any, expected: list[float] | str, source: Path, tmp_path: Path
) -> None:
    folder = convert_checkpoint(source, tmp_path / "fp8", "fp8")
    quantized.with_kv_scales(folder, strategy, scales)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            load_target(folder, jnp.float32)
        return
    _, params = load_target(folder, jnp.float32)
    for layer in params["layers"]:
        assert layer["self_attn"]["k_scale"].tolist() == expected
        assert layer["self_attn"]["v_scale"].tolist() == [2 * scale for scale in expected]


def test_modelopts_channels_are_those_of_llm_compressor(source: Path, tmp_path: Path) -> None:
    """ModelOpt stores a channel's scale without an axis of one."""
    _, ours = load_target(
        quantized.modelopt_channel_fp8(source, tmp_path / "modelopt"), jnp.float32
    )
    _, other = load_target(convert_checkpoint(source, tmp_path / "fp8", "fp8"), jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, ours, other)
    assert ours["layers"][0]["down_proj"].activation == "token"


# --- several devices


def cuts(form: str, size: int, **dimensions: int) -> None:
    cfg = quantised_config(FORMS[form], quantized.WIDE | dimensions)
    layout = Placement(AbstractMesh((size,), (MODEL,))).target(cfg)
    check_cuts(models.family(cfg).param_specs(cfg), layout, "the target")


@pytest.mark.parametrize("form", FORMS)
def test_devices_hold_pieces_of_codes_and_scales_alike(form: str) -> None:
    wider = {"intermediate_size": 512, "head_dim": 128}
    cfg = quantised_config(FORMS[form], quantized.WIDE | wider)
    layout = Placement(AbstractMesh((2,), (MODEL,))).target(cfg)
    specs = models.family(cfg).param_specs(cfg)
    check_cuts(specs, layout, "the target")
    half = jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(layout.piece_of(s), jnp.dtype(s.dtype or jnp.float32)),
        specs["layers"][0],
        is_leaf=is_spec,
    )
    assert half["down_proj"].shape == (256, 128)
    assert half["gate_proj"].shape == (128, 256)
    assert half["self_attn"]["qkv_proj"].shape == (128, 512)
    if form == "int4":
        assert half["down_proj"].scales.shape == (4, 128)
        assert half["gate_proj"].zeros.shape == (2, 256)
    elif form == "blocks":
        assert half["down_proj"].scales.shape == (1, 2)
    else:  # every device has the scales of all outputs of a product that is cut along its depth
        assert half["down_proj"].scales.shape == (128,)
        assert half["gate_proj"].scales.shape == (256,)


def test_pieces_of_joined_codes_are_pieces_of_each_part() -> None:
    cfg = quantised_config(FORMS["fp8"])
    layout = Placement(AbstractMesh((2,), (MODEL,))).target(cfg)
    codes = models.family(cfg).param_specs(cfg)["layers"][0]["self_attn"]["qkv_proj"].codes
    rows = np.arange(512)[:, None]  # 256 of q, 128 of k and of v
    first, second = np.split(layout.in_device_order(rows, 0, codes.parts_along(0)), 2)
    np.testing.assert_array_equal(first[:, 0], [*range(128), *range(256, 320), *range(384, 448)])
    assert second[0, 0] == 128


@pytest.mark.parametrize(
    ("form", "dimensions"),
    [
        ("blocks", {"head_dim": 128, "intermediate_size": 384}),
        ("blocks", {"head_dim": 128, "intermediate_size": 192}),
        ("blocks", {"head_dim": 64}),
    ],
)
def test_blocks_that_devices_would_share_are_one_sentence(
    form: str, dimensions: dict[str, int]
) -> None:
    with pytest.raises(ConfigError, match="pieces of whole blocks of 128 weights .*, got 2"):
        cuts(form, 2, **dimensions)
    assert BLOCK == KERNELS_BLOCK == 128


def test_config_json_alone_says_what_is_stored(source: Path, tmp_path: Path) -> None:
    """Plans read no weights."""
    out = convert_checkpoint(source, tmp_path / "out", "fp8")
    cfg = models.config_from_hf(json.loads((out / "config.json").read_text()))
    leaves = jax.tree.leaves(models.family(cfg).param_specs(cfg), is_leaf=is_spec)
    assert sum(leaf.dtype == "float8_e4m3fn" for leaf in leaves) == 2 * 5


def test_the_older_name_of_the_quantisation_is_read(source: Path, tmp_path: Path) -> None:
    """compression_config, in files of llm-compressor of 2024."""
    out = convert_checkpoint(source, tmp_path / "out", "fp8")
    config = json.loads((out / "config.json").read_text())
    cfg: Any = load_target(out, jnp.float32)[0]
    config["compression_config"] = config.pop("quantization_config")
    (out / "config.json").write_text(json.dumps(config))
    assert load_target(out, jnp.float32)[0] == cfg and cfg.quantization is not None
    with pytest.raises(ConfigError, match="expected plain weights, got a quantised checkpoint"):
        convert_checkpoint(out, tmp_path / "again", "fp8")


@pytest.mark.parametrize("form", FORMS)
def test_benchmarks_draw_codes_and_scales(form: str) -> None:
    specs = models.family(cfg := quantised_config(FORMS[form])).param_specs(cfg)
    params = random_params(specs["layers"], jax.random.key(0), jnp.float32)
    for layer in params:
        weight = layer["down_proj"].to_array(jnp.float32)
        assert weight.shape == (256, 128) and 0.5 < float(weight.std()) * 16 < 2


def test_a_quantised_head_is_dequantised(source: Path, tmp_path: Path) -> None:
    """A draft may share it, and training reads its columns."""
    out = convert_checkpoint(source, tmp_path / "out", "fp8")
    plain = quantized.tensors_of(source)["lm_head.weight"]
    scales = np.abs(plain).max(axis=1, keepdims=True) / np.float32(448)
    codes = (plain / scales).astype(quantized.FP8)

    def quantise(tensors: dict[str, np.ndarray]) -> None:
        tensors |= {"lm_head.weight": codes, "lm_head.weight_scale": scales}

    config = json.loads((out / "config.json").read_text())
    config["quantization_config"]["ignore"] = []
    (out / "config.json").write_text(json.dumps(config))
    _, params = load_target(rewrite(out, quantise), jnp.float32)
    np.testing.assert_array_equal(params["lm_head"].values, (codes.astype(np.float32) * scales).T)


def test_the_largest_weight_of_a_quantised_model_is_found(source: Path, tmp_path: Path) -> None:
    """Codes are of no size by themselves: 448 is none of the weights here."""
    out = convert_checkpoint(source, tmp_path / "out", "fp8")

    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        tensors[f"{DOWN}.weight_scale"][3] = 100

    _, params = load_target(rewrite(out, enlarge), jnp.float32)
    assert largest_weight(params) == ("layers.1.down_proj", 44800)
