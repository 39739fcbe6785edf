"""A greedy draft of a Markov head compiled for an H200: one kernel and one of XLA's, no spills."""

from __future__ import annotations

import re

import jax
import pytest

from pallas_kernels.markov_argmax import Inputs, markov_argmax
from pallas_kernels.markov_argmax.shapes import SHAPES, Shape, make_inputs
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]


def draft(inputs: Inputs) -> jax.Array:
    return markov_argmax(inputs, implementation="mosaic_gpu")


PADDED = {"24 rows": Shape(24, 64, 49_152)}  # of a bucket that is no power of two


@pytest.mark.parametrize("name", SHAPES | PADDED)
def test_is_two_launches_without_spills(name: str) -> None:
    arrays = jax.eval_shape(lambda: make_inputs((SHAPES | PADDED)[name], seed=0))
    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(draft, arrays).as_text()
        found = h200.stack_and_spills(report())
    assert found == [(0, 0, 0)], f"expected one kernel without spills, got {found}"
    entry = hlo[hlo.index("ENTRY") :]
    launched = re.findall(r" (fusion|custom-call|copy|gather|reduce|pad|slice)\(", entry)
    assert launched == ["custom-call", "fusion"]
