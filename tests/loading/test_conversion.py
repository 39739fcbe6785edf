"""Plain checkpoints -> quantised ones: codes, names, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.config import ConfigError
from jaxspec.config.quantization import FROM_FLOATS, read_quantization
from jaxspec.loading import conversion
from jaxspec.loading.conversion import convert_checkpoint
from jaxspec.loading.model import load_target
from tests.support import quantized
from tests.support.families import TARGETS


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = quantized.plain_checkpoint(tmp_path_factory.mktemp("plain") / "source")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def codes_of(folder: Path, format: str) -> dict[str, np.ndarray]:
    """Codes 0 .. 15 or float8 of each module, read without jaxspec."""
    tensors = load_file(folder / "model.safetensors") if format == "int4" else {}
    found = {}
    for name, words in tensors.items():
        if name.endswith(".weight_packed"):
            nibbles = [words.view(np.uint32) >> np.uint32(4 * i) & 15 for i in range(8)]
            found[name] = np.stack(nibbles, -1).reshape(words.shape[0], -1)
    return found


@pytest.mark.parametrize("format", FROM_FLOATS)
def test_a_converted_checkpoint_reads_the_codes_that_were_written(
    format: Any, source: Path, tmp_path: Path
) -> None:
    out = convert_checkpoint(source, tmp_path / "out", format)
    _, params = load_target(out, jnp.float32)
    layer = params["layers"][1]
    if format == "int4":
        written = codes_of(out, format)["model.layers.1.mlp.down_proj.weight_packed"]
        np.testing.assert_array_equal(layer["down_proj"].codes(), written.T)
        parts = [f"model.layers.1.self_attn.{p}_proj.weight_packed" for p in "qkv"]
        joined = np.concatenate([codes_of(out, format)[name] for name in parts])
        np.testing.assert_array_equal(layer["self_attn"]["qkv_proj"].codes(), joined.T)
    again = convert_checkpoint(source, tmp_path / "again", format)
    for file in ("model.safetensors", "config.json"):
        assert (out / file).read_bytes() == (again / file).read_bytes()


@pytest.mark.parametrize("format", FROM_FLOATS)
def test_each_weight_is_within_half_a_code_of_the_plain_one(
    format: Any, source: Path, tmp_path: Path
) -> None:
    out = convert_checkpoint(source, tmp_path / "out", format)
    plain = load_file(source / "model.safetensors")
    _, params = load_target(out, jnp.float32)
    weight = plain["model.layers.0.mlp.down_proj.weight"]
    stored = np.asarray(params["layers"][0]["down_proj"].to_array(jnp.float32)).T
    if format == "int4":
        largest = np.abs(weight.reshape(len(weight), -1, 128)).max(-1)
        step = np.repeat(largest / 7.5, 128, axis=1)
        # The largest magnitude of a group, if it is positive, has no code of its own.
        assert (np.abs(stored - weight) <= 0.5 * step * (1 + 1e-5)).all()
    else:
        # Three bits of mantissa: half a step is 1/16. Below 2 ** -6 steps are even.
        scale = np.abs(weight).max() / 448
        assert (np.abs(stored - weight) <= np.abs(weight) / 16 + scale * 2.0**-9).all()


def test_head_and_files_beside_the_weights_are_kept(source: Path, tmp_path: Path) -> None:
    out = convert_checkpoint(source, tmp_path / "out", "fp8")
    assert (out / "tokenizer.json").read_text() == "{}"
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    found = read_quantization(config)
    assert found is not None and found.form_of("lm_head") is None
    plain, stored = quantized.tensors_of(source), quantized.tensors_of(out)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        np.testing.assert_array_equal(plain[name], stored[name])


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized.plain_checkpoint(tmp_path_factory.mktemp("experts") / "s", quantized.EXPERTS)


@pytest.mark.parametrize("format", FROM_FLOATS)
def test_experts_are_quantised_and_routers_keep_their_weights(
    format: Any, experts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Routers are named as ignored, so that other readers leave them too."""
    out = convert_checkpoint(experts, tmp_path / "out", format)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in (0, 1))]
    _, params = load_target(out, jnp.float32)
    layer = params["layers"][0]
    codes = jax.tree.leaves(layer["experts"])[0]
    assert codes.dtype == (jnp.int32 if format == "int4" else jnp.float8_e4m3fn)
    assert layer["router"].dtype == jnp.float32
    caplog.clear()
    _, loaded = load_target(experts, jnp.float32, quantize=format)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_experts_that_a_format_does_not_take_keep_their_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Blocks of 128 rows would reach from gate into up, which one array holds."""
    narrow = quantized.EXPERTS | {"moe_intermediate_size": 64}
    source = quantized.plain_checkpoint(tmp_path / "narrow", narrow)
    out = convert_checkpoint(source, tmp_path / "out", "fp8-block")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    ignored = [name for name in config["ignore"] if "experts" in name]
    assert ignored == [rf"re:.*\.experts\.\d+\.{p}_proj$" for p in ("down", "gate", "up")]
    _, params = load_target(out, jnp.float32)
    layer = params["layers"][0]
    assert layer["experts"]["gate_up"].values.dtype == jnp.float32
    assert layer["self_attn"]["o_proj"].codes.dtype == jnp.float8_e4m3fn
    caplog.clear()
    load_target(out, jnp.float32)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    _, loaded = load_target(source, jnp.float32, quantize="fp8-block")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    (said,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert "quantize='fp8-block' leaves experts plain" in said.getMessage()
    # Groups of 128 fit the depth of gate and up, and not that of down.
    out = convert_checkpoint(source, tmp_path / "int4", "int4")
    experts = load_target(out, jnp.float32)[1]["layers"][0]["experts"]
    assert experts["gate_up"].group == 128 and experts["down"].values.dtype == jnp.float32


@pytest.mark.parametrize("format", FROM_FLOATS)
def test_experts_of_a_module_that_is_not_read_stay_alone(format: Any, tmp_path: Path) -> None:
    """A module of multi-token prediction has experts too, behind the last layer's."""
    config = quantized.LATENT | {"num_nextn_predict_layers": 1}
    source = quantized.random_checkpoint(tmp_path / "source", config)
    tensors = load_file(source / "model.safetensors")
    behind = {n.replace("layers.1.", "layers.2."): a for n, a in tensors.items() if "s.1." in n}
    save_file(tensors | behind, source / "model.safetensors", metadata={"format": "pt"})
    out = convert_checkpoint(source, tmp_path / "out", format)
    _, params = load_target(out, jnp.float32)
    _, loaded = load_target(source, jnp.float32, quantize=format)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    found = read_quantization(json.loads((out / "config.json").read_text()))
    assert found is not None
    forms = [found.form_of(f"model.layers.{i}.mlp.experts.3.up_proj") for i in (1, 2)]
    assert forms[0] is not None and forms[1] is None


