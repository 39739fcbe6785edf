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
from pallas_kernels.moe.mosaic_gpu import units
from pallas_kernels.moe.mosaic_gpu.blocks import SIZE_SHIFT, SIZES, START_SHIFT, num_blocks
from pallas_kernels.moe.mosaic_gpu.tuning import (
    FEW_ROWS,
    TILE_N,
    Tuning,
    choose_packed_tuning,
    choose_tuning,
)
from pallas_kernels.moe.mosaic_gpu.units import LAYOUT, TRANSFORMS
from pallas_kernels.moe.mxfp4 import BLOCK, COLUMNS, UNIT, Mxfp4Weight
from pallas_kernels.moe.reference import activated
from pallas_kernels.mosaic import load
from pallas_kernels.types import Accumulator, Barrier, Ref, Slice

T = TypeVar("T")  # a ref, or its type
WORD = 32  # experts for which a word holds flags


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
    packed: bool
    wide: bool

    def __post_init__(self) -> None:
        tuning = self.tuning
        assert tuning.stages > 1 and self.steps * tuning.tile_k == self.depth, (self.depth, tuning)

    @property
    def products(self) -> int:
        return 2 if self.activation else 1

    @property
    def columns(self) -> int:
        """Columns of the result of an item."""
        return self.tuning.tiles * TILE_N

    @property
    def items(self) -> int:
        """Items of a block."""
        return -(-self.width // self.columns)

    @property
    def parts(self) -> int:
        """Tiles of weights of an item."""
        return self.products * self.tuning.tiles

    @property
    def steps(self) -> int:
        """Steps through the depth of an item."""
        return self.depth // self.tuning.tile_k

    @property
    def ctas(self) -> int:
        slots = self.table.slots
        most = min(slots, self.count) if self.table.few else num_blocks(slots, self.count)
        return min(self.tuning.ctas, most * self.items)

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
        index = lax.div(item, sizes.items)
        column = (item - index * sizes.items) * sizes.columns
        if sizes.width % sizes.columns:  # the last item takes columns of the one before too
            column = jnp.minimum(column, sizes.width - sizes.columns)
            column = pl.multiple_of(column, TILE_N)
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
        sizes = self.sizes
        for part in range(sizes.parts):
            product, tile = divmod(part, sizes.tuning.tiles)
            column = product * sizes.width + block.column + tile * TILE_N
            if sizes.packed:
                columns = pl.ds(lax.div(column, COLUMNS), TILE_N // COLUMNS)
                blocks = pl.ds(lax.div(depths.start, BLOCK), sizes.tuning.tile_k // BLOCK)
                source = self.w.at[block.expert, columns, blocks]
            else:
                source = self.w.at[block.expert, depths, pl.ds(column, TILE_N)]
            plgpu.copy_gmem_to_smem(
                source, self.scratch.w.at[slot, part], self.scratch.full.at[slot]
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
    weight: jax.Array | Mxfp4Weight,
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
    packed = isinstance(weight, Mxfp4Weight)
    if tuning is None and packed:
        tuning = choose_packed_tuning(depth, width // products, products, table.few)
    tuning = tuning or choose_tuning(depth, products, table.few)
    assert tuning is not None  # two stages of the smallest steps always fit
    sizes = Sizes(
        table, tuning, count, depth, width // products, activation, packed, packed and weight.wide
    )

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
        items_here = lax.div(found * sizes.items - cta + (sizes.ctas - 1), sizes.ctas)
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
    return call(x, table.array, weight.units if packed else weight, bias)


def _scratch(sizes: Sizes, dtype: jnp.dtype) -> Scratch[pl.MemoryRef]:
    tuning, table = sizes.tuning, sizes.table
    x = (tuning.stages, table.sizes[-1], tuning.tile_k)
    w: pl.MemoryRef
    if sizes.packed:
        shape = (TILE_N // COLUMNS, tuning.tile_k // BLOCK, UNIT)
        w = plgpu.SMEM((tuning.stages, sizes.parts, *shape), jnp.int32)
    else:
        shape = (tuning.stages, sizes.parts, tuning.tile_k, TILE_N)
        w = plgpu.SMEM(shape, dtype, transforms=TRANSFORMS)
    return Scratch(
        x=plgpu.SMEM(x, dtype, transforms=TRANSFORMS),
        w=w,
        table=plgpu.SMEM(table.array.shape, jnp.int32),
        experts=plgpu.SMEM((table.slots,), jnp.int32) if table.few else None,
        outs=[plgpu.SMEM((rows, sizes.columns), dtype) for rows in table.sizes],
        full=plgpu.Barrier(num_barriers=tuning.stages, num_arrivals=sizes.parts + 1),
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
    sizes, scratch, parts = ring.sizes, ring.scratch, ring.sizes.parts
    steps, stages, dtype = sizes.steps, sizes.tuning.stages, ring.x.dtype
    expert, _, start, _, column = ring.block_of(ring.cta + index * sizes.ctas)
    out_smem = scratch.outs[size]
    biases = []
    if bias is not None:  # loads start here; the values are used after the last step
        for part in range(parts):
            product, tile = divmod(part, sizes.tuning.tiles)
            first = product * sizes.width + column + tile * TILE_N
            source = bias.at[expert, pl.ds(first, TILE_N)]
            biases.append(load(source, LAYOUT.reduce(1), optimized=False))

    def launch_next(turn: jax.Array) -> None:
        if sizes.pdl:
            # When the last copy has started: the next kernel's would compete with this one's.
            pl.when(turn == jnp.maximum(turns - stages, 0))(plgpu.griddepcontrol_launch_dependents)

    def refill(freed: jax.Array) -> None:
        """Load into the slot of a turn that is done."""

        @pl.when((freed >= 0) & (freed + stages < turns))
        def _refill() -> None:
            ring.load_weights(freed + stages)
            ring.load_x(freed + stages)

    def accumulate(*accumulators: Accumulator) -> tuple[jax.Array, ...]:
        @pl.loop(0, steps)
        def _step(step: jax.Array) -> None:
            turn = step + index * steps
            slot = lax.rem(turn, stages)
            plgpu.barrier_wait(scratch.full.at[slot])
            x_tile = scratch.x.at[slot, pl.ds(0, rows)].transpose((1, 0))
            for part, acc in enumerate(accumulators):
                plgpu.wgmma(acc, scratch.w.at[slot, part].transpose((1, 0)), x_tile)
            plgpu.wgmma_wait(parts)  # the step before is done
            refill(turn - 1)
            launch_next(turn)

        return tuple(acc[...] for acc in accumulators)

    def accumulate_packed(step: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn = step + index * steps
        slot = lax.rem(turn, stages)
        plgpu.barrier_wait(scratch.full.at[slot])
        x_tile = scratch.x.at[slot, pl.ds(0, rows)]
        totals = units.multiply(totals, scratch.w.at[slot], x_tile, wide=sizes.wide)
        refill(turn)
        launch_next(turn)
        return totals

    if sizes.packed:
        zeros = plgpu.layout_cast(jnp.zeros((TILE_N, rows), jnp.float32), LAYOUT)
        totals = list(lax.fori_loop(0, steps, accumulate_packed, (zeros,) * parts))
    else:
        accumulators = [plgpu.ACC((TILE_N, rows), jnp.float32)] * parts
        totals = list(pl.run_scoped(accumulate, *accumulators))
    for part, vector in enumerate(biases):
        added = lax.broadcast_in_dim(vector.astype(jnp.float32), (TILE_N, rows), (0,))
        totals[part] += added
    totals = [total.astype(dtype) for total in totals]
    if sizes.activation is not None:
        kind, alpha, limit = sizes.activation
        wide = [total.astype(jnp.float32) for total in totals]
        tiles = sizes.tuning.tiles
        totals = [
            activated(gate, up, kind, alpha=alpha, limit=limit).astype(dtype)
            for gate, up in zip(wide[:tiles], wide[tiles:], strict=True)
        ]
    plgpu.wait_smem_to_gmem(0)  # the item before has left out_smem
    for tile, total in enumerate(totals):
        out_smem.at[:, pl.ds(tile * TILE_N, TILE_N)].transpose((1, 0))[...] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, out.at[pl.ds(start, rows), pl.ds(column, sizes.columns)])


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
