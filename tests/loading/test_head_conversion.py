"""Plain heads -> float8 with a scale for each block, the way back, and what is refused."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jaxspec import drafts, models
from jaxspec.commands import convert
from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.drafts import DFlashConfig, DSparkConfig
from jaxspec.drafts.eagle_llama4 import EagleLlama4Config
from jaxspec.layers.params import init_random, is_spec
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.loading.fp8 import with_scales
from jaxspec.loading.head_conversion import convert_head
from jaxspec.loading.model import load_draft
from jaxspec.loading.resolve import CHECKPOINTS
from jaxspec.tools.benchmark.dimensions import MODELS
from jaxspec.training.checkpoint import Verifier, save_draft
from jaxspec.training.trained import trained_specs
from tests.commands.conftest import runner
from tests.support.families import family_config, family_model
from tests.support.tiny import VOCAB, block_config, tiny_model

run = runner(convert.main)
MODEL = tiny_model("dspark")
VERIFIER = Verifier("tiny", ("LlamaForCausalLM",), 256)
DRAFT_VOCAB = 40
COMMITTED = {
    method: CHECKPOINTS / f"smollm2-135m-instruct-{method}"
    for method in ("eagle", "eagle3", "dspark")
}


@pytest.fixture(scope="module", params=["dspark", "dflash"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    cfg = block_config(request.param, window=7, draft_vocab=DRAFT_VOCAB)
    params = init_random(trained_specs(cfg), jax.random.key(1), jnp.dtype(jnp.float32))
    folder = tmp_path_factory.mktemp(request.param) / "head"
    save_draft(folder, cfg, params, np.arange(VOCAB)[:DRAFT_VOCAB], VERIFIER)
    (folder / "README.md").write_text("about the plain head")
    return folder


def load(folder: Path) -> tuple[Any, Any]:
    return load_draft(
        folder, MODEL.target, MODEL.params["target"], SpeculativeConfig(), jnp.float32
    )


@cache
def load_smollm2_shape() -> tuple[Any, Any]:
    """A target of the committed heads' shape: two arrays that they share, and nothing else."""
    dimensions = MODELS["smollm2-135m"].target
    shape = (dimensions.vocab_size, dimensions.hidden_size)
    shared = {"embed_tokens": jnp.zeros(shape, jnp.bfloat16), "norm": jnp.ones(shape[1:])}
    return dimensions, shared


