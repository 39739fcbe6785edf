"""Arrays on a mesh: the default device as it is, and two devices that XLA makes of one CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec import models
from jaxspec.layers.params import is_spec
from jaxspec.parallel.mesh import DEFAULT_DEVICE, DeviceMesh

CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}


def test_the_default_device_leaves_arrays_uncommitted() -> None:
    """A committed argument would make jit compile each program twice."""
    array = DEFAULT_DEVICE.place(np.ones((4, 2), np.float32), ("heads", None))
    step = jax.jit(lambda w, x: w @ x)
    x = jax.jit(lambda: jnp.ones((2, 2)))()
    for _ in range(3):
        x = step(array, x)[:2]
    assert step._cache_size() == 1
    assert (DEFAULT_DEVICE.size, DEFAULT_DEVICE.num_shards("heads")) == (1, 1)


def test_an_axis_without_a_rule_is_an_error() -> None:
    with pytest.raises(KeyError, match="head"):
        DeviceMesh(tuple(jax.devices()[:1])).sharding(("head",))


def test_a_target_on_two_devices_has_its_pieces_where_the_table_says(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    specs = jax.tree.leaves(
        models.llama.param_specs(models.config_from_hf(CONFIG)), is_leaf=is_spec
    )
    shapes = {name: shape for spec in specs for name, shape in spec.tensors.items()}
    tensors = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    result = subprocess.run(
        [sys.executable, "-m", "tests.parallel.on_two_devices", str(tmp_path)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (0, "equal\n"), result.stderr
