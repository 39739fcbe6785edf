"""Heads that the doctor opens."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from jaxspec import SpeculativeConfig
from jaxspec.doctor.head import open_head
from jaxspec.doctor.texts import Target
from jaxspec.loading.model import load_target
from pallas_kernels.fp8_matmul import Fp8Weight
from tests.support import quantized


def test_a_head_in_static_fp8_is_opened(tmp_path: Path) -> None:
    """As LLM does, with the codes and scales that it stores."""
    cfg, params = load_target(quantized.plain_checkpoint(tmp_path / "plain"), jnp.float32)
    target = Target(cfg, params, (), jnp.float32)
    head = quantized.eagle_head(tmp_path, "static")
    opened = open_head(head, target, SpeculativeConfig(str(head), "eagle"))
    assert isinstance(opened.params["layers"][0]["down_proj"], Fp8Weight)
