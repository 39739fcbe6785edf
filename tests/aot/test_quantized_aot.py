"""Products of fp8 and int4 weights compile for an H200 at real shapes, without spills, and leave
the weights where they are."""

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
from pallas_kernels import fp8_matmul, hopper, int4_matmul
from pallas_kernels.fp8_matmul.rows import quantise
from pallas_kernels.fp8_matmul.shapes import SHAPES as FP8
from pallas_kernels.fp8_matmul.shapes import make_inputs as make_fp8
from pallas_kernels.int4_matmul.shapes import SHAPES as INT4
from pallas_kernels.int4_matmul.shapes import make_inputs as make_int4
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]
IN_BLOCKS = [n for n, s in FP8.items() if s.form == "block" and s.rows == 1 and "head" not in n]
OTHER_WORK = r"= \S+ (?:copy|fusion|transpose|concatenate|dot|pad)\(.*"


def compiled(
    op: Any, inputs: Any, options: dict[str, Any] | None = None
) -> tuple[str, list[tuple[int, int, int]]]:
    """Optimised HLO, and stack and spills of each kernel."""
    run = functools.partial(op, implementation="mosaic_gpu")
    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(run, inputs, options=options).as_text()
        return hlo, h200.stack_and_spills(report())


@pytest.mark.parametrize(
    "name", [n for n, s in FP8.items() if s.rows in (1, 16, 64) and s.depth % 1024 == 0]
)
def test_fp8_compiles_to_two_kernels_or_one_without_spills(name: str) -> None:
    """One quantises the rows, unless the product quantises few rows itself."""
    shape = FP8[name]
    inputs = jax.eval_shape(lambda: make_fp8(shape, 0))
    hlo, found = compiled(fp8_matmul.fp8_matmul, inputs)
    kernels = 1 if shape.rows == 1 and shape.form != "block" else 2
    assert found == [(0, 0, 0)] * kernels, f"expected {kernels} without spills, got {found}"
    assert hlo.count(" custom-call(") == kernels, hlo
    assert not [line for line in re.findall(OTHER_WORK, hlo) if "f8e4m3fn[" in line], hlo


@pytest.mark.parametrize("rows", [1, 4, 5, 8])
def test_few_rows_between_gate_and_down_take_no_kernel_of_their_own(rows: int) -> None:
    gate_up, down = (
        jax.eval_shape(lambda s=s: make_fp8(dataclasses.replace(s, rows=rows), 0))
        for s in (FP8[f"llama-3-8b {n} channel rows 1"] for n in ("gate_up", "down"))
    )

    def run(first: Any, second: Any, *, implementation: str) -> Any:
        x, largest = fp8_matmul.measured_swiglu(first, implementation=implementation)
        return fp8_matmul.fp8_matmul(
            dataclasses.replace(second, x=x), largest=largest, implementation=implementation
        )

    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(
            lambda *a: run(*a, implementation="mosaic_gpu"), gate_up, down
        ).as_text()
        assert h200.stack_and_spills(report()) == [(0, 0, 0)] * 2
    assert hlo.count(" custom-call(") == 2, hlo
    assert not [line for line in re.findall(OTHER_WORK, hlo) if "[]" not in line], hlo


def test_cublas_multiplies_parts_of_the_depth_at_once_and_copies_no_weight() -> None:
    shape = FP8["llama-3-8b down channel rows 256"]
    inputs = jax.eval_shape(lambda: make_fp8(shape, 0))
    options = dict(Ops(matmul="mosaic_gpu").compiler_options(cuda_graphs=True))
    hlo, found = compiled(fp8_matmul.fp8_matmul, inputs, options)
    assert found == [(0, 0, 0)], f"expected one kernel, which quantises the rows, got {found}"
    entry = hlo.split("ENTRY", 1)[1]
    [product_line] = [line for line in entry.splitlines() if "__cublas$lt$matmul$f8" in line]
    assert f"= (f32[4,256,{shape.width}]" in product_line
    [rest] = re.findall(r"= \S+ (?:copy|fusion|transpose)\(.*", entry)  # sum, scales, residual
    assert "f8e4m3fn[" not in rest, rest


