"""Counts that a target's config claims are compared with its tensors before a table is made."""

from __future__ import annotations

import json
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec.config import ConfigError
from jaxspec.loading.model import load_target


@pytest.mark.parametrize(
    ("key", "count"),
    [("num_hidden_layers", 10**7), ("n_routed_experts", 10**9), ("num_experts", 10**9)],
)
def test_more_layers_or_experts_than_tensors_are_refused_at_once(
    tmp_path: Path, key: str, count: int
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", key: count}))
    save_file({f"w{i}": np.ones(1, np.float32) for i in range(7)}, tmp_path / "model.safetensors")
    begin = time.perf_counter()
    with pytest.raises(ConfigError) as e:
        load_target(tmp_path, jnp.float32)
    assert str(e.value) == (
        f"{tmp_path}/config.json: expected {key} of at most the checkpoint's 7 tensors, got {count}"
    )
    assert time.perf_counter() - begin < 1
