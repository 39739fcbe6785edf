"""Experts compiled for an H200: a decode step reads the weights where they lie, and makes no copy, transposed, gathered or widened."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from jaxspec.moe import MoEConfig, experts
from tests.support.h200 import compile_for_h200, unavailable

pytestmark = [pytest.mark.aot, pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))]
# hidden size, experts, whether they have a bias
SHAPES = {
    "gpt-oss-20b": (2880, MoEConfig(32, 4, 2880, gate="clamped"), True),
    "glm-4.7-flash": (2048, MoEConfig(64, 4, 1536), False),
}


@pytest.mark.parametrize("rows", [1, 4, 64, 2048])
@pytest.mark.parametrize("model", SHAPES)
def test_experts_are_read_where_they_lie(model: str, rows: int) -> None:
    """Temporary memory: activations only, in a prefill chunk also the weights of a few blocks."""
    hidden, cfg, bias = SHAPES[model]
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    count, size = cfg.num_experts, cfg.intermediate_size
    params = {"gate_up": array(count, hidden, 2 * size), "down": array(count, size, hidden)}
    if bias:
        params |= {"gate_up_bias": array(count, 2 * size), "down_bias": array(count, hidden)}
    chosen = array(rows, cfg.top_k, dtype=jnp.int32), array(rows, cfg.top_k, dtype=jnp.float32)
    options = {"xla_gpu_enable_triton_gemm": False}  # as RoundConfig.compiler_options
    compiled = compile_for_h200(lambda p, x, ids, w: experts(p, cfg, x, ids, w), params, array(rows, hidden), *chosen, options=options)
    expert = 2 * hidden * 2 * size
    assert compiled.memory_analysis().temp_size_in_bytes < {1: 0.1, 4: 0.1, 64: 6, 2048: 26}[rows] * expert
