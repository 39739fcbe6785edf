"""The kernel of a Markov head's step, with either ending: Largest or Drawn."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.markov_head.mosaic_gpu.best import Found, results_of
from pallas_kernels.markov_head.mosaic_gpu.block import Block, Memory, Sources, memory_of
from pallas_kernels.matmul.mosaic_gpu.memory import scratch_of
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Scratch, Sizes
from pallas_kernels.matmul.mosaic_gpu.tile_sum import add_up, multiply
from pallas_kernels.matmul.plan import REDUCTION_BYTES
from pallas_kernels.types import Ref


class Ending(Protocol):
    """What becomes of a block's logits. The first warpgroup runs all but `help`.

    name: of the kernel
    """

    name: str

    def __init__(self, block: Block, memory: Any, results: Any, /) -> None: ...

    @staticmethod
    def slots(padded: int) -> int:
        """Return the slots of the ring of base logits."""
        ...

    @staticmethod
    def helpers(sizes: Sizes) -> int:
        """Return how many warpgroups run `help`. They multiply nothing."""
        ...

    @staticmethod
    def memory_of(sizes: Sizes) -> Any:
        """Return its shared memory and barriers."""
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

    def help(self, helper: jax.Array) -> None:
        """Run in warpgroup `helper` of the helpers, beside all others."""
        ...


def launch(
    sizes: Sizes,
    operands: Operands[Any],
    sources: Sources[Any],
    rows: int,
    kind: type[Ending],
) -> Found[jax.Array]:
    """Run the kernel with an ending of this kind; returns what its blocks find."""
    product, tuning, padded = sizes.product, sizes.tuning, sizes.padded
    slots, helpers = kind.slots(padded), kind.helpers(sizes)

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

        def wait_and_make() -> tuple[Block, Ending]:
            if sizes.pdl:
                plgpu.griddepcontrol_wait()
            block = Block(ring, sources, memory, tiles_here, sources.step[0], rows, slots)
            return block, kind(block, memory.ending, results)

        def multiply_tiles() -> None:
            ring.fill_weights(turns)  # the rest depends on the kernel before
            block, ending = wait_and_make()
            block.look_up()
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

        if not helpers:
            multiply_tiles()
            return
        pl.when(wg < tuning.warpgroups)(multiply_tiles)
        pl.when(wg >= tuning.warpgroups)(lambda: wait_and_make()[1].help(wg - tuning.warpgroups))

    kernel = plgpu.kernel(
        body,
        out_type=(results_of(sizes),),
        grid=(sizes.blocks,),
        grid_names=("block",),
        num_threads=tuning.warpgroups + helpers,
        thread_name="wg",
        kernel_name=f"{kind.name}_{product.depth}x{product.width}",
        scratch_types=[
            scratch_of(sizes, operands)._replace(out=None, x_ready=None),
            memory_of(sizes, rows, slots, kind.memory_of(sizes)),
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
    )
    (results,) = kernel(operands, sources)
    return results
