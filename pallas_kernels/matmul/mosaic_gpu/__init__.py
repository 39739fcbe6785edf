"""Matrix products of few rows on Hopper: weights stream through shared memory as the wide operand.

A decode step multiplies 1 to 64 rows by every weight of the model once, so its floor is the
weights' bytes over the memory's bandwidth. A block owns 64 output columns at a time, for the whole
depth. Its warpgroups share the depth, step by step in turn, each with its own ring of TMA copies.
So up to 200 KB are in flight for each SM, and the latency of one wgmma chain hides behind the
other's. wgmma computes the transposed product (W^T x^T), whose narrow axis is the rows padded to
8, 16, 32 or 64 instead of to 64.

Blocks have to lie evenly over the GPU's eight GPCs: the 16 or 18 SMs of one read 0.7 TB/s
together, so 64 blocks that crowd into four of them read 2.8 TB/s. Where tiles are few and deep (o
and down of an 8B model have 64), a block is therefore a cluster of two CTAs that share the depth.
For the same reason a kernel that would occupy whatever SMs this one leaves is not launched early
(plan.py has the table, docs/notes/block-placement.md the figures).

Every launch costs about two microseconds, so the bias, SwiGLU, the residual sum, and the RMS norm
between two products are fused. The first product multiplies its rows by the norm's gain and sums
the squares of each piece; the second divides its result by the root of their mean. (Normalising in
each block took 8 to 12 microseconds; docs/notes/shared-norms.md has other attempts.)

The order of summation, chosen in plan.py, depends on the weights alone. A warpgroup takes stripes
of the depth, the same ones whether a step is a stripe or half of one. The CTAs of a cluster send
their shares to the first one, which adds them in a fixed order. So a row's bits depend neither on
its neighbours nor on their number.

    sizes.py        static sizes, and the kernel's operands, results and scratch memory by name
    memory.py       the arrays of results and of scratch memory
    ring.py         TMA copies of weights and x
    tile_sum.py     the sums of a tile, over warpgroups
    cluster_sum.py  the sum over a cluster
    epilogue.py     norms, bias, SwiGLU, residual sum, and the result
    row_pieces.py   what the next product needs to know of the result's rows

many_rows_swiglu.py is another kernel: gate and up of 65 to 256 rows. any_rows.py multiplies any
number of rows in one order. many_rows_ring.py has their TMA copies, and result_pieces.py the copies
of results, which kernels of fp8 and int4 weights share.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.mosaic_gpu import cluster_sum
from pallas_kernels.matmul.mosaic_gpu.epilogue import (
    finish,
    load_bias,
    load_gain_and_residual,
    scale_of_norm,
)
from pallas_kernels.matmul.mosaic_gpu.memory import results_of, scratch_of
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Results, Scratch, Sizes
from pallas_kernels.matmul.mosaic_gpu.tile_sum import add_up, multiply
from pallas_kernels.matmul.plan import REDUCTION_BYTES, TILE_N, Product, Tuning, choose_tuning
from pallas_kernels.matmul.reference import Result
from pallas_kernels.types import Ref


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def matmul(inputs: Inputs, *, tuning: Tuning | None = None) -> Result:
    """Run the op; see pallas_kernels.matmul.matmul."""
    product = Product.of(inputs)
    tuning = tuning or choose_tuning(product)
    assert tuning is not None  # the public op has checked `unsupported`
    sizes = Sizes(product, tuning)
    operands = Operands(
        inputs.x, inputs.weights, inputs.squares, inputs.bias, inputs.residual, inputs.gain
    )
    (results,) = _kernel(sizes, inputs.eps, operands)(operands)
    if inputs.gain is None:
        return results.out
    return results.out, results.scaled, results.squares


def _kernel(sizes: Sizes, eps: float, operands: Operands[jax.Array]):
    """Return the kernel for these operands."""
    product, tuning = sizes.product, sizes.tuning
    steps, split = sizes.steps, tuning.split

    def body(operands: Operands[Ref], results: Results[Ref], scratch: Scratch[Ref]) -> None:
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        part = lax.axis_index(cluster_sum.AXIS) if split > 1 else 0
        finishes = (wg == 0) & (part == 0)
        # Copies fill rows past the last one with zeros, and do not write them.
        all_rows = pl.ds(block * 0, sizes.padded)
        ring = Ring(sizes, operands, scratch, block, wg, part, all_rows)
        tiles_here = sizes.tiles_of(block)
        turns = steps * tiles_here

        if tuning.weights_first:
            ring.fill_weights(turns)
        if sizes.pdl:
            plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; x does
        ring.fill_x(turns)
        if not tuning.weights_first:
            ring.fill_weights(turns)
        ring.await_x()

        scale = scale_of_norm(sizes, operands, scratch, eps, wg)

        @pl.loop(0, tiles_here)
        def _tile(index: jax.Array) -> None:
            tile = sizes.tile(block, index)
            here = (all_rows, pl.ds(tile * TILE_N, TILE_N))
            load_gain_and_residual(operands, scratch, finishes, tile, here)
            bias = load_bias(operands, tile)
            sums = multiply(ring, index, turns)

            def finish_tile(totals: list[jax.Array]) -> None:
                finish(sizes, results, scratch, totals, scale, bias, tile, here)

            add_up(ring, results, sums, finishes, index, tiles_here, finish_tile)

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(results_of(sizes),),
        grid=(sizes.blocks,),
        grid_names=("block",),
        **({"cluster": (split,), "cluster_names": (cluster_sum.AXIS,)} if split > 1 else {}),
        num_threads=tuning.warpgroups,
        thread_name="wg",
        kernel_name=product.kernel_name("matmul"),
        scratch_types=[scratch_of(sizes, operands)],
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=REDUCTION_BYTES if product.normed else 0
        ),
    )
