"""The first of the highest of a row's partial results.

A kernel has a block for each row. It may start early (PDL), and waits for the kernel that writes
the results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.pieces import combine_maximum
from pallas_kernels.types import Ref
from pallas_kernels.warpgroup_kernel import launch


def first_of_highest(
    best: jax.Array, index: jax.Array, count: int, *, rows: int, name: str
) -> jax.Array:
    """Return the index int32 [rows] of each row's highest result; of equal ones the lowest.

    best: float32 [rows or more, a multiple of 128], index: int32 of the same shape; a row has
        `count` results
    """

    def combine(best_ref: Ref, index_ref: Ref, result_ref: Ref) -> None:
        row = lax.axis_index("block")
        result_ref[row] = combine_maximum(best_ref, index_ref, row, count)[1]

    result_type = jax.ShapeDtypeStruct((rows,), jnp.int32)
    (result,) = launch(name, combine, rows, (best, index), (result_type,))
    return result
