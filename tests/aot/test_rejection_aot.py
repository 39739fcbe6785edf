"""Rejection sampling compiled for an H200: the launches that its module promises, nothing spilled,
nothing large kept."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sampling import Inputs, rejection_sample
from pallas_kernels.rejection_sampling.shapes import SHAPES, Shape
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

REAL = [name for name in SHAPES if not name.startswith("tiny")]
KERNELS = {
    "greedy": ["row_maxima", "match"],
    "synthetic": ["draw", "emit"],
    "probabilistic": ["row_sums", "judge", "draw", "emit"],
    "block": ["row_sums", "prefixes", "mass", "judge", "draw", "emit"],
}
LARGEST_TEMPORARY = (
    64 * 128 * 4 * 40
)  # bytes: partial results of 64 requests, a few arrays of 128 lanes a row


def structs(shape: Shape) -> dict[str, Any]:
    """The op's arrays for a shape, without their values; those that it does not take are left
    out."""
    B, K, V, width = shape.batch, shape.K, shape.vocab, shape.draft_vocab
    uniform = shape.sampled or shape.rule == "synthetic"
    dims = {
        "target_logits": (B, K + 1, V),
        "draft_logits": width and (B, K, width),
        "uniforms": uniform and (B, K),
        "recover_noise": shape.sampled and (B, V),
        "acceptance_rates": shape.rule == "synthetic" and (K,),
        "temperature": shape.sampled and (B,),
    }
    arrays: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(d, jnp.float32) for name, d in dims.items() if d
    }
    if shape.drawn:
        keys: Any = jax.ShapeDtypeStruct((B, 2), jnp.uint32)
        position: Any = jax.ShapeDtypeStruct((B,), jnp.int32)
        streams = {
            "uniforms": Stream(keys, position, 2),
            "recover_noise": Stream(keys, position, 3),
        }
        arrays |= {name: stream for name, stream in streams.items() if name in arrays}
    arrays |= {"draft_tokens": jax.ShapeDtypeStruct((B, K), jnp.int32)}
    arrays |= {name: jax.ShapeDtypeStruct((B,), jnp.bool_) for name in ("greedy", "active")}
    if width not in (None, V):
        arrays["target_to_draft"] = jax.ShapeDtypeStruct((V,), jnp.int32)
    return arrays


def compile_op(shape: Shape) -> tuple[Any, str]:
    """The executable, and ptxas's report on its kernels."""
    inputs = Inputs(**structs(shape), rule=shape.rule, sampled=shape.sampled)

    def function(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        return rejection_sample(inputs, implementation="mosaic_gpu")

    with h200.ptxas_report() as ptxas:
        return h200.compile_for_h200(function, inputs), ptxas()


@pytest.mark.parametrize("name", REAL)
def test_kernels_of_a_named_shape_on_an_h200(name: str) -> None:
    shape = SHAPES[name]
    compiled, report = compile_op(shape)
    wanted = KERNELS["greedy" if not shape.sampled else shape.rule]
    assert re.findall(r"Function properties for (\w+)_mosaic_gpu_kernel", report) == wanted
    assert h200.stack_and_spills(report) == [(0, 0, 0)] * len(wanted)
    program = compiled.as_text()
    entry = program[program.index("ENTRY") :]
    assert entry.count("custom-call(") == len(wanted)
    assert not re.findall(r"= \S+ (fusion|copy|convert|reduce|gather|while)\(", entry), (
        "XLA launches kernels of its own"
    )
    assert compiled.memory_analysis().temp_size_in_bytes < LARGEST_TEMPORARY


def test_noise_takes_no_approximate_logarithm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits are XLA's, also in the draw, whose kernel approximates what it can. By rate alone
    (synthetic) it has no other logarithm."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")  # beside ptxas's report
    _, ptx = compile_op(Shape(4, 3, 49_152, 12_000, "synthetic", drawn=True))
    assert ".entry draw_mosaic_gpu_kernel" in ptx
    assert "lg2.approx" not in ptx
