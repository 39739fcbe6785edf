"""Experts compiled for an H200: their weights are read where they lie; with the kernels few
launches, and no copy of any kind."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxspec.config import REFERENCE_OPS, Ops
from jaxspec.layers.moe import BLOCKS_AT_ONCE, MoEConfig, experts, route
from jaxspec.layers.params import Weight
from pallas_kernels.moe.mxfp4 import BLOCK, COLUMNS, UNIT, Mxfp4Weight
from pallas_kernels.moe.shapes import SHAPES as EXPERTS
from pallas_kernels.moe.shapes import make_inputs
from pallas_kernels.router.shapes import SHAPES as ROUTERS
from tests.support import h200
from tests.support.h200 import compile_for_h200, unavailable

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
# hidden size, experts, router, whether experts have a bias
MODELS = {
    "gpt-oss-20b": (2880, MoEConfig(32, 4, 2880, gate="clamped"), "softmax", True),
    "glm-4.7-flash": (2048, MoEConfig(64, 4, 1536), "sigmoid", False),
    "qwen3-30b-a3b": (2048, MoEConfig(128, 8, 768), "softmax", False),
}
PACKED = "gpt-oss-20b mxfp4"
WITH_PACKED = MODELS | {PACKED: MODELS["gpt-oss-20b"]}
# Temporary memory by rows, in units of two thirds of an expert: for 64 rows the activations of
# every expert, for 2048 those of each (row, expert) pair, and the weights of a few blocks.
MEMORY = {
    "gpt-oss-20b": {1: 0.1, 4: 0.1, 64: 6, 2048: 26},
    "glm-4.7-flash": {1: 0.1, 4: 0.1, 64: 6, 2048: 26},
    "qwen3-30b-a3b": {1: 0.1, 4: 0.1, 64: 14, 2048: 41},  # half the size, twice the number
}
OPTIONS = {"xla_gpu_enable_triton_gemm": False}  # as RoundConfig.compiler_options


def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def weights_of(model: str) -> dict[str, Any]:
    hidden, cfg, _, bias = WITH_PACKED[model]
    count, size = cfg.num_experts, cfg.intermediate_size
    shapes = {"gate_up": (count, hidden, 2 * size), "down": (count, size, hidden)}
    params: dict[str, Any] = {name: Weight(array(*shape)) for name, shape in shapes.items()}
    if model == PACKED:
        for name, (_, depth, width) in shapes.items():
            units = array(count, width // COLUMNS, depth // BLOCK, UNIT, dtype=jnp.int32)
            params[name] = Mxfp4Weight(units, wide=False)
    return params | (
        {"gate_up_bias": array(count, 2 * size), "down_bias": array(count, hidden)} if bias else {}
    )


@pytest.mark.parametrize("rows", [1, 4, 64, 2048])
@pytest.mark.parametrize("model", MODELS)
def test_experts_are_read_where_they_lie(model: str, rows: int) -> None:
    """Temporary memory: activations only, in a prefill chunk also the weights of a few blocks."""
    hidden, cfg, _, _ = MODELS[model]
    chosen = array(rows, cfg.top_k, dtype=jnp.int32), array(rows, cfg.top_k, dtype=jnp.float32)
    multiply = lambda p, x, ids, w: experts(p, cfg, x, ids, w, REFERENCE_OPS)  # noqa: E731
    compiled = compile_for_h200(
        multiply, weights_of(model), array(rows, hidden), *chosen, options=OPTIONS
    )
    expert = 2 * hidden * 2 * cfg.intermediate_size
    assert compiled.memory_analysis().temp_size_in_bytes < MEMORY[model][rows] * expert


# Router, two products, sum; of more than 8 rows also the plan's six.
LAUNCHES = {1: 4, 4: 4, 6: 4, 16: 10, 64: 10, 96: 10}
# XLA makes the plan of 512 choices of 128 experts in one launch more.
MORE_LAUNCHES = {("qwen3-30b-a3b", 64): 1, ("qwen3-30b-a3b", 96): 1}


@pytest.mark.parametrize("rows", LAUNCHES)
@pytest.mark.parametrize("model", WITH_PACKED)
def test_kernels_leave_the_weights_alone_and_launch_little(model: str, rows: int) -> None:
    """No copy, gather or transpose of anything expert-shaped, no sort, no XLA product, no
    spills."""
    hidden, cfg, kind, _ = WITH_PACKED[model]
    bias_dtype = ROUTERS[f"{model.removesuffix(' mxfp4')} rows 4"].bias_dtype
    kernels = Ops(moe="mosaic_gpu")

    def block(p: Any, router: Any, bias: Any, x: Any) -> jax.Array:
        return x + experts(p, cfg, x, *route(x, router, bias, cfg, kind, kernels), kernels)

    router = (
        array(hidden, cfg.num_experts),
        None if bias_dtype is None else array(cfg.num_experts, dtype=jnp.dtype(bias_dtype)),
    )
    with h200.ptxas_report() as report:
        compiled = compile_for_h200(
            block, weights_of(model), *router, array(rows, hidden), options=OPTIONS
        )
        found = h200.stack_and_spills(report())
    assert found == [(0, 0, 0)] * 3
    entry = compiled.as_text().split("ENTRY", 1)[1]
    launches = re.findall(
        r"= .*? (copy|fusion|transpose|custom-call|sort|dot|pad|slice|convert|gather|reduce)\(",
        entry,
    )
    assert launches.count("custom-call") == 3 and set(launches) <= {"custom-call", "fusion"}, entry
    assert len(launches) <= LAUNCHES[rows] + MORE_LAUNCHES.get((model, rows), 0), launches
    assert not re.search(
        rf"= \S*\[{cfg.num_experts},(?:{hidden}|{cfg.intermediate_size}),\d+\]\S* (?!parameter)",
        entry,
    )
    places = 2 * rows * cfg.top_k + 16 * cfg.num_experts  # rows beside each other, padded
    assert (
        compiled.memory_analysis().temp_size_in_bytes
        < 2 * places * (2 * hidden + cfg.intermediate_size) + 1e6
    )


# Rows in fp8, two products, sum; of more than 8 rows also the plan's, and the rows' gathers.
LAUNCHES_OF_CODES = {("fp8-block", 4): 4, ("int4", 4): 3, ("fp8-block", 64): 12, ("int4", 64): 10}


@pytest.mark.parametrize(("form", "rows"), LAUNCHES_OF_CODES)
def test_kernels_read_codes_where_they_lie(form: str, rows: int) -> None:
    """No spills, no copy of codes or scales, and no array of dequantised weights."""
    from pallas_kernels.moe import mosaic_gpu

    shape = EXPERTS[f"qwen3-30b-a3b {form} rows {rows}"]
    inputs = jax.eval_shape(lambda: make_inputs(shape, 0))
    with h200.ptxas_report() as report:
        compiled = compile_for_h200(mosaic_gpu.experts, inputs, options=OPTIONS)
        found = h200.stack_and_spills(report())
    assert found == [(0, 0, 0)] * (3 if form == "fp8-block" else 2)
    entry = compiled.as_text().split("ENTRY", 1)[1]
    launches = re.findall(
        r"= .*? (copy|fusion|transpose|custom-call|sort|dot|pad|slice|convert|gather|reduce)\(",
        entry,
    )
    assert set(launches) <= {"custom-call", "fusion"}, entry
    assert len(launches) <= LAUNCHES_OF_CODES[form, rows], launches
    assert not re.search(rf"= \S*\[{shape.num_experts},\d+,\d+\S* (?!parameter)", entry)
    places = 2 * rows * shape.top_k + 16 * shape.num_experts
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 2 * places * (2 * shape.hidden + shape.size) + 1e6


@pytest.mark.parametrize("form", ["fp8-block", "int4"])
def test_codes_of_many_rows_become_plain_a_few_blocks_at_a_time(form: str) -> None:
    shape = EXPERTS[f"qwen3-30b-a3b {form} rows 4"]
    hidden, cfg, _, _ = MODELS["qwen3-30b-a3b"]
    weights = jax.eval_shape(lambda: make_inputs(shape, 0))
    params = {"gate_up": weights.gate_up, "down": weights.down}
    chosen = array(2048, cfg.top_k, dtype=jnp.int32), array(2048, cfg.top_k, dtype=jnp.float32)
    multiply = lambda p, x, ids, w: experts(p, cfg, x, ids, w, Ops(moe="mosaic_gpu"))  # noqa: E731
    compiled = compile_for_h200(multiply, params, array(2048, hidden), *chosen, options=OPTIONS)
    expert = 2 * hidden * 2 * cfg.intermediate_size
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < 1.3 * MEMORY["qwen3-30b-a3b"][2048] * expert


def test_packed_experts_of_many_rows_become_plain_a_few_blocks_at_a_time() -> None:
    """With the kernel, whose array is cuBLAS's operand; the memory is that of plain experts."""
    hidden, cfg, _, _ = WITH_PACKED[PACKED]
    chosen = array(2048, cfg.top_k, dtype=jnp.int32), array(2048, cfg.top_k, dtype=jnp.float32)
    multiply = lambda p, x, ids, w: experts(p, cfg, x, ids, w, Ops(moe="mosaic_gpu"))  # noqa: E731
    with h200.ptxas_report() as report:
        compiled = compile_for_h200(
            multiply, weights_of(PACKED), array(2048, hidden), *chosen, options=OPTIONS
        )
        assert h200.stack_and_spills(report()) == [(0, 0, 0)] * 2
    expert = 2 * hidden * 2 * cfg.intermediate_size
    used = compiled.memory_analysis().temp_size_in_bytes
    assert used < MEMORY["gpt-oss-20b"][2048] * expert
    blocks = (
        rf"bf16\[{BLOCKS_AT_ONCE},{hidden},\d+\]\S* (?!custom-call|bitcast|get-tuple|parameter)"
    )
    assert not re.search(rf"= {blocks}", compiled.as_text())


