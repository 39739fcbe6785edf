"""A checkpoint is read onto several devices."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from safetensors.numpy import save_file

from jaxspec import models
from jaxspec.layers.params import is_spec
from jaxspec.parallel.layout import Layout
from tests.support.devices import run_on_devices

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": 31,
}


# Three heads stay whole, and pieces of 96 outputs and of 96 columns become 128.
WITH_ZEROS = {
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "intermediate_size": 192,
}


@pytest.mark.parametrize("changes", [{}, WITH_ZEROS], ids=["even", "with zeros"])
def test_a_checkpoint_on_two_devices_has_the_pieces_and_the_text_of_one(
    tmp_path: Path, changes: dict[str, int]
) -> None:
    config = CONFIG | changes
    layout = Layout.of(models.config_from_hf(config), AbstractMesh((2,), ("model",)))
    assert bool(layout.padded) == bool(changes)
    rng = np.random.default_rng(0)
    specs = jax.tree.leaves(
        models.llama.param_specs(models.config_from_hf(config)), is_leaf=is_spec
    )
    shapes = {name: shape for spec in specs for name, shape in spec.tensors.items()}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    printed = run_on_devices(2, "tests.parallel.checkpoint_on_devices", str(tmp_path))
    assert printed.splitlines()[-1] == "equal"
