"""The mean of heads: its weights, what it refuses, and the command."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.commands import train
from jaxspec.config import ConfigError, SpeculativeConfig
from jaxspec.layers.params import init_random
from jaxspec.loading.head_conversion import convert_head
from jaxspec.loading.model import load_draft
from jaxspec.training.averaging import average_heads
from jaxspec.training.checkpoint import WEIGHTS, Verifier, save_draft
from jaxspec.training.config import TrainableDraft
from jaxspec.training.trained import trained_specs
from tests.commands.conftest import runner
from tests.support.tiny import VOCAB, block_config, tiny_model

MODEL = tiny_model("dspark")
CONFIG = block_config("dspark", window=7, draft_vocab=40)
run = runner(train.average)


def write(folder: Path, seed: int, cfg: TrainableDraft = CONFIG, first: int = 0) -> Path:
    params = init_random(trained_specs(cfg), jax.random.key(seed), jnp.dtype(jnp.float32))
    ids = np.arange(VOCAB)[first : first + cfg.draft_vocab_size]
    save_draft(folder, cfg, params, ids, Verifier("tiny", ("LlamaForCausalLM",), 256))
    (folder / "training.json").write_text("{}")
    return folder


@pytest.mark.parametrize("count", [2, 3])
def test_weights_are_the_means_and_the_head_loads(count: int, tmp_path: Path) -> None:
    heads = [write(tmp_path / str(seed), seed) for seed in range(count)]
    out = tmp_path / "mean"
    average_heads(out, heads)
    stored, found = [load_file(head / WEIGHTS) for head in heads], load_file(out / WEIGHTS)
    assert set(found) == set(stored[0])
    for name, array in found.items():
        if name in ("d2t", "t2d"):
            np.testing.assert_array_equal(array, stored[0][name])
            continue
        exact = np.mean([one[name].astype(np.float64) for one in stored], axis=0)
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_allclose(array.astype(np.float64), exact, rtol=2**-8, atol=1e-8)
        assert not np.array_equal(array, stored[0][name]) or (array == 1).all(), name
    assert sorted(file.name for file in out.iterdir()) == ["config.json", WEIGHTS]
    cfg, _ = load_draft(out, MODEL.target, MODEL.params["target"], SpeculativeConfig(), jnp.float32)
    assert cfg == CONFIG


def test_versions_in_a_config_make_no_difference(tmp_path: Path) -> None:
    heads = [write(tmp_path / str(seed), seed) for seed in range(2)]
    config = json.loads((heads[1] / "config.json").read_text()) | {"transformers_version": "4.57"}
    (heads[1] / "config.json").write_text(json.dumps(config))
    average_heads(tmp_path / "mean", heads)
    assert (tmp_path / "mean" / WEIGHTS).exists()


def test_a_head_in_float8_counts_with_what_its_codes_stand_for(tmp_path: Path) -> None:
    plain, other = write(tmp_path / "a", 0), write(tmp_path / "b", 1)
    convert_head(plain, tmp_path / "coded", "fp8-block")
    convert_head(tmp_path / "coded", tmp_path / "decoded", "bfloat16")
    average_heads(tmp_path / "one", [tmp_path / "coded", other])
    average_heads(tmp_path / "two", [tmp_path / "decoded", other])
    assert (tmp_path / "one" / WEIGHTS).read_bytes() == (tmp_path / "two" / WEIGHTS).read_bytes()
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert "quantization_config" not in config


def test_heads_that_differ_in_more_than_weights_are_refused(tmp_path: Path) -> None:
    head = write(tmp_path / "a", 0)
    out = tmp_path / "out"
    wider = write(tmp_path / "wider", 1, block_config("dspark", window=9, draft_vocab=40))
    with pytest.raises(ConfigError, match=r"wider: \w+: expected .*'sliding_window': 7.* got .*9"):
        average_heads(out, [head, wider])
    shifted = write(tmp_path / "shifted", 1, first=3)
    with pytest.raises(
        ConfigError, match="shifted: d2t: expected the vocabulary of .*a, got anoth"
    ):
        average_heads(out, [head, shifted])
    for change in ("cut", "gone"):
        damaged = write(tmp_path / change, 1)
        tensors = load_file(damaged / WEIGHTS)
        weight = tensors.pop("fc.weight")
        if change == "cut":
            tensors["fc.weight"] = np.ascontiguousarray(weight[:, :-1])
        save_file(tensors, damaged / WEIGHTS)
        got = "no such tensor" if change == "gone" else r"the shape \(\d+, \d+\)"
        expected = rf"{change}: fc\.weight: expected the shape \(\d+, \d+\) as in .*, got {got}$"
        with pytest.raises(ConfigError, match=expected):
            average_heads(out, [head, damaged])
    whole = write(tmp_path / "whole", 1)
    (whole / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    weights = {"model.layers.0.mlp.up_proj.weight": np.zeros((2, 2), np.float32)}
    save_file(weights, whole / WEIGHTS)
    with pytest.raises(ConfigError, match="whole: expected a draft head, got a whole model"):
        average_heads(out, [head, whole])
    with pytest.raises(ConfigError, match="heads: expected two or more, got 1"):
        average_heads(out, [head])
    assert not out.exists()


def test_the_command_writes_the_head_and_says_so(tmp_path: Path) -> None:
    heads = [str(write(tmp_path / name, i)) for i, name in enumerate("ab")]
    out = tmp_path / "mean"
    result = run(str(out), *heads)
    assert result.exit_code == 0, result.output
    assert "the means of 2 heads" in result.output and (out / WEIGHTS).exists()
    again = run(str(out), *heads)
    assert again.exit_code != 0 and "expected a folder that does not exist yet" in again.output
