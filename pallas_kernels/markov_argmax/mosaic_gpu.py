"""A greedy draft of a Markov head on Hopper: one launch, and XLA compares what its blocks found.

The product is the matmul op's, with its rings, sums and order of summation. So logits have the
bits that the op would write. Two things are different:

- Each block looks up W1's rows itself, while its first tiles of W2 arrive. A copy cannot write a
  single row of a tile that wgmma reads. So rows are copied aside, and go through registers.
- No logit is written. For each of its places in a tile, a thread keeps the largest logit of all the
  block's tiles. The block compares the places once, at the end.

The base logits of the next tiles are copied ahead, as the weights are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gumbel_sample.reference import highest_along
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.markov_argmax.inputs import Inputs
from pallas_kernels.matmul.mosaic_gpu.epilogue import by_row
from pallas_kernels.matmul.mosaic_gpu.memory import scratch_of
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Scratch, Sizes
from pallas_kernels.matmul.mosaic_gpu.tile_sum import add_up, multiply
from pallas_kernels.matmul.plan import (
    MAX_SMEM,
    REDUCTION_BYTES,
    TILE_N,
    Order,
    Product,
    Tuning,
    choose_tuning,
    is_resident,
    padded_rows,
    smem_bytes,
    unfit_rows,
)
from pallas_kernels.matmul.plan import unsupported as unsupported_product
from pallas_kernels.mosaic import load
from pallas_kernels.pieces import NO_INDEX
from pallas_kernels.types import Barrier, Index, Ref

T = TypeVar("T")  # an array, its type, or the kernel's ref

# Of a tile of eight rows, each warp has two, with 64 columns, which wgmma reads together.
LAYOUT = plgpu.Layout.TILED(
    fa.Tiling(((8, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)


class Sources(NamedTuple, Generic[T]):
    """What the kernel reads beside W2; see Inputs. step: int32 [1]"""

    base: T
    step: T
    token: T
    table: T


class Found(NamedTuple, Generic[T]):
    """The largest logit of each block's columns, [blocks, padded rows], or one block's.

    value: float32
    id:    int32, of its first column
    """

    value: T
    id: T


class Memory(NamedTuple, Generic[T]):
    """Shared memory and barriers of a block, beside those of the product.

    rows:  W1's rows, [steps, padded rows, tile_k]
    base:  a ring of tiles of the base logits
    best:  float32 [padded rows, TILE_N], the largest logit at each place of the block's tiles
    tile:  int32 of the same shape, the first tile that has it
    found: of the block

    rows_ready: for each warpgroup: its part of the rows has arrived
    base_ready: for each slot of the ring
    """

    rows: T
    base: T
    best: T
    tile: T
    found: Found[T]
    rows_ready: Barrier
    base_ready: Barrier


def unsupported(inputs: Inputs) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    rows, rank = inputs.rows, inputs.rank
    if reason := unfit_rows(rows):  # before product_of pads them; base logits are not padded
        return reason
    product = product_of(inputs)
    if reason := unsupported_product(product):
        return reason
    order = Order.of(product)
    if order is not None and order.split > 1:
        return f"expected a rank that one block sums, got {rank}"
    if tuning_of(product) is None:
        return f"expected W1's rows to fit into shared memory, got {rows} of {rank} numbers"
    return None


def product_of(inputs: Inputs) -> Product:
    """Return the product with W2. Rows are padded, which changes no bits."""
    x = jax.ShapeDtypeStruct((padded_rows(inputs.rows), inputs.rank), inputs.table.dtype)
    return Product(x, (inputs.weight,), out_dtype=jnp.float32)


def tuning_of(product: Product) -> Tuning | None:
    """Return the product's tuning, with as many stages as fit beside Memory; None if none do."""
    tuning = choose_tuning(product)
    if tuning is None or not is_resident(product, product.depth):
        return None
    padded = product.rows
    tile = 4 * TILE_N * padded
    # Memory in place of the product's result: W1's rows, the ring of base logits, best and tile,
    # and a KB for each small array.
    more = 2 * padded * product.depth + (tiles_ahead(padded) + 2 - 1) * tile + 4 * 1024
    for stages in range(tuning.stages, 1, -1):
        fewer = replace(tuning, stages=stages)
        if smem_bytes(product, fewer) + more <= MAX_SMEM:
            return fewer
    return None


