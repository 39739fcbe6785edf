"""The grouped product: each block's rows multiplied by its expert's weight."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.moe.inputs import Gate
from pallas_kernels.moe.mosaic_gpu.blocks import SIZE_SHIFT, SIZES, START_SHIFT, num_blocks
from pallas_kernels.moe.reference import activated
from pallas_kernels.mosaic import load
from pallas_kernels.types import Accumulator, Barrier, Ref, Slice

T = TypeVar("T")  # a ref, or its type
FEW_ROWS = 8
MAX_SMEM = 227 * 1024
NUM_SMS = 132
TILE_N = 64  # output columns of an item: wgmma's M
WORD = 32  # experts for which a word holds flags
LAYOUT = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    tile_k: depth of a step, a multiple of 64. stages: of the ring, at least 2. ctas: most CTAs at
    once, one or two for each SM. pdl: programmatic dependent launch, which CUDA graphs ignore and
    the interpreter does not know.
    """

    tile_k: int = 64
    stages: int = 4
    ctas: int = NUM_SMS
    pdl: bool = True


def smem_bytes(tuning: Tuning, products: int, few: bool) -> int:
    """Return the shared memory of a CTA, to within the barriers and the table."""
    sizes = SIZES[:1] if few else SIZES
    step = tuning.tile_k * 2 * (products * TILE_N + sizes[-1])
    return tuning.stages * step + sum(sizes) * TILE_N * 2 + 4096


def choose_tuning(depth: int, products: int, few: bool, ctas_an_sm: int = 1) -> Tuning | None:
    """Return the deepest steps of which four stages fit, else two; None if nothing fits.

    There are as many stages as fit.
    """
    for fewest in (4, 2):
        for tile_k in (256, 192, 128, 64):
            if depth % tile_k:
                continue
            for stages in range(12, fewest - 1, -1):
                tuning = Tuning(tile_k, stages, NUM_SMS * ctas_an_sm)
                if smem_bytes(tuning, products, few) <= MAX_SMEM // ctas_an_sm:
                    return tuning
    return None


class Activation(NamedTuple):
    """Activation of gate and up; see moe.Inputs."""

    gate: Gate
    alpha: float
    limit: float


@dataclass(frozen=True)
class Table:
    """The blocks of a launch.

    array: int32; with `few` the chosen ids of `rows` rows, `columns` for each row, of which the
    first top_k count; else the table of plan_blocks. few: every block takes all rows. partial: the
    ids may name experts of other devices, as the number of experts or more.
    """

    array: jax.Array
    few: bool
    rows: int
    top_k: int
    columns: int
    partial: bool

    @property
    def slots(self) -> int:
        return self.rows * self.top_k

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of blocks, in rows."""
        return SIZES[:1] if self.few else SIZES


@dataclass(frozen=True)
class Sizes:
    """Static sizes of one launch. width: columns of the result, of gate and up of each."""

    table: Table
    tuning: Tuning
    count: int
    depth: int
    width: int
    activation: Activation | None

    def __post_init__(self) -> None:
        tuning = self.tuning
        assert tuning.stages > 1 and self.steps * tuning.tile_k == self.depth, (self.depth, tuning)

    @property
    def products(self) -> int:
        return 2 if self.activation else 1

    @property
    def tiles(self) -> int:
        return self.width // TILE_N

    @property
    def steps(self) -> int:
        """Steps through the depth of an item."""
        return self.depth // self.tuning.tile_k

    @property
    def ctas(self) -> int:
        slots = self.table.slots
        most = min(slots, self.count) if self.table.few else num_blocks(slots, self.count)
        return min(self.tuning.ctas, most * self.tiles)

    @property
    def all_rows(self) -> bool:
        """Whether x has each row once, and not for each expert."""
        return self.table.few and self.activation is not None

    @property
    def pdl(self) -> bool:
        return self.tuning.pdl and not interpreting()


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    x, w: rings of the rows' and the weights' steps. table: Table.array. experts: the list of
    chosen experts; with few rows. outs: a tile of the result for each size of a block. full: for
    each slot of the rings, its copies have arrived. table_ready: the table has arrived.
    """

    x: T
    w: T
    table: T
    experts: T | None
    outs: list[T]
    full: Barrier
    table_ready: Barrier


class Place(NamedTuple):
    """The block of an item: expert, first row in x and in the result, size index, first column."""

    expert: jax.Array
    x_row: jax.Array
    out_row: jax.Array
    size: jax.Array
    column: jax.Array