def test_a_softmax_over_128_experts_does_not_spill() -> None:
    """With a bias, and with weights that are not divided by their sum."""
    hidden, count, kernels = 2048, 128, Ops(moe="mosaic_gpu")
    cfg = MoEConfig(count, 8, 768, norm_top_k=False)
    choose = lambda x, router, bias: route(x, router, bias, cfg, "softmax", kernels)  # noqa: E731
    with h200.ptxas_report() as report:
        compile_for_h200(
            choose, array(64, hidden), array(hidden, count), array(count), options=OPTIONS
        )
        assert h200.stack_and_spills(report()) == [(0, 0, 0)]


def test_dimensions_are_those_that_are_benchmarked() -> None:
    for name, (hidden, cfg, kind, bias) in MODELS.items():
        shape, router = EXPERTS[f"{name} rows 4"], ROUTERS[f"{name} rows 4"]
        assert (shape.hidden, shape.num_experts, shape.top_k, shape.size) == (
            hidden,
            cfg.num_experts,
            cfg.top_k,
            cfg.intermediate_size,
        )
        assert (shape.gate, shape.bias, router.kind, router.hidden, router.num_experts) == (
            cfg.gate,
            bias,
            kind,
            hidden,
            cfg.num_experts,
        )


def test_without_the_kernels_nothing_of_them_is_compiled() -> None:
    hidden, cfg, _, _ = MODELS["glm-4.7-flash"]
    chosen = array(4, cfg.top_k, dtype=jnp.int32), array(4, cfg.top_k, dtype=jnp.float32)
    multiply = lambda p, x, ids, w: experts(p, cfg, x, ids, w, REFERENCE_OPS)  # noqa: E731
    assert (
        "mosaic_gpu"
        not in compile_for_h200(
            multiply, weights_of("glm-4.7-flash"), array(4, hidden), *chosen, options=OPTIONS
        ).as_text()
    )
