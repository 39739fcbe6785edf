"""Kernels commit their stores to shared memory before products and copies read them.

Products and copies read through the asynchronous proxy, which sees stores after a fence only. The
interpreter has no proxies, so these tests read the order of operations in the traced kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Jaxpr

from pallas_kernels.attention.inputs import Inputs
from pallas_kernels.attention.shapes import SHAPES
from pallas_kernels.types import Ref
from tests.kernels.attention import abstract
from tests.kernels.interpreter import needs_mosaic

pytestmark = needs_mosaic

READERS = {"wgmma_ref", "copy_smem_to_gmem"}  # through the asynchronous proxy


def inner(parameters: dict[str, Any]) -> Iterator[Jaxpr]:
    """Yield the jaxprs among an equation's parameters."""
    for value in parameters.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield x


def uncommitted(jaxpr: Jaxpr, stored: bool, found: list[str]) -> bool:
    """Return whether stores may be uncommitted after a jaxpr, if they were (`stored`) before it.

    found: grows by the readers that come between a store and its commit
    """
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in READERS and stored:
            found.append(name)
        if name == "commit_smem":
            stored = False
        elif name in ("swap", "addupdate"):
            stored |= "smem" in str(equation.invars[0].aval).lower()
        bodies = list(inner(equation.params))
        if name == "cond":
            stored = any([uncommitted(body, stored, found) for body in bodies])
            continue
        # The second time, a loop's body begins with the stores of its end.
        for body in bodies * 2 if name in ("scan", "while") else bodies:
            stored = uncommitted(body, stored, found)
    return stored


def early_readers(function: Callable[..., Any], *args: Any) -> list[str]:
    """Return the names of the operations of kernels that read stores before their commit."""
    found: list[str] = []
    uncommitted(jax.make_jaxpr(function)(*args).jaxpr, False, found)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_attention_commits_its_stores(name: str) -> None:
    from pallas_kernels.attention import mosaic_gpu
    from pallas_kernels.attention.mosaic_gpu import prefill

    shape = SHAPES[name]
    arrays: dict[str, Any] = abstract(shape)
    inputs = Inputs(**arrays, scale=shape.head_dim**-0.5, window=shape.window)
    long = mosaic_gpu.too_long(shape.rows, inputs.heads.queries_per_kv)
    kernel = prefill if long else mosaic_gpu
    assert not early_readers(kernel.paged_attention, inputs)


@pytest.mark.parametrize("commits", [True, False])
def test_finds_a_copy_of_uncommitted_stores(commits: bool) -> None:
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def body(out: Ref, tile: Ref) -> None:
        @pl.loop(0, 2)
        def _copy(i: jax.Array) -> None:
            plgpu.copy_smem_to_gmem(tile, out)
            tile[...] = jnp.zeros(tile.shape, tile.dtype)
            if commits:
                plgpu.commit_smem()

    shape = jax.ShapeDtypeStruct((128,), jnp.float32)
    kernel = plgpu.kernel(
        body, out_type=shape, scratch_types=[plgpu.SMEM(shape.shape, shape.dtype)]
    )
    assert early_readers(kernel) == ([] if commits else ["copy_smem_to_gmem"])
