"""A Markov head's steps compiled for an H200: two kernels each, no spills."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import gumbel_sample
from pallas_kernels.markov_head import Inputs, markov_argmax, markov_draw
from pallas_kernels.markov_head.shapes import SHAPES, Shape, make_inputs
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]


OTHERS = {
    "24 rows": Shape(24, 64, 49_152),  # of a bucket that is no power of two
    "three warpgroups": Shape(32, 192, 49_152),  # and two that draw
}


@pytest.mark.parametrize("op", [markov_argmax, markov_draw], ids=["largest", "draw"])
@pytest.mark.parametrize("name", SHAPES | OTHERS)
def test_is_two_kernels_without_spills(name: str, op: Any) -> None:
    """The second one compares the best of all blocks. XLA adds no launch, and copies no logits."""

    def step(base: jax.Array, inputs: Inputs) -> jax.Array:
        return op(replace(inputs, base=base), implementation="mosaic_gpu")

    inputs = jax.eval_shape(lambda: make_inputs((SHAPES | OTHERS)[name], seed=0))
    donated = () if op is markov_argmax else (0,)
    with h200.ptxas_report() as report:
        compiled = h200.compile_for_h200(step, inputs.base, inputs, donate_argnums=donated)
        found = h200.stack_and_spills(report())
    assert found == [(0, 0, 0)] * 2, f"expected two kernels without spills, got {found}"
    hlo = compiled.as_text()
    entry = hlo[hlo.index("ENTRY") :]
    found = re.findall(r" (fusion|custom-call|copy|gather|reduce|pad|slice)\(", entry)
    assert found == ["custom-call"] * 2


def test_noise_is_made_by_the_instructions_of_gumbel_sample() -> None:
    """Which are XLA's (test_gumbel_aot.py), so both draw the same tokens."""
    inputs = jax.eval_shape(lambda: make_inputs(SHAPES["qwen3-8b rows 16"], seed=0))
    struct, rows, vocab = jax.ShapeDtypeStruct, inputs.rows, inputs.weight.shape[1]
    alone = gumbel_sample.Inputs(
        logits=struct((rows, vocab), jnp.float32),
        temperature=struct((rows,), jnp.float32),
        keys=struct((rows, 2), jnp.uint32),
        position=struct((rows,), jnp.int32),
        offset=struct((), jnp.int32),
        stream=1,
    )
    made = []
    for op, given in ((markov_draw, inputs), (gumbel_sample.gumbel_sample, alone)):
        run = functools.partial(op, implementation="mosaic_gpu")
        dumping = mock.patch.dict(os.environ, {"MOSAIC_GPU_DUMP_PTX": "1"})
        with dumping, h200.ptxas_report() as printed:
            h200.compile_for_h200(run, given)
            made.append(h200.arithmetic(printed()))
    assert made[0] == made[1] and "div.full.f32" in made[0] and len(made[0]) > 20
