"""Embedding and norm compiled for an H200 on a machine without one: one launch, no spills."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.embed_norm import Inputs, embed_norm
from pallas_kernels.embed_norm.shapes import SHAPES, Shape
from tests.support import h200

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(h200.unavailable() is not None, reason=str(h200.unavailable())),
]


def arguments(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    array = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    tokens = jax.ShapeDtypeStruct((shape.rows,), jnp.int32)
    found = {
        "tokens": tokens,
        "table": array(shape.vocab, shape.width),
        "weight": array(shape.width),
    }
    return found | (
        {"hidden": array(shape.rows, shape.width), "hidden_weight": array(shape.width)}
        if shape.draft
        else {}
    )


@pytest.mark.parametrize(
    "name",
    [
        "llama-3-8b rows 4",
        "EAGLE-3 of llama-3-8b rows 1",
        "EAGLE-3 of smollm2, residual normed, rows 4",
    ],
)
def test_is_one_launch_without_spills(name: str) -> None:
    shape = SHAPES[name]
    names, values = zip(*arguments(shape).items(), strict=True)

    def function(*arrays: jax.Array) -> Any:
        named: Any = dict(zip(names, arrays, strict=True))
        inputs = Inputs(**named, eps=1e-5, norm_residual=shape.norm_residual)
        residual, normed = embed_norm(inputs, implementation="mosaic_gpu")
        return (
            normed if shape.draft and not shape.norm_residual else (residual, normed)
        )  # an argument handed back would be copied

    with h200.ptxas_report() as report:
        hlo = h200.compile_for_h200(function, *values).as_text()
        found = h200.stack_and_spills(report())
    assert found and not any(map(any, found))
    launched = re.findall(r" (fusion|custom-call|copy|gather|concatenate)\(", hlo)
    assert launched == ["custom-call"]
