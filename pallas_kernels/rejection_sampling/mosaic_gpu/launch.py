"""One call of rejection sampling as its kernels see it, and how each kernel is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.pieces import LANES, Pieces


@dataclass(frozen=True)
class Problem:
    """What is static about one call: requests, drafts of each, and how rows are cut (rows of all requests lie below each other).

    sweep, draft_sweep (None: one-hot drafts): in the pass over all rows of the target, of the draft. draw: where noise or q is read too.
    accept_stream, recover_stream: numbers of the random streams (noise.Stream); None: their numbers are given.
    """

    batch: int
    num_drafts: int
    rule: str
    sampled: bool
    sweep: Pieces
    draw: Pieces
    draft_sweep: Pieces | None = None
    accept_stream: int | None = None
    recover_stream: int | None = None

    @property
    def rows(self) -> int:
        return self.num_drafts + 1


class Refs(SimpleNamespace):
    """A kernel's inputs and outputs by name; an input that the call lacks is None."""

    def __getattr__(self, name: str) -> Any:
        return None


def partials(rows: int, *dtypes: Any) -> list[jax.ShapeDtypeStruct]:
    """A partial result a piece of each row: [rows, LANES] of every dtype. Lanes past the last piece are never written."""
    return [jax.ShapeDtypeStruct((rows, LANES), dtype) for dtype in dtypes]


def launch(
    kernel_name: str,
    body: Callable[[Refs, jax.Array], None],
    grid: int,
    inputs: dict[str, jax.Array | None],
    outputs: dict[str, jax.ShapeDtypeStruct],
    approximate: bool = False,
) -> dict[str, jax.Array]:
    """Run body(refs, block) for every block of the grid, one warpgroup each."""
    present = {name: array for name, array in inputs.items() if array is not None}
    overlapped = not interpreting()  # the interpreter does not know dependent launches

    def kernel(*refs: Any) -> None:
        if overlapped:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        body(Refs(**dict(zip([*present, *outputs], refs, strict=True))), lax.axis_index("block"))

    results = plgpu.kernel(
        kernel,
        out_type=tuple(outputs.values()),
        grid=(grid,),
        grid_names=("block",),
        kernel_name=kernel_name,
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate,
            unsafe_no_auto_barriers=True,  # no memory is both read and written by a kernel
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )(*present.values())
    return dict(zip(outputs, results, strict=True))
