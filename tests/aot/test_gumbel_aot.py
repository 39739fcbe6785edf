"""Gumbel-max compiled for an H200: two launches, nothing spilled, and XLA's own arithmetic, so that
both draw the same tokens."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gumbel_sample import Inputs, gumbel_sample
from pallas_kernels.gumbel_sample.shapes import SHAPES
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]

REAL = [name for name in SHAPES if not name.startswith("tiny")]


def compiled(name: str, implementation: str, options: dict[str, Any] | None = None) -> Any:
    shape, struct = SHAPES[name], jax.ShapeDtypeStruct
    ints = struct((shape.rows,), jnp.int32)
    arrays: dict[str, Any] = {
        "logits": struct((shape.rows, shape.vocab), jnp.float32),
        "temperature": struct((shape.rows,), jnp.float32),
        "keys": struct((shape.rows, 2), jnp.uint32),
        "position": ints,
        "offset": struct((), jnp.int32),
        "token_ids": struct((shape.vocab,), jnp.int32) if shape.target_vocab else None,
    }

    def function(inputs: Inputs) -> jax.Array:
        return gumbel_sample(inputs, implementation=implementation)

    return h200.compile_for_h200(function, Inputs(**arrays, stream=1), options=options)


@pytest.mark.parametrize("name", REAL)
def test_two_launches_without_spills(name: str) -> None:
    with h200.ptxas_report() as ptxas:
        program = compiled(name, "mosaic_gpu").as_text()
        report = ptxas()
    assert re.findall(r"Function properties for (\w+)_mosaic_gpu_kernel", report) == [
        "gumbel_draw",
        "gumbel_combine",
    ]
    assert h200.stack_and_spills(report) == [(0, 0, 0)] * 2
    entry = program[program.index("ENTRY") :]
    assert entry.count("custom-call(") == 2
    assert not re.findall(r"= \S+ (fusion|copy|convert|reduce|gather|while)\(", entry), (
        "XLA launches kernels of its own"
    )


def test_logarithms_and_the_quotient_are_xlas(tmp_path: Path) -> None:
    """Of the same bits: then kernel and reference round alike, and their tokens are equal to the
    last tie."""
    name = "llama3-8b draft, batch 64"
    compiled(name, "reference", {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": ".*"})
    reference = h200.arithmetic("".join(path.read_text() for path in tmp_path.glob("*.ptx")))
    with mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"}), h200.ptxas_report() as printed:
        compiled(name, "mosaic_gpu")
        kernel = h200.arithmetic(printed())
    assert "div.full.f32" in kernel and len(kernel) > 20
    # A subnormal's log: x 2^23, of x or of -x.
    signless = lambda ops: {op.replace("0fCB000000", "0f4B000000") for op in ops}  # noqa: E731
    assert signless(kernel) == signless(reference)
