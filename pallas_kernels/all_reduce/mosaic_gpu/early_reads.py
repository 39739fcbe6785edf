"""Reads of the next product's weights into L2, while the devices exchange.

An exchange takes some microseconds in which memory would be idle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax._src.lib.mlir.dialects import arith, gpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.all_reduce.inputs import Span
from pallas_kernels.peers.ptx import Value, address_of, at, below, c32, i32, inline_ptx

CHUNK = 4096  # bytes that a thread asks for at once


def early_reads(
    spans: Sequence[tuple[int, Span]], num_arrays: int, first: int, blocks: int
) -> Callable[..., None]:
    """Return a function of arrays that has `blocks` blocks, from block `first` on, read the spans.

    spans: of the array with each index
    """

    def run(_ctx: object, *arrays: Value) -> None:
        block = arith.subi(arith.index_cast(i32(), gpu.block_id(gpu.Dimension.x)), c32(first))
        # Neighbouring chunks go to different blocks.
        chunk = arith.addi(arith.muli(utils.thread_idx(), c32(blocks)), block)
        offset = arith.muli(chunk, c32(CHUNK))
        for index, span in spans:
            start = arith.addi(offset, c32(span.start))
            inline_ptx(
                f"cp.async.bulk.prefetch.L2.global [$0], {CHUNK};",
                at(address_of(arrays[index]), start),
                predicate=below(chunk, c32(span.size // CHUNK)),
                has_side_effects=True,
            )

    return plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * num_arrays)(run)
