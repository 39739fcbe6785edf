"""jaxspec convert: a quantised folder that jaxspec generate reads, or one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxspec.commands import convert
from jaxspec.layers.quantized import rounding
from jaxspec.loading.model import load_target
from tests.commands.conftest import Run, runner

run = runner(convert.main)


def test_a_converted_folder_generates(target: Path, tmp_path: Path, run_generate: Run) -> None:
    result = run(target, tmp_path / "fp8")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path / 'fp8'}: fp8, 0.00 GB of weights")
    flags = "--prompt", "Hello", "--max-tokens", 4, "--max-model-len", 64
    result = run_generate("--target", tmp_path / "fp8", "--method", "ngram", *flags)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--format", "fp4"], "--format: expected one of fp8, fp8-block, int4, bfloat16, got"),
        (["--format", "bfloat16"], "model: expected a draft head, with fc.weight (EAGLE-1)"),
        (["--group-size", 64], "group_size: expected one of 32, 64, 128 with format 'int4'"),
    ],
)
def test_what_cannot_be_converted_is_one_sentence(
    flags: list[object], sentence: str, target: Path, tmp_path: Path
) -> None:
    result = run(target, tmp_path / "out", *flags)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {sentence}"), result.output
    assert not (tmp_path / "out").exists()


def test_a_target_whose_blocks_are_made_plain_is_loaded_without_codes(
    target: Path, tmp_path: Path
) -> None:
    """DeepSeek's form with transformers' switch; without it products would read the codes."""
    folder = shutil.copytree(target, tmp_path / "fp8")
    plain = load_file(target / "model.safetensors")
    tensors = {}
    for name, weight in plain.items():
        if "_proj" in name:
            scales = rounding.fp8_block_scales(weight)
            tensors |= {name: rounding.fp8_codes(weight, scales), f"{name}_scale_inv": scales}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors")
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "dequantize": True}
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": blocks}
    (folder / "config.json").write_text(json.dumps(config))
    (cfg, found), (plain_cfg, expected) = (
        load_target(each, jnp.float32) for each in (folder, target)
    )
    assert cfg == plain_cfg

    def compare(ours: jax.Array, theirs: jax.Array) -> None:
        step = np.abs(theirs).max() * 2.0**-4
        np.testing.assert_allclose(ours, theirs, atol=step)

    jax.tree.map(compare, found, expected)
    gate = found["layers"][0]["gate_proj"].values
    assert (gate != expected["layers"][0]["gate_proj"].values).any()