def tiles_ahead(padded: int) -> int:
    """Return how many tiles of base logits are copied at once; those of many rows are larger."""
    return 4 if padded <= 16 else 2


# Compiled as a function of its own, so that programs share one kernel.
@lowered_once(static_argnames="tuning")
def markov_argmax(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.markov_argmax.markov_argmax."""
    product = product_of(inputs)
    tuning = tuning or tuning_of(product)
    assert tuning is not None  # the public op has checked `unsupported`
    sizes = Sizes(product, tuning)
    operands = Operands(None, (inputs.weight,), None, None, None)
    sources = Sources(inputs.base, inputs.step.reshape(1), inputs.token, inputs.table)
    (found,) = _kernel(sizes, operands, inputs.rows)(operands, sources)
    return highest_along((found.value[:, : inputs.rows], found.id[:, : inputs.rows]), 0)[1]


@dataclass(frozen=True)
class _Warpgroup:
    """A warpgroup of a block, in the kernel.

    tiles_here: tiles of the block
    step:       of the base logits
    """

    ring: Ring
    sources: Sources[Ref]
    memory: Memory[Ref]
    tiles_here: jax.Array
    step: jax.Array

    def look_up(self, rows: int) -> None:
        """Start the copies of W1's rows: a warpgroup's part of the depth."""
        ring, sources, memory = self.ring, self.sources, self.memory
        last = sources.table.shape[0] - 1
        tokens = [jnp.clip(sources.token[row], 0, last) for row in range(rows)]

        @pl.loop(0, ring.sizes.steps)
        def _step(i: jax.Array) -> None:
            depth, slot = ring.depth_of(ring.step_of_cta(i)), ring.resident_step(i)
            for row, token in enumerate(tokens):
                plgpu.copy_gmem_to_smem(
                    sources.table.at[pl.ds(token, 1), depth],
                    memory.rows.at[slot, pl.ds(row, 1)],
                    memory.rows_ready.at[ring.wg],
                )

    def arrange_rows(self) -> None:
        """Write the rows that have arrived as wgmma reads them.

        Rows past the last one hold what the memory held before. Their results are dropped.
        """
        ring, memory = self.ring, self.memory
        plgpu.barrier_wait(memory.rows_ready.at[ring.wg])

        @pl.loop(0, ring.sizes.steps)
        def _step(i: jax.Array) -> None:
            slot = ring.resident_step(i)
            ring.scratch.x.at[slot][...] = load(memory.rows.at[slot], LAYOUT, optimized=False)

        plgpu.commit_smem()

    def load_base(self, index: Index) -> None:
        """Start the copy of the base logits of tile `index`, if the block has it."""
        memory, slot = self.memory, self.slot(index)

        @pl.when(index < self.tiles_here)
        def _copy() -> None:
            columns = pl.ds(self.tile_number(index) * TILE_N, TILE_N)
            source = self.sources.base.at[self.ring.all_rows, self.step, columns]
            plgpu.copy_gmem_to_smem(source, memory.base.at[slot], memory.base_ready.at[slot])

    def tile_number(self, index: Index) -> jax.Array:
        """Return the number of the block's tile `index` among all."""
        return self.ring.sizes.tile(self.ring.block, index)

    def slot(self, index: Index) -> jax.Array:
        """Return the slot of tile `index` in the ring of base logits."""
        return lax.rem(jnp.int32(index), tiles_ahead(self.ring.sizes.padded))

    def begin(self) -> None:
        """Begin with -inf everywhere in the first tile, which a row without more has."""
        shape, memory = self.memory.best.shape, self.memory
        memory.best[...] = plgpu.layout_cast(jnp.full(shape, -jnp.inf, jnp.float32), LAYOUT)
        first = jnp.full(shape, self.tile_number(0), jnp.int32)
        memory.tile[...] = plgpu.layout_cast(first, LAYOUT)

    def keep(self, index: jax.Array, added: jax.Array) -> None:
        """Keep what tile `index` has that is larger. added: the product, [TILE_N, padded rows]"""
        memory, slot, halves = self.memory, self.slot(index), self.ring.scratch.halves
        assert halves is not None  # of a float32 product
        plgpu.barrier_wait(memory.base_ready.at[slot])
        base = load(memory.base.at[slot], LAYOUT, optimized=False)
        logits = base + by_row(added, halves)
        best = load(memory.best, LAYOUT, optimized=False)
        tile = load(memory.tile, LAYOUT, optimized=False)
        higher = logits > best  # of equal logits the first stays; NaN is never higher
        memory.best[...] = jnp.where(higher, logits, best)
        memory.tile[...] = jnp.where(higher, self.tile_number(index), tile)
        plgpu.commit_smem()  # all threads have read the slot
        self.load_base(index + tiles_ahead(self.ring.sizes.padded))

    def compare(self, results: Found[Ref]) -> None:
        """Write the largest of all that was kept."""
        found = self.memory.found
        best = load(self.memory.best, LAYOUT, optimized=False)
        tile = load(self.memory.tile, LAYOUT, optimized=False)
        column = plgpu.broadcasted_iota(jnp.int32, best.shape, 1, layout=LAYOUT)
        highest = jnp.max(best, axis=1)
        is_highest = best == lax.broadcast_in_dim(highest, best.shape, [0])
        found.value[...] = highest
        found.id[...] = jnp.min(jnp.where(is_highest, tile * TILE_N + column, NO_INDEX), axis=1)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(found.value, results.value.at[self.ring.block])
        plgpu.copy_smem_to_gmem(found.id, results.id.at[self.ring.block])


def _kernel(sizes: Sizes, operands: Operands, rows: int):
    """Return the kernel for these operands and this number of rows."""
    product, tuning, padded = sizes.product, sizes.tuning, sizes.padded
    ahead = tiles_ahead(padded)

    def body(
        operands: Operands[Ref],
        sources: Sources[Ref],
        results: Found[Ref],
        scratch: Scratch[Ref],
        memory: Memory[Ref],
    ) -> None:
        number, wg = lax.axis_index("block"), lax.axis_index("wg")
        # Copies fill rows past the last one with zeros.
        ring = Ring(sizes, operands, scratch, number, wg, 0, pl.ds(number * 0, padded))
        tiles_here = sizes.tiles_of(number)
        turns = sizes.steps * tiles_here
        ring.fill_weights(turns)
        if sizes.pdl:
            plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; tokens do
        warpgroup = _Warpgroup(ring, sources, memory, tiles_here, sources.step[0])
        warpgroup.look_up(rows)

        @pl.when(wg == 0)
        def _begin() -> None:
            for index in range(ahead):
                warpgroup.load_base(index)
            warpgroup.begin()

        warpgroup.arrange_rows()

        @pl.loop(0, tiles_here)
        def _tile(index: jax.Array) -> None:
            sums = multiply(ring, index, turns)

            def finish_tile(totals: list[jax.Array]) -> None:
                warpgroup.keep(index, totals[0])

            add_up(ring, None, sums, wg == 0, index, tiles_here, finish_tile)

        pl.when(wg == 0)(lambda: warpgroup.compare(results))
        plgpu.wait_smem_to_gmem(0)

    found = [jax.ShapeDtypeStruct((sizes.blocks, padded), t) for t in (jnp.float32, jnp.int32)]
    tile, steps = (padded, TILE_N), sizes.steps * tuning.warpgroups
    memory = Memory(
        rows=plgpu.SMEM((steps, padded, tuning.tile_k), product.x.dtype),
        base=plgpu.SMEM((ahead, padded, TILE_N), jnp.float32),
        best=plgpu.SMEM(tile, jnp.float32),
        tile=plgpu.SMEM(tile, jnp.int32),
        found=Found(plgpu.SMEM((padded,), jnp.float32), plgpu.SMEM((padded,), jnp.int32)),
        rows_ready=plgpu.Barrier(num_barriers=tuning.warpgroups, num_arrivals=sizes.steps * rows),
        base_ready=plgpu.Barrier(num_barriers=ahead),
    )
    return plgpu.kernel(
        body,
        out_type=(Found(*found),),
        grid=(sizes.blocks,),
        grid_names=("block",),
        num_threads=tuning.warpgroups,
        thread_name="wg",
        kernel_name=f"markov_argmax_{product.depth}x{product.width}",
        scratch_types=[
            scratch_of(sizes, operands)._replace(out=None, x_ready=None),
            memory,
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
    )
