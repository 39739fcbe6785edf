"""The RMS norm compiled for an H200 on a machine without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.rms_norm import rms_norm
from pallas_kernels.rms_norm.shapes import SHAPES
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b rows 4",
        "llama-3-8b rows 1",
        "EAGLE-3 of llama-3-8b, fused rows 64",
        "smollm2 rows 4",
    ],
)
def test_compiles_for_an_h200_without_spills(name: str) -> None:
    shape = SHAPES[name]
    args = (
        jax.ShapeDtypeStruct((shape.rows, shape.width), jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.width,), jnp.bfloat16),
    )
    with h200.ptxas_report() as report:
        h200.compile_for_h200(
            lambda x, weight: rms_norm(x, weight, eps=1e-5, implementation="mosaic_gpu"), *args
        )
        found = h200.stack_and_spills(report())
    assert found and not any(map(any, found))