def test_rows_are_quantised_without_an_array_of_their_scales() -> None:
    """Of 2,016 rows of 14,336 values, which prefill has, XLA writes codes and nothing wide."""
    x = bfloat16(2016, 14_336)
    hlo = h200.compile_for_h200(functools.partial(quantise, activation="token"), x).as_text()
    entry = hlo[hlo.index("\nENTRY") :]
    assert "f8e4m3fn[2016,14336]" in entry and "f32[2016]" in entry
    assert "f32[2016,14336]" not in entry


@pytest.mark.parametrize("rows", [72, 128, 256])
def test_cublas_multiplies_by_gate_and_by_up_and_joins_no_weights(rows: int) -> None:
    """XLA would join them up to about 150 rows: 117 MB of copies in each layer of Llama-3-8B."""
    shape = dataclasses.replace(FP8["llama-3-8b gate_up channel rows 256"], rows=rows)
    inputs = jax.eval_shape(lambda: make_fp8(shape, 0))
    options = dict(Ops(matmul="mosaic_gpu").compiler_options(cuda_graphs=True))
    hlo, _ = compiled(fp8_matmul.fp8_matmul, inputs, options)
    assert hlo.count('"__cublas$lt$matmul$f8"') == 2
    assert not re.findall(rf"= f8e4m3fn\[\d+,{shape.depth}\]\S* concatenate\(.*", hlo)


@pytest.mark.parametrize("name", [n for n, s in INT4.items() if s.rows in (1, 16, 64)])
def test_int4_compiles_to_one_kernel_without_spills(name: str) -> None:
    inputs = jax.eval_shape(lambda: make_int4(INT4[name], 0))
    assert not re.findall(OTHER_WORK, int4_without_spills(inputs)[0])


@pytest.mark.parametrize("zeros", ["", " zeros"])
@pytest.mark.parametrize(("rows", "by_wgmma"), [(16, False), (24, True), (64, True)])
def test_sums_of_wgmma_are_complete_before_scales_multiply_them(
    rows: int, by_wgmma: bool, zeros: str
) -> None:
    shape = dataclasses.replace(INT4[f"llama-3-8b gate_up{zeros} rows 64"], rows=rows)
    inputs = jax.eval_shape(lambda: make_int4(shape, 0))
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}):
        _, ptx = int4_without_spills(inputs)
    found = re.findall(r"mma\.sync|wgmma\.mma_async|commit_group|wait_group\S* 0|fma\.rn", ptx)
    assert ("wgmma.mma_async" in found, "mma.sync" in found) == (by_wgmma, not by_wgmma)
    in_flight = False
    for instruction in found:
        in_flight = instruction == "commit_group" or (in_flight and "wait" not in instruction)
        assert not (in_flight and instruction == "fma.rn")