def test_scales_of_four_bits_have_the_weights_dtype(source: Path, tmp_path: Path) -> None:
    quantized.with_dtype(quantized.in_bfloat16(source, tmp_path / "bf16"), "bfloat16")
    out = convert_checkpoint(tmp_path / "bf16", tmp_path / "out", "int4", group_size=64)
    _, params = load_target(out, jnp.float32)
    weight = params["layers"][0]["down_proj"]
    assert (weight.group, weight.scales.dtype) == (64, jnp.bfloat16)


def test_what_cannot_be_converted_is_one_sentence(source: Path, tmp_path: Path) -> None:
    fp8 = convert_checkpoint(source, tmp_path / "fp8", "fp8")
    with pytest.raises(ConfigError, match="expected plain weights, got a quantised checkpoint"):
        convert_checkpoint(fp8, tmp_path / "twice", "fp8")
    with pytest.raises(ConfigError, match="expected a folder that does not exist yet"):
        convert_checkpoint(source, fp8, "fp8")
    with pytest.raises(ConfigError, match="group_size: expected one of .*, got 64 with 'fp8'"):
        convert_checkpoint(source, tmp_path / "out", "fp8", group_size=64)
    odd = quantized.plain_checkpoint(tmp_path / "odd", quantized.NARROW | {"hidden_size": 192})
    for format, hint in (("int4", "; a group_size of 64 fits"), ("fp8-block", "$")):
        with pytest.raises(ConfigError, match=f"in multiples of 128, got 192{hint}"):
            convert_checkpoint(odd, tmp_path / "out", format)  # type: ignore[arg-type]
    # What loading would refuse, whatever the size of groups.
    odd = quantized.plain_checkpoint(tmp_path / "odder", quantized.NARROW | {"hidden_size": 96})
    for size in (None, 32):
        with pytest.raises(
            ConfigError, match="columns in 64s and rows in 16s for 4-bit weights, got 96"
        ):
            convert_checkpoint(odd, tmp_path / "out", "int4", group_size=size)
    assert not (tmp_path / "out").exists()