@dataclass(frozen=True)
class Ring:
    """A CTA's ring of TMA copies, in the kernel. Turns count the steps through all of its items."""

    sizes: Sizes
    x: Ref
    w: Ref
    scratch: Scratch[Ref]
    cta: jax.Array

    def block_of(self, item: jax.Array) -> Place:
        sizes, scratch = self.sizes, self.scratch
        index = lax.div(item, sizes.tiles)
        column = (item - index * sizes.tiles) * TILE_N
        if scratch.experts is not None:
            expert = scratch.experts[index]
            x_row = 0 * expert if sizes.all_rows else expert * FEW_ROWS
            return Place(expert, x_row, expert * FEW_ROWS, jnp.int32(0), column)
        packed = scratch.table[index + 1]
        start = pl.multiple_of((packed >> START_SHIFT) * 8, 8)
        expert = packed & ((1 << SIZE_SHIFT) - 1)
        return Place(expert, start, start, (packed >> SIZE_SHIFT) & 3, column)

    def place(self, turn: jax.Array) -> tuple[jax.Array, Slice, jax.Array]:
        """Return a turn's item, its part of the depth, and its slot."""
        sizes, tile_k = self.sizes, self.sizes.tuning.tile_k
        index = lax.div(turn, sizes.steps)
        return (
            self.cta + index * sizes.ctas,
            pl.ds((turn - index * sizes.steps) * tile_k, tile_k),
            lax.rem(turn, sizes.tuning.stages),
        )

    def load_weights(self, turn: jax.Array) -> None:
        item, depths, slot = self.place(turn)
        block = self.block_of(item)
        for product in range(self.sizes.products):
            columns = pl.ds(product * self.sizes.width + block.column, TILE_N)
            plgpu.copy_gmem_to_smem(
                self.w.at[block.expert, depths, columns],
                self.scratch.w.at[slot, product],
                self.scratch.full.at[slot],
            )

    def load_x(self, turn: jax.Array) -> None:
        item, depths, slot = self.place(turn)
        block, table = self.block_of(item), self.sizes.table
        for i, rows in enumerate(table.sizes):

            def copy(rows: int = rows) -> None:
                plgpu.copy_gmem_to_smem(
                    self.x.at[pl.ds(block.x_row, rows), depths],
                    self.scratch.x.at[slot, pl.ds(0, rows)],
                    self.scratch.full.at[slot],
                )

            copy() if table.few else pl.when(block.size == i)(copy)


def multiply_blocks(
    x: jax.Array,
    table: Table,
    weight: jax.Array,
    bias: jax.Array | None,
    activation: Activation | None,
    tuning: Tuning | None,
) -> jax.Array:
    """Return each block's rows of x times its expert's weight [experts, depth, width].

    With an activation, the halves of the width are gate and up. With few rows x holds the rows
    (with an activation) or 8 rows for each expert; otherwise its rows are sorted. Rows of the
    result that belong to no block are not written.
    """
    count, depth, width = weight.shape
    products = 2 if activation else 1
    tuning = tuning or choose_tuning(depth, products, table.few)
    assert tuning is not None  # two stages of the smallest steps always fit
    sizes = Sizes(table, tuning, count, depth, width // products, activation)

    def body(
        x_gmem: Ref,
        table_gmem: Ref,
        w_gmem: Ref,
        bias_gmem: Ref | None,
        out_gmem: Ref,
        scratch: Scratch[Ref],
    ) -> None:
        cta = lax.axis_index("cta")
        ring = Ring(sizes, x_gmem, w_gmem, scratch, cta)
        if sizes.pdl and activation is not None:
            plgpu.griddepcontrol_wait()
        # Down reads the table before it waits. Gate and up launched it after they had waited for
        # the kernel that wrote the table.
        plgpu.copy_gmem_to_smem(table_gmem, scratch.table, scratch.table_ready)
        plgpu.barrier_wait(scratch.table_ready)
        if scratch.experts is not None:
            found = _list_experts(sizes, scratch.table, scratch.experts)
        else:
            found = scratch.table[0]
        items_here = lax.div(found * sizes.tiles - cta + (sizes.ctas - 1), sizes.ctas)
        turns = items_here * sizes.steps

        for turn in range(tuning.stages):
            pl.when(turn < turns)(lambda turn=turn: ring.load_weights(jnp.int32(turn)))
        if sizes.pdl and activation is None:
            plgpu.griddepcontrol_wait()
        for turn in range(tuning.stages):
            pl.when(turn < turns)(lambda turn=turn: ring.load_x(jnp.int32(turn)))

        @pl.loop(0, items_here)
        def _item(index: jax.Array) -> None:
            for i, rows in enumerate(table.sizes):
                take = partial(_multiply, ring, bias_gmem, out_gmem, index, turns, rows, i)
                take() if table.few else pl.when(ring.block_of(cta + index * sizes.ctas).size == i)(
                    take
                )

        plgpu.wait_smem_to_gmem(0)

    out_rows = FEW_ROWS * count if table.few else x.shape[0]
    name = f"experts_{depth}x{sizes.width}" + ("_gated" if activation else "")
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((out_rows, sizes.width), x.dtype),
        grid=(sizes.ctas,),
        grid_names=("cta",),
        kernel_name=name,
        scratch_types=[_scratch(sizes, x.dtype)],
    )
    return call(x, table.array, weight, bias)