def dtypes(folder: Path) -> dict[str, str]:
    """The dtype of each tensor, as the file's header has it."""
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def changed(head: Path, folder: Path, tensors: dict[str, np.ndarray]) -> Path:
    """Write a copy of a head with some tensors of its own or more."""
    folder.mkdir()
    save_file(load_file(head / "model.safetensors") | tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((head / "config.json").read_bytes())
    return folder


def test_a_converted_head_is_plain_again_within_half_a_code(head: Path, tmp_path: Path) -> None:
    convert_head(head, tmp_path / "fp8", "fp8-block")
    (plain_cfg, plain), (cfg, params) = load(head), load(tmp_path / "fp8")
    assert cfg == plain_cfg and isinstance(cfg, DSparkConfig | DFlashConfig)

    def compare(of_head: jax.Array, converted: jax.Array) -> None:
        weight, stored = np.asarray(of_head), np.asarray(converted)
        step = np.abs(weight).max() / 448 * 2.0**-9
        assert (np.abs(stored - weight) <= np.abs(weight) / 16 + step).all()
        if weight.ndim == 2:
            assert (stored != weight).any()
        else:
            np.testing.assert_array_equal(stored, weight)

    equal = {"embed_tokens", "draft_to_target", "target_to_draft", "confidence"} & set(plain)
    own = set(plain) - equal
    jax.tree.map(compare, {n: plain[n] for n in own}, {n: params[n] for n in own})
    for name in equal:
        jax.tree.map(np.testing.assert_array_equal, params[name], plain[name])
    assert not (tmp_path / "fp8" / "README.md").exists()  # it is about the plain head


def test_each_block_has_its_own_scale(head: Path, tmp_path: Path) -> None:
    """Two rows of three blocks, whose largest magnitudes are far apart."""
    rows, columns = np.indices((200, 300))
    large = 10.0 ** (3 * (rows // 128) + columns // 128)
    weight = (np.random.default_rng(0).uniform(0.5, 1, (200, 300)) * large).astype(np.float32)
    source = changed(head, tmp_path / "source", {"layers.0.more.weight": weight})
    convert_head(source, tmp_path / "fp8", "fp8-block")
    checkpoint = open_checkpoint(tmp_path / "fp8")
    found = with_scales(checkpoint.tensors, checkpoint.config, "head")["layers.0.more.weight"]
    np.testing.assert_allclose(found.read(), weight, rtol=1 / 16)


def test_matrices_alone_have_codes(head: Path, tmp_path: Path) -> None:
    convert_head(head, tmp_path / "fp8", "fp8-block")
    found, plain = dtypes(tmp_path / "fp8"), dtypes(head)
    codes = {name for name, dtype in found.items() if dtype == "F8_E4M3"}
    assert {"fc.weight", "layers.1.mlp.down_proj.weight"} <= codes
    for name, dtype in plain.items():
        assert found[name] == ("F8_E4M3" if name in codes else dtype)
        assert (f"{name}_scale_inv" in found) == (name in codes)
    assert found["norm.weight"] == "BF16" and found["d2t"] == plain["d2t"]


def test_jaxspec_convert_takes_a_head(head: Path, tmp_path: Path) -> None:
    result = run(head, tmp_path / "fp8", "--format", "fp8-block")
    assert result.exit_code == 0, result.output
    assert load(tmp_path / "fp8")[0] == load(head)[0]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--format", "fp8"], "format: expected fp8-block or bfloat16 for a head, got 'fp8'"),
        (["--format", "int4"], "format: expected fp8-block or bfloat16 for a head, got 'int4'"),
        (
            ["--format", "fp8-block", "--group-size", 64],
            "group_size: expected none for a head, got 64",
        ),
    ],
)
def test_what_a_head_does_not_take_is_one_sentence(
    head: Path, flags: list[object], sentence: str, tmp_path: Path
) -> None:
    result = run(head, tmp_path / "out", *flags)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {sentence}"), result.output
    assert not (tmp_path / "out").exists()


def test_a_head_with_codes_is_not_quantised_again(head: Path, tmp_path: Path) -> None:
    convert_head(head, tmp_path / "fp8", "fp8-block")
    with pytest.raises(ConfigError, match="expected plain weights, got a quantised checkpoint"):
        convert_head(tmp_path / "fp8", tmp_path / "again", "fp8-block")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize("method", COMMITTED)
def test_the_way_back_gives_the_weights_that_are_loaded(method: str, tmp_path: Path) -> None:
    """EAGLE heads are plain too once they are loaded, where other fp8 heads keep their codes."""
    head = COMMITTED[method]
    result = run(head, tmp_path / "plain", "--format", "bfloat16")
    assert result.exit_code == 0, result.output
    target = load_smollm2_shape()
    (cfg, found), (plain_cfg, plain) = (
        load_draft(folder, *target, SpeculativeConfig(), jnp.bfloat16)
        for folder in (head, tmp_path / "plain")
    )
    assert cfg == plain_cfg and getattr(cfg, "quantization", None) is None
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    assert set(dtypes(tmp_path / "plain").values()) <= {"BF16", "I64", "BOOL"}
    assert "quantization_config" not in (tmp_path / "plain" / "config.json").read_text()


@pytest.mark.parametrize("method", COMMITTED)
def test_the_way_back_and_forth_gives_the_committed_head(method: str, tmp_path: Path) -> None:
    """bfloat16 holds each block's largest weight, and the others to less than half a code."""
    convert_head(COMMITTED[method], tmp_path / "plain", "bfloat16")
    convert_head(tmp_path / "plain", tmp_path / "fp8", "fp8-block")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "fp8" / name).read_bytes() == (COMMITTED[method] / name).read_bytes()


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_head_that_is_made_plain_is_quantised_while_it_loads(form: Any, tmp_path: Path) -> None:
    """As the plain head is: its products read codes of the form."""
    head = COMMITTED["eagle3"]
    checkpoint = open_checkpoint(head)
    tensors = with_scales(checkpoint.tensors, checkpoint.config, "head")
    (tmp_path / "plain").mkdir()
    save_file(
        {name: tensor.read() for name, tensor in tensors.items()},
        tmp_path / "plain" / "model.safetensors",
    )
    config = {**checkpoint.config, "quantization_config": None}
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
    given = SpeculativeConfig(draft_quantize=form)
    target = load_smollm2_shape()
    (cfg, found), (plain_cfg, plain) = (
        load_draft(folder, *target, given, jnp.bfloat16) for folder in (head, tmp_path / "plain")
    )
    assert cfg == plain_cfg and getattr(cfg, "quantization", None) is not None
    jax.tree.map(np.testing.assert_array_equal, found, plain)


