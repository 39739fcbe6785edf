"""The matmul kernel compiles for an H200 at real shapes, without spills, and leaves the weights where they are."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.matmul import matmul
from pallas_kernels.matmul.shapes import SHAPES, Shape
from tests.support.h200 import compile_for_h200, unavailable

pytestmark = [pytest.mark.aot, pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))]
COMPILED = [name for name, shape in SHAPES.items() if shape.rows in (1, 8, 16, 64)]  # 4 rows are padded to 8, as 1 is


@pytest.fixture(autouse=True)
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """ptxas reports on what it compiles, which nothing may have cached."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    cached = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", cached)


def abstract(shape: Shape) -> dict[str, Any]:
    """What make_inputs makes, without the arrays."""
    struct = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)  # noqa: E731
    weights = tuple(struct(width, shape.depth) if shape.transposed else struct(shape.depth, width) for width in shape.widths)
    arrays = {"x": struct(shape.rows, shape.depth), "weights": weights}
    return arrays | ({"residual": struct(shape.rows, shape.width)} if shape.residual else {})


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_kernel_without_spills(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    shape = SHAPES[name]
    settings = {"swiglu": shape.swiglu, "transposed": shape.transposed, "out_dtype": jnp.dtype(shape.out_dtype)}
    multiply = functools.partial(matmul, **settings, implementation="mosaic_gpu")
    hlo = compile_for_h200(lambda arrays: multiply(**arrays), abstract(shape)).as_text()
    captured = capfd.readouterr()
    spills = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", captured.out + captured.err)
    assert len(spills) == 1, f"expected ptxas's report on one kernel, got {spills}"
    assert all(int(n) == 0 for kernel in spills for n in kernel), spills
    assert len(re.findall(r"= \S+ custom-call\(", hlo)) == 1, hlo
    assert not re.findall(r"= \S+ (?:copy|fusion|transpose|concatenate|dot|pad)\(.*", hlo)