def test_scales_beyond_the_configs_dtype_are_named(source: Path, tmp_path: Path) -> None:
    """float32 weights may be too large for the scales of a float16 model."""
    folder = quantized.with_dtype(shutil.copytree(source, tmp_path / "source"), "float16")
    tensors = quantized.tensors_of(folder)
    tensors[DOWN][3, 5] = 1e6
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    name = DOWN.removesuffix(".weight")
    with pytest.raises(ConfigError, match=f"{name}.weight_scale: expected .* scales, got inf"):
        convert_checkpoint(folder, tmp_path / "out", "int4")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=f"{DOWN}: expected finite numbers, got infinity in 1"):
        load_target(folder, jnp.float32, quantize="int4")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_, quantized.FP8])
def test_weights_that_are_no_floats_are_not_quantised(
    dtype: Any, source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    tensors = quantized.tensors_of(folder)
    tensors[DOWN] = tensors[DOWN].astype(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    name = np.dtype(dtype).name
    for form in ("fp8", "int4"):
        with pytest.raises(ConfigError, match=rf"{DOWN}: expected plain weights .*, got {name}"):
            load_target(folder, jnp.float32, quantize=form)


@pytest.mark.parametrize("model_type", ["gpt_oss", "llama4_text"])
def test_experts_whose_products_read_no_such_codes_are_one_sentence(
    model_type: str, source: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(source, tmp_path / "source")
    config = quantized.NARROW | TARGETS[model_type] | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(config))
    expected = f"products read quantised weights, got model_type '{model_type}'"
    with pytest.raises(ConfigError, match=expected):
        convert_checkpoint(folder, tmp_path / "out", "fp8")
    assert not (tmp_path / "out").exists()


DOWN = "model.layers.1.mlp.down_proj.weight"
FIRST = "model.layers.0.self_attn.q_proj.weight"
FAULTS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    f"1 missing: {DOWN}": lambda t: t.pop(DOWN),
    f"1 missing: {FIRST}": lambda t: t.pop(FIRST),
    "1 unexpected: model.extra.weight": lambda t: t.update(
        {"model.extra.weight": np.ones((2, 2), np.float32)}
    ),
    r"misshapen: .*down_proj.weight \(expected \(128, 256\), got \(127, 256\)\)": lambda t: (
        t.update({DOWN: t[DOWN][1:]})
    ),
    f"{DOWN}: expected finite numbers, got NaN in 1 of": lambda t: t[DOWN].__setitem__(
        (3, 5), np.nan
    ),
    "norm.weight: expected finite numbers, got infinity in 1 of": lambda t: t[
        "model.norm.weight"
    ].__setitem__(3, np.inf),
    f"{DOWN}: expected floating-point numbers, got int32": lambda t: t.update(
        {DOWN: np.ones((128, 256), np.int32)}
    ),
    f"{DOWN}: expected floating-point numbers, got float8_e4m3fn": lambda t: t.update(
        {DOWN: t[DOWN].astype(quantized.FP8)}
    ),
}


@pytest.mark.parametrize("message", FAULTS)
@pytest.mark.parametrize("format", ["fp8", "int4"])
def test_a_source_that_is_wrong_is_named(
    format: Any, message: str, source: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    shutil.copytree(source, folder)
    tensors = quantized.tensors_of(source)
    FAULTS[message](tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        convert_checkpoint(folder, tmp_path / "out", format)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_an_out_that_cannot_be_made_is_one_sentence(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out, reason in (
        (tmp_path / "file" / "out", "File exists"),
        (tmp_path / "file" / "deep" / "out", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        with pytest.raises(ConfigError, match=f"expected a folder that can be made, got {reason}"):
            convert_checkpoint(source, out, "fp8")


def test_a_failure_leaves_nothing(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conversion, "write_shards", full)
    with pytest.raises(ConfigError, match="expected room to write .* got No space left on device"):
        convert_checkpoint(source, tmp_path / "made" / "out", "fp8")
    assert list((tmp_path / "made").iterdir()) == []
