"""Heads that the doctor opens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxspec import SpeculativeConfig
from jaxspec.doctor.head import open_head
from jaxspec.doctor.texts import Target
from jaxspec.loading.model import load_target
from pallas_kernels.fp8_matmul import Fp8Weight
from pallas_kernels.int4_matmul import Int4Weight
from tests.support import quantized


def static_fp8(folder: Path) -> Path:
    return quantized.eagle_head(folder, "static")


def int4(folder: Path) -> Path:
    return quantized.four_bit_head(folder, "int4", lm_head=True)


@pytest.mark.parametrize(("write", "kind"), [(static_fp8, Fp8Weight), (int4, Int4Weight)])
def test_a_quantised_head_is_opened(
    write: Callable[[Path], Path], kind: type, tmp_path: Path
) -> None:
    """As LLM does, with the codes and scales that it stores."""
    cfg, params = load_target(quantized.plain_checkpoint(tmp_path / "plain"), jnp.float32)
    target = Target(cfg, params, (), jnp.float32)
    head = write(tmp_path)
    opened = open_head(head, target, SpeculativeConfig(str(head), "eagle"))
    assert isinstance(opened.params["layers"][0]["down_proj"], kind)