@pytest.mark.parametrize("rows", [1, 4, 8, 16, 32, 64])
@pytest.mark.parametrize(("first", "second"), [("o", "gate_up"), ("down", "qkv")])
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_a_norm_that_two_products_share_takes_no_kernel(
    form: str, first: str, second: str, rows: int
) -> None:
    """Of more than eight rows in fp8, a kernel before each product quantises them."""

    def inputs_of(name: str) -> Any:
        if form == "fp8":
            shape = dataclasses.replace(FP8[f"llama-3-8b {name} channel rows 64"], rows=rows)
            return jax.eval_shape(lambda: make_fp8(shape, 0))
        own = dataclasses.replace(INT4[f"llama-3-8b {name} rows 64"], rows=rows)
        return jax.eval_shape(lambda: make_int4(own, 0))

    def run(before: Any, after: Any, gain: Any, largest: Any) -> Any:
        kernel: Any = "mosaic_gpu"
        before = dataclasses.replace(before, gain=gain)
        if form == "fp8":
            made = fp8_matmul.product_for_norm(before, largest=largest, implementation=kernel)
            found = made.largest
        else:
            made = int4_matmul.int4_matmul(before, implementation=kernel)
            found = None
        out, scaled, squares = made[:3]
        after = dataclasses.replace(after, x=scaled, squares=squares, eps=1e-5)
        if form == "int4":
            return out, int4_matmul.int4_matmul(after, implementation=kernel)
        if second == "gate_up":
            return out, fp8_matmul.measured_swiglu(after, largest=found, implementation=kernel)
        return out, fp8_matmul.fp8_matmul(after, largest=found, implementation=kernel)

    gain = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
    known = jax.ShapeDtypeStruct((14336 // 16, -(-rows // 8) * 8), jnp.float32)
    largest = known if form == "fp8" and first == "down" and rows <= 8 else None
    with h200.ptxas_report() as report:
        arguments = inputs_of(first), inputs_of(second), gain, largest
        hlo = h200.compile_for_h200(run, *arguments).as_text()
        found = h200.stack_and_spills(report())
    kernels = 4 if form == "fp8" and rows > 8 else 2
    # Beside gate and up of 64 rows in int4, the norm's factors wait on the stack: they are stored
    # before the loop over the depth, and loaded after it.
    most = 64 if (form, second, rows) == ("int4", "gate_up", 64) else 0
    assert found[:-1] == [(0, 0, 0)] * (kernels - 1) and max(found[-1]) <= most, found
    assert hlo.count(" custom-call(") == kernels, hlo
    assert not [line for line in re.findall(OTHER_WORK, hlo) if "[]" not in line], hlo


@pytest.mark.parametrize("form", ["channel", "static"])
@pytest.mark.parametrize("rows", [1, 2, 8])
@pytest.mark.parametrize("name", ["qkv", "gate_up"])
def test_only_one_row_is_normed_in_the_product(name: str, rows: int, form: str) -> None:
    shape = dataclasses.replace(FP8[f"llama-3-8b {name} {form} rows 64"], rows=rows)
    inputs = jax.eval_shape(lambda: make_fp8(shape, 0))
    gain = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)

    def run(inputs: Any, gain: Any) -> Any:
        norm = fp8_matmul.RowNorm(gain, 1e-5)
        if name == "gate_up" and form == "channel":
            return fp8_matmul.measured_swiglu(inputs, norm=norm, implementation="mosaic_gpu")
        return fp8_matmul.fp8_matmul(inputs, norm=norm, implementation="mosaic_gpu")

    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(run, inputs, gain).as_text()
        found = h200.stack_and_spills(report())
    kernels = 1 if rows == 1 else 2
    assert found == [(0, 0, 0)] * kernels, found
    assert hlo.count(" custom-call(") == kernels, hlo
    assert not [line for line in re.findall(OTHER_WORK, hlo) if "[]" not in line], hlo


@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.parametrize("form", ["channel", "block", "static"])
def test_a_norm_and_the_codes_after_it_are_one_kernel(form: str, rows: int) -> None:
    shape = FP8[f"llama-3-8b qkv {form} rows 64"]
    weight = jax.eval_shape(lambda: make_fp8(shape, 0)).weights[0]
    x = jax.ShapeDtypeStruct((rows, 4096), jnp.bfloat16)
    gain = jax.ShapeDtypeStruct((4096,), jnp.bfloat16)
    from pallas_kernels.fp8_matmul import mosaic_gpu

    with h200.ptxas_report() as report:
        h200.compile_for_h200(
            lambda x, gain, weight: mosaic_gpu.quantised(
                fp8_matmul.Inputs(x=x, weights=(weight,)), fp8_matmul.RowNorm(gain, 1e-5)
            ),
            x,
            gain,
            weight,
        )
        assert h200.stack_and_spills(report()) == [(0, 0, 0)]


def spills_of(run: Any, *args: Any) -> list[tuple[int, int, int]]:
    with h200.ptxas_report() as report:
        h200.compile_for_h200(run, *args)
        return h200.stack_and_spills(report())


def float32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@pytest.mark.parametrize("rows", [65, 144, 256, 2016])
@pytest.mark.parametrize("name", IN_BLOCKS)
def test_many_rows_in_blocks_keep_their_sums_in_registers(name: str, rows: int) -> None:
    """A kernel quantises the rows, and one multiplies by each weight, which stays in place."""
    shape = dataclasses.replace(FP8[name], rows=rows)
    inputs = jax.eval_shape(lambda: make_fp8(shape, 0))
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}), h200.ptxas_report() as report:
        run = functools.partial(fp8_matmul.fp8_matmul, implementation="mosaic_gpu")
        hlo = h200.compile_for_h200(run, inputs).as_text()
        ptx = report()
    is_quantised = shape.depth % 1024 == 0  # by a kernel
    products = 1 if shape.swiglu else len(set(shape.widths))  # equal ones share a kernel
    assert h200.stack_and_spills(ptx) == [(0, 0, 0)] * (is_quantised + products)
    assert "serialized" not in ptx
    others = re.findall(OTHER_WORK, hlo)
    weights = [f"f8e4m3fn[{width},{shape.depth}]" for width in shape.widths]
    assert not [line for line in others for weight in weights if weight in line], others
    # The kernel that quantises allocates the scales of whole tiles.
    assert rows % 8 or not is_quantised or len(shape.widths) > 1 or not others


