"""The metadata kernel compiles for an H200 as one launch, without spills."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.step_metadata import Inputs, StepMetadata, step_metadata
from pallas_kernels.step_metadata.shapes import SHAPES, make_inputs
from tests.support.h200 import compile_for_h200, ptxas_report, stack_and_spills, unavailable

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]


@pytest.mark.parametrize("name", SHAPES)
def test_is_one_launch_without_spills(name: str) -> None:
    inputs = make_inputs(SHAPES[name], seed=0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), inputs)

    def make(inputs: Inputs) -> StepMetadata:
        return step_metadata(inputs, implementation="mosaic_gpu")

    with ptxas_report() as report:
        hlo = compile_for_h200(make, abstract).as_text()
        spills = stack_and_spills(report())
    assert spills == [
        (32, 0, 0)
    ]  # the stack is libdevice's, for the cosine of an angle above 105,615
    entry = hlo[hlo.index("\nENTRY") :]
    assert re.findall(r" (?:fusion|copy|custom-call)\(", entry) == [" custom-call("]