def test_a_head_whose_products_read_codes_is_not_made_plain(tmp_path: Path) -> None:
    (tmp_path / "fp8").mkdir()
    shutil.copy(COMMITTED["eagle"] / "model.safetensors", tmp_path / "fp8")
    config = json.loads((COMMITTED["eagle"] / "config.json").read_text())
    del config["quantization_config"]["dequantize"]
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="got one whose products read codes"):
        convert_head(tmp_path / "fp8", tmp_path / "plain", "bfloat16")


@pytest.mark.parametrize("name", ["fc.weight", "fc.weight_scale_inv"])
def test_codes_and_scales_of_a_config_that_names_none_are_refused(
    head: Path, name: str, tmp_path: Path
) -> None:
    dtype = ml_dtypes.float8_e4m3fn if name == "fc.weight" else np.float32
    weight = load_file(head / "model.safetensors")["fc.weight"]
    broken = changed(head, tmp_path / "broken", {name: weight.astype(dtype)})
    with pytest.raises(ConfigError, match=f"{name}: expected plain weights, got float"):
        convert_head(broken, tmp_path / "out", "fp8-block")
    assert sorted(tmp_path.iterdir()) == [broken]


def test_a_link_that_leads_nowhere_is_not_overwritten(head: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match="expected a folder that does not exist yet"):
        convert_head(head, out, "fp8-block")


def test_weights_that_are_not_finite_are_refused(head: Path, tmp_path: Path) -> None:
    weight = load_file(head / "model.safetensors")["fc.weight"]
    weight[0, 0] = np.nan
    broken = changed(head, tmp_path / "broken", {"fc.weight": weight})
    with pytest.raises(ConfigError, match=r"fc.weight: expected finite numbers, got NaN in 1 of"):
        convert_head(broken, tmp_path / "out", "fp8-block")
    assert sorted(tmp_path.iterdir()) == [broken]


def test_a_head_of_llama_4_is_plain_again(tmp_path: Path) -> None:
    """A target of this family refuses codes, and its head is one of its layers."""
    model = family_model("llama4_text", "eagle_llama4")
    one = {"num_hidden_layers": 1, "no_rope_layers": [1], "moe_layers": []}
    config = family_config("llama4_text") | one
    layer: Any = models.config_from_hf(config)
    cfg = EagleLlama4Config(layer, own_embedding=False, tied_lm_head=False)
    rng = np.random.default_rng(3)
    specs = jax.tree.leaves(drafts.family(cfg).param_specs(cfg), is_leaf=is_spec)
    shapes = {name: shape for spec in specs for name, shape in spec.tensors.items()}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    source = tmp_path / "head"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(config))
    convert_head(source, tmp_path / "fp8", "fp8-block")
    assert "F8_E4M3" in dtypes(tmp_path / "fp8").values()
    settings = SpeculativeConfig(method="eagle")
    target = model.target, model.params["target"]
    plain_cfg, plain = load_draft(source, *target, settings, jnp.float32)
    fp8_cfg, params = load_draft(tmp_path / "fp8", *target, settings, jnp.float32)
    assert fp8_cfg == plain_cfg == cfg
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1 / 16, 0.02), params, plain)
