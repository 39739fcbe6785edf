"""Quantised checkpoints on several devices."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec import models
from jaxspec.layers.params import is_spec
from jaxspec.loading.conversion import convert_checkpoint
from tests.support import quantized
from tests.support.devices import run_on_devices
from tests.support.slow import slow

pytestmark = pytest.mark.once

# Both devices hold whole blocks of 128.
SHARED = quantized.WIDE | {"head_dim": 128}
EXPERTS = quantized.EXPERTS | {"head_dim": 128, "moe_intermediate_size": 256}


def mxfp4_checkpoint(folder: Path) -> Path:
    """A tiny gpt-oss, whose experts are random MXFP4 codes."""
    config = quantized.NARROW | dict(
        model_type="gpt_oss",
        hidden_size=64,
        intermediate_size=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=5,
        quantization_config={"quant_method": "mxfp4"},
    )
    cfg, rng = models.config_from_hf(config), np.random.default_rng(0)
    tensors: dict[str, np.ndarray] = {}
    for spec in jax.tree.leaves(models.family(cfg).param_specs(cfg), is_leaf=is_spec):
        for name, shape in spec.tensors.items():
            if name.endswith("_blocks"):
                tensors[name] = rng.integers(0, 256, shape).astype(np.uint8)
            elif name.endswith("_scales"):
                tensors[name] = rng.integers(121, 126, shape).astype(np.uint8)
            else:
                size = 1.0 if "norm" in name or "embed" in name else 0.2
                tensors[name] = size * rng.normal(size=shape).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("part", ["usual", slow("rest")])
def test_two_devices_hold_pieces_of_codes_and_decode_alike(part: str, tmp_path: Path) -> None:
    plain = quantized.plain_checkpoint(tmp_path / "plain", SHARED)
    folders = [
        convert_checkpoint(plain, tmp_path / form, form)  # type: ignore[arg-type]
        for form in ("fp8", "fp8-block", "int4")
    ]
    experts = quantized.plain_checkpoint(tmp_path / "plain experts", EXPERTS)
    folders.append(convert_checkpoint(experts, tmp_path / "experts", "fp8-block"))
    folders.append(mxfp4_checkpoint(tmp_path / "mxfp4"))
    quantized.with_kv_scales(folders[0], "attn_head", [[[0.25]], [[0.5]]])
    printed = run_on_devices(2, "tests.parallel.quantized_on_devices", part, *map(str, folders))
    assert printed.splitlines()[-1] == "equal"
