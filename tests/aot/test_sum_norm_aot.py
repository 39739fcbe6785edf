"""Sum and norm compiled for an H200 on a machine without one: one launch, no spills."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.sum_norm import sum_norm
from pallas_kernels.sum_norm.shapes import SHAPES, Shape
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]


@pytest.mark.parametrize("shape", [*SHAPES.values(), Shape(128, 8192)], ids=str)
def test_is_one_launch_without_spills(shape: Shape) -> None:
    row = (shape.rows, shape.width)

    def function(
        parts: jax.Array, residual: jax.Array, gain: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        return sum_norm(parts, residual, gain, eps=1e-5, implementation="mosaic_gpu")

    args = (
        jax.ShapeDtypeStruct((shape.parts, *row), jnp.float32),
        jax.ShapeDtypeStruct(row, jnp.bfloat16),
        jax.ShapeDtypeStruct((shape.width,), jnp.bfloat16),
    )
    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(function, *args).as_text()
        found = h200.stack_and_spills(report())
    assert found and not any(map(any, found))
    launched = re.findall(r" (fusion|custom-call|copy|gather|concatenate)\(", hlo)
    assert launched == ["custom-call"]
