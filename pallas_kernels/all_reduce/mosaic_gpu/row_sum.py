"""The sum of a row over the warpgroups of its block.

Pallas' own sums across warps share their memory, which only one warpgroup of a block may use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, gpu, memref, vector
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.all_reduce.mosaic_gpu.words import with_registers
from pallas_kernels.hopper import WARPS
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout


def row_sum(piece: int, layout: Layout, warpgroups: int) -> Callable[[Ref, jax.Array], jax.Array]:
    """Return the sum of a row's values, which holds it in every value.

    It takes shared memory, one float32 for each warp, and the warpgroup's piece of the row. It is
    called once in a kernel.
    """

    def run(_ctx: object, sums: Any, values: FragmentedArray) -> FragmentedArray:
        i32, index, f32 = ir.IntegerType.get_signless(32), ir.IndexType.get(), ir.F32Type.get()
        total = utils.c(0.0, f32)
        for register in values.registers.flat:
            for i in range(ir.VectorType(register.type).shape[0]):
                element = vector.extract(register, [], ir.DenseI64ArrayAttr.get([i]))
                total = arith.addf(total, element)
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, utils.shfl_bfly(total, distance))
        warp = arith.index_cast(index, arith.shrui(utils.thread_idx(), utils.c(5, i32)))
        memref.store(total, sums, [warp])  # all lanes of a warp hold the same bits
        gpu.barrier()
        total = utils.c(0.0, f32)
        for i in range(WARPS * warpgroups):
            total = arith.addf(total, memref.load(sums, [utils.c(i, index)]))
        registers = [vector.broadcast(r.type, total) for r in values.registers.flat]
        return with_registers(values, registers)

    return plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout),
        return_type=plgpu.ShapeDtypeStruct((piece,), jnp.float32, layout=layout),
    )(run)
