"""The kernel of a Markov head's step, with either ending: Largest or Written."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.markov_head.mosaic_gpu.block import Block, Memory, Sources, memory_of
from pallas_kernels.matmul.mosaic_gpu.memory import scratch_of
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Scratch, Sizes
from pallas_kernels.matmul.mosaic_gpu.tile_sum import add_up, multiply
from pallas_kernels.matmul.plan import REDUCTION_BYTES
from pallas_kernels.types import Ref


class Ending(Protocol):
    """What becomes of a block's logits. The first warpgroup runs it.

    name: of the kernel
    """

    name: str

    def __init__(self, block: Block, kept: Any, results: Any) -> None: ...

    @staticmethod
    def results_of(sizes: Sizes) -> Any:
        """Return the types of the kernel's results."""
        ...

    @staticmethod
    def memory_of(sizes: Sizes) -> Any:
        """Return the shared memory that it keeps something in."""
        ...

    def begin(self) -> None:
        """Run before the first tile, and start the first copies of base logits."""
        ...

    def take(self, index: jax.Array, logits: jax.Array) -> None:
        """Take tile `index`, float32 [padded rows, TILE_N], and start a copy of a later one."""
        ...

    def end(self) -> None:
        """Run after the last tile."""
        ...


def launch(
    sizes: Sizes,
    operands: Operands[Any],
    sources: Sources[Any],
    rows: int,
    kind: type[Ending],
) -> Any:
    """Run the kernel with an ending of this kind; returns the ending's results."""
    product, tuning, padded = sizes.product, sizes.tuning, sizes.padded

    def body(
        operands: Operands[Ref],
        sources: Sources[Ref],
        results: Any,
        scratch: Scratch[Ref],
        memory: Memory[Ref],
    ) -> None:
        number, wg = lax.axis_index("block"), lax.axis_index("wg")
        # Copies fill rows past the last one with zeros, and copies back leave them out.
        ring = Ring(sizes, operands, scratch, number, wg, 0, pl.ds(number * 0, padded))
        tiles_here = sizes.tiles_of(number)
        turns = sizes.steps * tiles_here
        ring.fill_weights(turns)
        if sizes.pdl:
            plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; tokens do
        block = Block(ring, sources, memory, tiles_here, sources.step[0])
        ending = kind(block, memory.ending, results)
        block.look_up(rows)
        pl.when(wg == 0)(ending.begin)
        block.arrange_rows()

        @pl.loop(0, tiles_here)
        def _tile(index: jax.Array) -> None:
            sums = multiply(ring, index, turns)

            def finish_tile(totals: list[jax.Array]) -> None:
                ending.take(index, block.logits(index, totals[0]))

            add_up(ring, None, sums, wg == 0, index, tiles_here, finish_tile)

        pl.when(wg == 0)(ending.end)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        out_type=(kind.results_of(sizes),),
        grid=(sizes.blocks,),
        grid_names=("block",),
        num_threads=tuning.warpgroups,
        thread_name="wg",
        kernel_name=f"{kind.name}_{product.depth}x{product.width}",
        scratch_types=[
            scratch_of(sizes, operands)._replace(out=None, x_ready=None),
            memory_of(sizes, rows, kind.memory_of(sizes)),
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
    )
    (results,) = kernel(operands, sources)
    return results