@pytest.mark.parametrize(("rows", "depth", "width"), [(144, 3584, 4608), (576, 2880, 5120)])
def test_biases_of_many_rows_in_blocks_spill_nothing(rows: int, depth: int, width: int) -> None:
    shape = dataclasses.replace(FP8[IN_BLOCKS[0]], rows=rows, depth=depth, widths=(width,))
    inputs = jax.eval_shape(lambda: make_fp8(shape, 0))
    inputs = dataclasses.replace(inputs, bias=bfloat16(width))
    run = functools.partial(fp8_matmul.fp8_matmul, implementation="mosaic_gpu")
    assert set(spills_of(run, inputs)) == {(0, 0, 0)}


@pytest.mark.parametrize("rows", [65, 256])
@pytest.mark.parametrize("width", [1536, 12288, 14336, 16384, 18944, 25600])
def test_swiglu_of_many_rows_keeps_rows_in_registers(width: int, rows: int) -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import Products, choose_tuning
    from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import swiglu_rows as run

    sums, columns = float32(rows, width), float32(width)
    products = Products(sums, sums, columns, columns, float32(rows))
    assert spills_of(run, products) == [(0, 0, 0)]
    assert choose_tuning(rows, width).rows == 1 + (rows > hopper.NUM_SMS and width <= 16384)


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (256, 14336),
        (128, 14336),
        (256, 12288),
        (128, 12288),
        (256, 8192),
        (256, 11264),
        (128, 16384),
        (256, 10240),
    ],
)
def test_gate_up_and_swiglu_of_many_rows_keep_their_sums_in_registers(
    rows: int, width: int
) -> None:
    """ptxas would serialise products whose sums it spills, which then take four times as long."""
    from pallas_kernels.fp8_matmul.mosaic_gpu import many_rows_swiglu as many

    x = fp8_matmul.Rows(jax.ShapeDtypeStruct((rows, 4096), jnp.float8_e4m3fn), float32(rows))
    codes = jax.ShapeDtypeStruct((width, 4096), jnp.float8_e4m3fn)
    weight = fp8_matmul.Fp8Weight(codes, float32(width))
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}), h200.ptxas_report() as report:
        h200.compile_for_h200(many.swiglu, x, weight, weight)
        ptx = report()
    assert h200.stack_and_spills(ptx) == [(0, 0, 0)] and "serialized" not in ptx
    assert ".reqnctapercluster 2, 1, 1" in ptx and ".multicast::cluster" in ptx


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("width", [1024, 4096, 5120, 8192])
def test_a_sum_of_many_rows_under_its_norm_keeps_a_row_in_registers(width: int, parts: int) -> None:
    from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import Sums, add_and_quantise

    sums = Sums(float32(parts, 256, width), float32(width), float32(256), bfloat16(256, width))

    def run(sums: Any, gain: Any) -> Any:
        return add_and_quantise(sums, fp8_matmul.RowNorm(gain, 1e-5))

    assert spills_of(run, sums, bfloat16(width)) == [(0, 0, 0)]


