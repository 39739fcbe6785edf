"""The matmul kernels compile for an H200 at real shapes, without spills, and leave the weights
where they are."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config import Ops
from pallas_kernels.matmul import Inputs, matmul, plan
from pallas_kernels.matmul.mosaic_gpu import any_rows, many_rows_swiglu
from pallas_kernels.matmul.shapes import SHAPES, Shape
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]
COMPILED = [
    name for name, shape in SHAPES.items() if shape.rows != 4
]  # 4 rows are padded to 8, as 1 is


def abstract(shape: Shape) -> dict[str, Any]:
    """What make_inputs makes, without the arrays."""
    struct = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.bfloat16)  # noqa: E731
    weights = tuple(
        struct(width, shape.depth) if shape.transposed else struct(shape.depth, width)
        for width in shape.widths
    )
    arrays: dict[str, Any] = {"x": struct(shape.rows, shape.depth), "weights": weights}
    if shape.bias:
        arrays["bias"] = struct(shape.width)
    if shape.residual:
        arrays["residual"] = struct(shape.rows, shape.width)
    return arrays


def multiply(inputs: Inputs) -> Any:
    return matmul(inputs, implementation="mosaic_gpu")


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_to_one_kernel_without_spills(name: str) -> None:
    shape = SHAPES[name]
    settings = {
        "swiglu": shape.swiglu,
        "transposed": shape.transposed,
        "out_dtype": jnp.dtype(shape.out_dtype),
    }
    with h200.ptxas_report() as report:
        inputs = Inputs(**abstract(shape), **settings)
        hlo = h200.compile_for_h200(multiply, inputs).as_text()
        found = h200.stack_and_spills(report())
    assert found == [(0, 0, 0)], f"expected one kernel without spills, got {found}"
    assert len(re.findall(r"= \S+ custom-call\(", hlo)) == 1, hlo
    assert not re.findall(r"= \S+ (?:copy|fusion|transpose|concatenate|dot|pad)\(.*", hlo)


@pytest.mark.parametrize("rows", [144, 576, 2016])
@pytest.mark.parametrize(
    "name", [f"{m} {p}" for m in ("llama-3-8b", "smollm2") for p in ("qkv", "o", "gate_up", "down")]
)
def test_a_product_in_order_is_one_kernel_that_copies_nothing(name: str, rows: int) -> None:
    """Also where a tile has more rows than there are: its copies end with the array."""
    shape = dataclasses.replace(SHAPES[f"{name} rows 1"], rows=rows)
    widths = shape.widths if shape.swiglu else (shape.width,)
    inputs = Inputs(
        **abstract(dataclasses.replace(shape, widths=widths)), swiglu=shape.swiglu, in_order=True
    )
    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(multiply, inputs).as_text()
        found = h200.stack_and_spills(report())
    assert found == [(0, 0, 0)]
    assert len(re.findall(r"= \S+ custom-call\(", hlo)) == 1, hlo
    assert not re.findall(r"= \S+ (?:copy|fusion|transpose|concatenate|dot|pad|slice)\(.*", hlo)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(144, 3584, (4608,), bias=True),  # Qwen2-7B's qkv
        Shape(576, 2880, (5120,), bias=True),  # gpt-oss
        Shape(768, 4096, (2880,), bias=True, residual=True),
    ],
)
def test_biases_of_products_in_order_spill_nothing(shape: Shape) -> None:
    with h200.ptxas_report() as report:
        h200.compile_for_h200(multiply, Inputs(**abstract(shape), in_order=True))
        assert h200.stack_and_spills(report()) == [(0, 0, 0)]


@pytest.mark.parametrize("fused", [{}, {"bias": True}, {"residual": True}])
def test_sums_are_complete_when_they_are_rounded(fused: dict[str, bool]) -> None:
    """Two steps, whose loop LLVM unrolls: it moved the rounding before the wait for the last one,
    and values were wrong on a GPU alone."""
    inputs = Inputs(**abstract(Shape(128, 128, (64,), **fused)), in_order=True)
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}), h200.ptxas_report() as report:
        h200.compile_for_h200(multiply, inputs)
        ptx = report()
    assert h200.sums_are_complete(ptx)


@pytest.mark.parametrize("swiglu", [False, True])
def test_weights_in_order_are_read_before_the_kernel_before_has_ended(swiglu: bool) -> None:
    """Gate and up alone let the next kernel start early."""
    inputs = Inputs(**abstract(Shape(144, 256, (128,) * (1 + swiglu))), swiglu=swiglu)
    inputs = dataclasses.replace(inputs, in_order=True)
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}), h200.ptxas_report() as report:
        h200.compile_for_h200(any_rows.matmul, inputs)
        ptx = report()
    assert h200.loads_before_it_waits(ptx)
    assert ("griddepcontrol.launch_dependents" in ptx) is swiglu


@pytest.mark.parametrize("rows", [72, 200])
def test_xla_joins_no_weights_of_gate_and_up(rows: int) -> None:
    inputs = Inputs(**abstract(Shape(rows, 4096, (14336, 14336))), swiglu=True)
    options = dict(Ops(matmul="mosaic_gpu").compiler_options(cuda_graphs=True))
    hlo = h200.compile_for_h200(matmul, inputs, options=options).as_text()
    assert hlo.count('"__cublas$lt$matmul"') == 2
    assert not re.findall(r"= bf16\[\d+,\d+\]\S* concatenate\(.*", hlo)


@pytest.mark.parametrize(("width", "tile"), [(9216, 96), (12288, 128), (14336, 128)])
def test_two_blocks_of_gate_and_up_share_x_in_one_pass(width: int, tile: int) -> None:
    """Each step copies a tile of gate, one of up, and half of x for both blocks."""
    tuning = many_rows_swiglu.choose_tuning(128, width)
    assert tuning is not None and (tuning.tile, tuning.cluster, tuning.passes) == (tile, 2, 1)
    inputs = Inputs(**abstract(Shape(128, 4096, (width, width))), swiglu=True)
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}), h200.ptxas_report() as report:
        h200.compile_for_h200(functools.partial(many_rows_swiglu.swiglu, tuning=tuning), inputs)
        ptx = report()
    assert h200.stack_and_spills(ptx) == [(0, 0, 0)]
    assert ".reqnctapercluster 2, 1, 1" in ptx
    loads = re.findall(r"cp\.async\.bulk\.tensor\S*shared::(?:cluster|cta)\.global\S*", ptx)
    shared = [load for load in loads if ".multicast::cluster" in load]
    assert shared and len(loads) == 3 * len(shared), loads


def ptx_of(name: str, rows: int, norm: bool) -> tuple[str, Any]:
    """A layer's product, and what was compiled. norm: a residual sum has one after it, any other
    product one before it."""
    shape = dataclasses.replace(SHAPES[f"llama-3-8b {name} rows 1"], rows=rows)
    arrays = abstract(shape)
    if norm and shape.residual:
        arrays["gain"] = jax.ShapeDtypeStruct((shape.width,), jnp.bfloat16)
    elif norm:
        arrays["squares"] = jax.ShapeDtypeStruct((64, plan.padded_rows(rows)), jnp.float32)
    inputs = Inputs(**arrays, swiglu=shape.swiglu, out_dtype=jnp.dtype(shape.out_dtype))
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}), h200.ptxas_report() as report:
        compiled = h200.compile_for_h200(multiply, inputs)
        ptx = report()
    assert h200.stack_and_spills(ptx) == [(0, 0, 0)]
    return ptx, compiled


@pytest.mark.parametrize(
    ("name", "rows", "norm"),
    [("o", 1, True), ("down", 4, True), ("o", 16, False), ("down", 64, False), ("down", 64, True)],
)
def test_two_ctas_sum_through_the_cluster(name: str, rows: int, norm: bool) -> None:
    """What the second one has goes into the first one's shared memory, and not through device
    memory."""
    ptx, compiled = ptx_of(name, rows, norm)
    assert ".reqnctapercluster 2, 1, 1" in ptx and "st.async" in ptx
    assert compiled.memory_analysis().temp_size_in_bytes == 0


@pytest.mark.parametrize(
    ("name", "rows", "norm", "weights_first", "launches_next"),
    [
        ("qkv", 1, True, False, False),
        ("o", 1, True, True, False),
        ("gate_up", 1, True, False, True),
        ("down", 1, True, True, False),
        ("qkv", 16, False, False, False),
        ("o", 16, False, True, False),
        ("gate_up", 16, False, False, True),
        ("qkv", 64, True, False, False),
        ("gate_up", 64, True, False, True),
        ("eagle3 head", 1, False, False, True),
    ],
)
def test_which_load_before_they_wait_and_which_launch_the_next_kernel_early(
    name: str, rows: int, norm: bool, weights_first: bool, launches_next: bool
) -> None:
    before, after = ptx_of(name, rows, norm)[0].split("griddepcontrol.wait;")
    assert ("cp.async.bulk.tensor" in before) == weights_first and "cp.async.bulk.tensor" in after
    assert (
        "griddepcontrol.launch_dependents" in after
    ) == launches_next and "griddepcontrol.launch_dependents" not in before
