"""The first of the highest of a row's partial results.

A kernel has a block for each row. It may start early (PDL), and waits for the kernel that writes
the results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.pieces import combine_maximum
from pallas_kernels.types import Ref


def first_of_highest(
    best: jax.Array, index: jax.Array, count: int, *, rows: int, name: str
) -> jax.Array:
    """Return the index int32 [rows] of each row's highest result; of equal ones the lowest.

    best: float32 [rows or more, a multiple of 128], index: int32 of the same shape; a row has
        `count` results
    """
    pdl = not interpreting()  # the interpreter does not know dependent launches

    def body(best_ref: Ref, index_ref: Ref, result_ref: Ref) -> None:
        if pdl:
            plgpu.griddepcontrol_wait()
        row = lax.axis_index("block")
        result_ref[row] = combine_maximum(best_ref, index_ref, row, count)[1]

    kernel = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((rows,), jnp.int32),),
        grid=(rows,),
        grid_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,  # no memory is both read and written
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
    )
    (result,) = kernel(best, index)
    return result
