"""The launch of kernels whose blocks are one warpgroup each and share no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting


def launch(
    name: str,
    body: Callable[..., None],
    grid: int,
    operands: Sequence[jax.Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    launches_next: bool = False,
    approximate: bool = False,
) -> tuple[jax.Array, ...]:
    """Run body(*input and output refs) in every block of the grid, whose axis is "block".

    The kernel may start before the one before it ends, and waits for it (programmatic dependent
    launch, PDL).

    launches_next: let the kernel after it start at once
    approximate:   approximate exponentials and logarithms
    """
    pdl = not interpreting()  # the interpreter does not know dependent launches

    def kernel(*refs: Any) -> None:
        if pdl:
            if launches_next:
                plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        body(*refs)

    call = plgpu.kernel(
        kernel,
        out_type=tuple(outputs),
        grid=(grid,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=approximate,
            unsafe_no_auto_barriers=True,  # no memory is both read and written by a kernel
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    return call(*operands)