def _scratch(sizes: Sizes, dtype: jnp.dtype) -> Scratch[pl.MemoryRef]:
    tuning, table = sizes.tuning, sizes.table
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    x = (tuning.stages, table.sizes[-1], tuning.tile_k)
    w = (tuning.stages, sizes.products, tuning.tile_k, TILE_N)
    return Scratch(
        x=plgpu.SMEM(x, dtype, transforms=transforms),
        w=plgpu.SMEM(w, dtype, transforms=transforms),
        table=plgpu.SMEM(table.array.shape, jnp.int32),
        experts=plgpu.SMEM((table.slots,), jnp.int32) if table.few else None,
        outs=[plgpu.SMEM((rows, TILE_N), dtype) for rows in table.sizes],
        full=plgpu.Barrier(num_barriers=tuning.stages, num_arrivals=sizes.products + 1),
        table_ready=plgpu.Barrier(),
    )


def _multiply(
    ring: Ring,
    bias: Ref | None,
    out: Ref,
    index: jax.Array,
    turns: jax.Array,
    rows: int,
    size: int,
) -> None:
    """Multiply item `index` of the CTA, a block of `rows` rows, and write its columns.

    turns: of the CTA through all items. size: index of the block's size.
    """
    sizes, scratch, products = ring.sizes, ring.scratch, ring.sizes.products
    steps, stages, dtype = sizes.steps, sizes.tuning.stages, ring.x.dtype
    expert, _, start, _, column = ring.block_of(ring.cta + index * sizes.ctas)
    out_smem = scratch.outs[size]
    biases = []
    if bias is not None:  # loads start here; the values are used after the last step
        for product in range(products):
            source = bias.at[expert, pl.ds(product * sizes.width + column, TILE_N)]
            biases.append(load(source, LAYOUT.reduce(1), optimized=False))

    def accumulate(*accumulators: Accumulator) -> tuple[jax.Array, ...]:
        @pl.loop(0, steps)
        def _step(step: jax.Array) -> None:
            turn = step + index * steps
            slot = lax.rem(turn, stages)
            plgpu.barrier_wait(scratch.full.at[slot])
            x_tile = scratch.x.at[slot, pl.ds(0, rows)].transpose((1, 0))
            for product, acc in enumerate(accumulators):
                plgpu.wgmma(acc, scratch.w.at[slot, product].transpose((1, 0)), x_tile)
            plgpu.wgmma_wait(products)  # the step before is done: refill its slot

            @pl.when((turn > 0) & (turn - 1 + stages < turns))
            def _refill() -> None:
                ring.load_weights(turn - 1 + stages)
                ring.load_x(turn - 1 + stages)

            if sizes.pdl:
                # When the last copy has started: the next kernel's would compete with this one's.
                pl.when(turn == jnp.maximum(turns - stages, 0))(
                    plgpu.griddepcontrol_launch_dependents
                )

        return tuple(acc[...] for acc in accumulators)

    accumulators = [plgpu.ACC((TILE_N, rows), jnp.float32)] * products
    totals = list(pl.run_scoped(accumulate, *accumulators))
    for product, vector in enumerate(biases):
        added = lax.broadcast_in_dim(vector.astype(jnp.float32), (TILE_N, rows), (0,))
        totals[product] += added
    totals = [total.astype(dtype) for total in totals]
    if sizes.activation is not None:
        kind, alpha, limit = sizes.activation
        gate, up = (total.astype(jnp.float32) for total in totals)
        totals = [activated(gate, up, kind, alpha=alpha, limit=limit).astype(dtype)]
    plgpu.wait_smem_to_gmem(0)  # the item before has left out_smem
    out_smem.transpose((1, 0))[...] = totals[0]
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out.at[pl.ds(start, rows), pl.ds(column, TILE_N)])


def _list_experts(sizes: Sizes, table: Ref, experts: Ref) -> jax.Array:
    """Write the distinct ids of the table into `experts`; return how many there are.

    Every thread does the same, and reads its own writes.
    """
    ids = sizes.table
    chosen = [table[row * ids.columns + k] for row in range(ids.rows) for k in range(ids.top_k)]
    found, seen = jnp.int32(0), [jnp.int32(0)] * -(-sizes.count // WORD)
    for expert in chosen:
        bit, word = jnp.int32(1) << (expert & (WORD - 1)), lax.shift_right_logical(expert, 5)
        mine = sum((jnp.where(word == i, bits, 0) for i, bits in enumerate(seen)), jnp.int32(0))
        new = (mine & bit) == 0
        if ids.partial:
            new &= expert < sizes.count

        @pl.when(new)
        def _note(found: jax.Array = found, expert: jax.Array = expert) -> None:
            experts[found] = expert

        found += new.astype(jnp.int32)
        seen = [jnp.where(word == i, bits | bit, bits) for i, bits in enumerate(seen)]
    return found