@pytest.mark.parametrize("rows", [80, 128, 208, 256])
def test_codes_go_from_gate_and_up_to_down_and_qkv_in_few_kernels_beside_cublas(rows: int) -> None:
    """The first one norms and quantises the rows of gate and up. Of 128 and 256 rows, gate, up and
    SwiGLU are one kernel, and another one quantises."""
    is_tiled = rows in (128, 256)

    def of(name: str) -> Any:
        shape = dataclasses.replace(FP8[f"llama-3-8b {name} channel rows 256"], rows=rows)
        return jax.eval_shape(lambda: make_fp8(shape, 0))

    def run(gate_up: Any, down: Any, qkv: Any, gain: Any) -> Any:
        norm, kernel = fp8_matmul.RowNorm(gain, 1e-5), "mosaic_gpu"
        inner = fp8_matmul.quantised_swiglu(gate_up, norm=norm, implementation=kernel)
        down = dataclasses.replace(down, x=inner.codes)
        stream, normed = fp8_matmul.product_and_norm(
            down, norm, scales=inner.scales, implementation=kernel
        )
        qkv = dataclasses.replace(qkv, x=normed.codes)
        scales = normed.scales
        return stream, fp8_matmul.fp8_matmul(qkv, scales=scales, implementation=kernel)

    options = dict(Ops(matmul="mosaic_gpu").compiler_options(cuda_graphs=True))
    arguments = of("gate_up"), of("down"), of("qkv"), bfloat16(4096)
    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(run, *arguments, options=options).as_text()
        assert h200.stack_and_spills(report()) == [(0, 0, 0)] * (3 + is_tiled)
    entry = hlo.split("ENTRY", 1)[1]
    assert entry.count('"mosaic_gpu_v2"') == 3 + is_tiled
    assert entry.count('"__cublas$lt$matmul$f8"') == (2 if is_tiled else 4)
    # The scales of qkv and its cast, and nothing else.
    [_] = re.findall(r"= \S+ (?:copy|fusion|transpose|pad|slice)\(.*", entry)


@pytest.mark.parametrize("rows", [144, 2016])
@pytest.mark.parametrize("name", ["llama-3-8b gate_up", "llama-3-8b down zeros", "smollm2 qkv"])
def test_many_rows_of_int4_in_order_are_one_kernel(name: str, rows: int) -> None:
    shape = dataclasses.replace(INT4[f"{name} rows 1"], rows=rows)
    inputs = jax.eval_shape(lambda: make_int4(shape, 0))
    hlo = int4_without_spills(dataclasses.replace(inputs, in_order=True))[0]
    assert hlo.count(" custom-call(") == 1 and not re.findall(OTHER_WORK, hlo), hlo


@pytest.mark.parametrize("rows", [72, 128, 200, 256])
@pytest.mark.parametrize("name", ["gate_up", "down", "qkv", "o"])
def test_many_rows_of_int4_are_one_kernel_and_the_sum_of_its_parts(name: str, rows: int) -> None:
    inputs = jax.eval_shape(
        lambda: make_int4(dataclasses.replace(INT4[f"llama-3-8b {name} rows 1"], rows=rows), 0)
    )
    hlo, said = int4_without_spills(inputs)
    assert hlo.count(" custom-call(") == 1, hlo
    others = re.findall(OTHER_WORK, hlo.split("ENTRY", 1)[1])
    assert len(others) == ("_parts" in said), others


def int4_without_spills(inputs: Any) -> tuple[str, str]:
    """Optimised HLO, and what ptxas says of the kernel whose products it does not serialise."""
    run = functools.partial(int4_matmul.int4_matmul, implementation="mosaic_gpu")
    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(run, inputs).as_text()
        said = report()
    assert h200.stack_and_spills(said) == [(0, 0, 0)] and "serialized" not in said, said
    return hlo, said


@pytest.mark.parametrize("fused", ["", "residual", "swiglu"])
def test_what_many_rows_of_int4_wait_for(fused: str) -> None:
    """Weights are copied before the kernel before has ended. Sums of two steps, whose loop LLVM
    unrolls, are complete when they are rounded."""
    shape = dataclasses.replace(INT4["llama-3-8b qkv rows 1"], rows=72, depth=128, width=64)
    weights = jax.eval_shape(lambda: make_int4(shape, 0)).weights * (1 + (fused == "swiglu"))
    bf16 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    inputs = int4_matmul.Inputs(
        x=bf16((72, 128)),
        weights=weights,
        residual=bf16((72, 64)) if fused == "residual" else None,
        swiglu=fused == "swiglu",
    )
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}):
        _, ptx = int4_without_spills(inputs)
    assert h200.loads_before_it_waits(ptx) and h200.sums_are_complete(ptx)
    assert ("griddepcontrol.launch_dependents" in ptx) is (fused == "swiglu")
