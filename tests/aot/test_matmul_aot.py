"""The matmul kernels compile for an H200 at real shapes, without spills, and leave the weights where they are."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.shapes import SHAPES, Shape
from tests.support import h200

pytestmark = [pytest.mark.aot, pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable()))]
COMPILED = [name for name, shape in SHAPES.items() if shape.rows != 4]  # 4 rows are padded to 8, as 1 is


def abstract(shape: Shape) -> dict[str, Any]:
    """What make_inputs makes, without the arrays."""
    struct = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)  # noqa: E731
    weights = tuple(struct(width, shape.depth) if shape.transposed else struct(shape.depth, width) for width in shape.widths)
    arrays = {"x": struct(shape.rows, shape.depth), "weights": weights}
    return arrays | ({"residual": struct(shape.rows, shape.width)} if shape.residual else {})


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_kernel_without_spills(name: str) -> None:
    shape = SHAPES[name]
    settings = {"swiglu": shape.swiglu, "transposed": shape.transposed, "out_dtype": jnp.dtype(shape.out_dtype)}
    multiply = functools.partial(matmul, **settings, implementation="mosaic_gpu")
    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(lambda arrays: multiply(**arrays), abstract(shape)).as_text()
        found = h200.stack_and_spills(report())
    assert found == [(0, 0, 0)], f"expected one kernel without spills, got {found}"
    assert len(re.findall(r"= \S+ custom-call\(", hlo)) == 1, hlo
    assert not re.findall(r"= \S+ (?:copy|fusion|transpose|concatenate|dot|pad)\(.*", hlo)
