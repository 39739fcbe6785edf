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

from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.weight import BLOCK as FP8_BLOCK
from pallas_kernels.fp8_matmul.weight import DTYPE as FP8
from pallas_kernels.fp8_matmul.weight import Fp8Weight
from pallas_kernels.hopper import interpreting
from pallas_kernels.int4_matmul.mosaic_gpu import units as int4_units
from pallas_kernels.int4_matmul.mosaic_gpu.plan import groups_of, sum_depth
from pallas_kernels.int4_matmul.weight import COLUMNS as INT4_COLUMNS
from pallas_kernels.int4_matmul.weight import DEPTHS, Int4Weight
from pallas_kernels.int4_matmul.weight import UNIT as INT4_UNIT
from pallas_kernels.moe.inputs import Gate
from pallas_kernels.moe.mosaic_gpu import fp8, units
from pallas_kernels.moe.mosaic_gpu.blocks import SIZE_SHIFT, SIZES, START_SHIFT, num_blocks
from pallas_kernels.moe.mosaic_gpu.tuning import (
    FEW_ROWS,
    TILE_N,
    Tuning,
    choose_fp8_tuning,
    choose_int4_tuning,
    choose_packed_tuning,
    choose_tuning,
)
from pallas_kernels.moe.mosaic_gpu.units import LAYOUT, TRANSFORMS
from pallas_kernels.moe.mxfp4 import BLOCK, COLUMNS, UNIT, Mxfp4Weight
from pallas_kernels.moe.reference import activated
from pallas_kernels.moe.stored import Stored
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
class Int4Form:
    """Static facts of int4 weights.

    group:     depths that share a scale
    sum_depth: depths of a sum that a scale multiplies
    """

    group: int
    sum_depth: int


@dataclass(frozen=True)
class Fp8Form:
    """Static facts of fp8 weights. has_blocks: blocks of 128 x 128 have scales of their own."""

    has_blocks: bool


@dataclass(frozen=True)
class Sizes:
    """Static sizes of one launch.

    width: columns of the result, of gate and up of each
    dtype: of the result; with blocks of fp8, the activation's leaves as codes with scales
    codes: the form of weights whose scales have arrays of their own; None for others
    """

    table: Table
    tuning: Tuning
    count: int
    depth: int
    width: int
    activation: Activation | None
    packed: bool
    wide: bool
    dtype: jnp.dtype
    codes: Int4Form | Fp8Form | None = None

    def __post_init__(self) -> None:
        tuning = self.tuning
        assert tuning.stages > 1 and self.steps * tuning.tile_k == self.depth, (self.depth, tuning)

    @property
    def products(self) -> int:
        return 2 if self.activation else 1

    @property
    def quantises(self) -> bool:
        """Whether the result is in fp8."""
        blocks = isinstance(self.codes, Fp8Form) and self.codes.has_blocks
        return blocks and self.activation is not None

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
    each slot of the rings, its copies have arrived. table_ready: the table has arrived. by_group:
    rings of int4 scales and zeros. codes: a tile of the result in fp8 for each size of a block.
    """

    x: T
    w: T
    table: T
    experts: T | None
    outs: list[T]
    full: Barrier
    table_ready: Barrier
    by_group: tuple[T, ...] = ()
    codes: tuple[T, ...] = ()


class Operands(NamedTuple, Generic[T]):
    """Weights of a launch: an array of them, or codes with their scales.

    w:        the weights, or their codes
    by_group: int4 scales, and zeros if there are some: [experts, depth / group, width]
    scales:   of fp8 weights and of the rows that they multiply
    """

    w: T
    by_group: tuple[T, ...] = ()
    scales: fp8.Scales[T] | None = None


class Results(NamedTuple, Generic[T]):
    """The result [rows, width], and the scales [width / 128, rows] of one in fp8."""

    out: T
    scales: T | None = None


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
    operands: Operands[Ref]
    scratch: Scratch[Ref]
    cta: jax.Array

    @property
    def w(self) -> Ref:
        return self.operands.w

    def column_of(self, part: int, column: jax.Array) -> jax.Array:
        """Return the first column of a part of an item's weights."""
        product, tile = divmod(part, self.sizes.tuning.tiles)
        return product * self.sizes.width + column + tile * TILE_N

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
            elif isinstance(sizes.codes, Fp8Form):
                source = self.w.at[block.expert, pl.ds(column, TILE_N), depths]
            elif isinstance(sizes.codes, Int4Form):
                columns = pl.ds(lax.div(column, INT4_COLUMNS), TILE_N // INT4_COLUMNS)
                own = pl.ds(lax.div(depths.start, DEPTHS), sizes.tuning.tile_k // DEPTHS)
                source = self.w.at[block.expert, columns, own]
                self.load_groups(slot, part, block.expert, column, depths)
            else:
                source = self.w.at[block.expert, depths, pl.ds(column, TILE_N)]
            plgpu.copy_gmem_to_smem(
                source, self.scratch.w.at[slot, part], self.scratch.full.at[slot]
            )

    def load_groups(
        self, slot: jax.Array, part: int, expert: jax.Array, column: jax.Array, depths: Slice
    ) -> None:
        """Load the int4 scales and zeros of a part's step."""
        sizes, form = self.sizes, self.sizes.codes
        assert isinstance(form, Int4Form)
        count = max(1, sizes.tuning.tile_k // form.group)
        here = pl.ds(lax.div(depths.start, form.group), count), pl.ds(column, TILE_N)
        rings = self.scratch.by_group
        for source, ring in zip(self.operands.by_group, rings, strict=True):
            target = ring.at[slot, part, pl.ds(0, count)]
            plgpu.copy_gmem_to_smem(source.at[expert, *here], target, self.scratch.full.at[slot])

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
    x: jax.Array | Rows,
    table: Table,
    weight: Stored,
    bias: jax.Array | None,
    activation: Activation | None,
    tuning: Tuning | None,
) -> jax.Array | Rows:
    """Return each block's rows of x times its expert's weight [experts, depth, width].

    With an activation, the halves of the width are gate and up. With few rows x holds the rows
    (with an activation) or 8 rows for each expert; otherwise its rows are sorted. Rows of the
    result that belong to no block are not written.

    Weights in fp8 take quantised rows. With blocks of scales, the activation's result is quantised.
    """
    count, depth, width = weight.shape
    products = 2 if activation else 1
    packed = isinstance(weight, Mxfp4Weight)
    codes: Int4Form | Fp8Form | None = None
    if isinstance(weight, Fp8Weight):
        codes = Fp8Form(weight.has_blocks)
        tuning = tuning or choose_fp8_tuning(
            depth, width // products, products, table.few, blocks=weight.has_blocks
        )
    elif isinstance(weight, Int4Weight):
        codes = Int4Form(weight.group, sum_depth(weight))
        tuning = tuning or choose_int4_tuning(weight, width // products, products, table.few)
    elif tuning is None and packed:
        tuning = choose_packed_tuning(depth, width // products, products, table.few)
    tuning = tuning or choose_tuning(depth, products, table.few)
    assert tuning is not None  # two stages of the smallest steps always fit
    rows = x.codes if isinstance(x, Rows) else x
    sizes = Sizes(
        table,
        tuning,
        count,
        depth,
        width // products,
        activation,
        packed,
        isinstance(weight, Mxfp4Weight) and weight.wide,
        jnp.dtype(jnp.bfloat16) if isinstance(x, Rows) else x.dtype,
        codes,
    )

    def body(
        x_gmem: Ref,
        table_gmem: Ref,
        operands: Operands[Ref],
        bias_gmem: Ref | None,
        results: Results[Ref],
        scratch: Scratch[Ref],
    ) -> None:
        cta = lax.axis_index("cta")
        ring = Ring(sizes, x_gmem, operands, scratch, cta)
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
                take = partial(_multiply, ring, bias_gmem, results, index, turns, rows, i)
                take() if table.few else pl.when(ring.block_of(cta + index * sizes.ctas).size == i)(
                    take
                )

        plgpu.wait_smem_to_gmem(0)

    out_rows = FEW_ROWS * count if table.few else rows.shape[0]
    name = f"experts_{depth}x{sizes.width}" + ("_gated" if activation else "")
    out = jax.ShapeDtypeStruct((out_rows, sizes.width), FP8 if sizes.quantises else sizes.dtype)
    scales = jax.ShapeDtypeStruct((sizes.width // FP8_BLOCK, out_rows), jnp.float32)
    call = plgpu.kernel(
        body,
        out_type=(Results(out, scales if sizes.quantises else None),),
        grid=(sizes.ctas,),
        grid_names=("cta",),
        kernel_name=name,
        scratch_types=[_scratch(sizes, rows.dtype, weight)],
    )
    made = call(rows, table.array, _operands(x, weight), bias)[0]
    return made.out if made.scales is None else Rows(made.out, made.scales)


def _operands(x: jax.Array | Rows, weight: Stored) -> Operands[jax.Array]:
    if isinstance(weight, Fp8Weight):
        assert isinstance(x, Rows)
        return Operands(weight.codes, scales=fp8.Scales(weight.scales, x.scales))
    if isinstance(weight, Int4Weight):
        zeros = () if weight.zeros is None else (weight.zeros,)
        return Operands(weight.words, (weight.scales, *zeros))
    return Operands(weight.units if isinstance(weight, Mxfp4Weight) else weight)


def _scratch(sizes: Sizes, dtype: jnp.dtype, weight: Stored) -> Scratch[pl.MemoryRef]:
    """Return the scratch memory of a CTA. dtype: of the rows, or of their codes"""
    tuning, table = sizes.tuning, sizes.table
    x = (tuning.stages, table.sizes[-1], tuning.tile_k)
    lead, copies = (tuning.stages, sizes.parts), sizes.parts + 1
    transforms, by_group = TRANSFORMS, ()
    w: pl.MemoryRef
    if sizes.packed:
        shape = (TILE_N // COLUMNS, tuning.tile_k // BLOCK, UNIT)
        w = plgpu.SMEM((*lead, *shape), jnp.int32)
    elif isinstance(weight, Int4Weight):
        units_of_step = (TILE_N // INT4_COLUMNS, tuning.tile_k // DEPTHS, INT4_UNIT)
        w = plgpu.SMEM((*lead, *units_of_step), jnp.int32)
        groups = groups_of(weight, tuning.tile_k)
        by_group = (plgpu.SMEM((*lead, groups, TILE_N), weight.scales.dtype),)
        if weight.zeros is not None:  # a copy's place is a multiple of 128 bytes
            by_group += (plgpu.SMEM((*lead, max(2, groups), TILE_N), jnp.uint8),)
        copies = sizes.parts * (1 + len(by_group)) + 1
    elif isinstance(weight, Fp8Weight):
        transforms = fp8.TRANSFORMS
        w = plgpu.SMEM((*lead, TILE_N, tuning.tile_k), dtype, transforms=transforms)
    else:
        w = plgpu.SMEM((*lead, tuning.tile_k, TILE_N), dtype, transforms=TRANSFORMS)
    return Scratch(
        x=plgpu.SMEM(x, dtype, transforms=transforms),
        w=w,
        table=plgpu.SMEM(table.array.shape, jnp.int32),
        experts=plgpu.SMEM((table.slots,), jnp.int32) if table.few else None,
        outs=[plgpu.SMEM((rows, sizes.columns), sizes.dtype) for rows in table.sizes],
        full=plgpu.Barrier(num_barriers=tuning.stages, num_arrivals=copies),
        table_ready=plgpu.Barrier(),
        by_group=by_group,
        codes=tuple(
            plgpu.SMEM((rows, sizes.columns), FP8) for rows in table.sizes if sizes.quantises
        ),
    )


def _multiply(
    ring: Ring,
    bias: Ref | None,
    results: Results[Ref],
    index: jax.Array,
    turns: jax.Array,
    rows: int,
    size: int,
) -> None:
    """Multiply item `index` of the CTA, a block of `rows` rows, and write its columns.

    turns: of the CTA through all items. size: index of the block's size.
    """
    sizes, scratch, parts = ring.sizes, ring.scratch, ring.sizes.parts
    steps, stages, dtype = sizes.steps, sizes.tuning.stages, sizes.dtype
    expert, x_row, start, _, column = ring.block_of(ring.cta + index * sizes.ctas)
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

    def accumulate_int4(step: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        turn, form = step + index * steps, sizes.codes
        assert isinstance(form, Int4Form)
        slot = lax.rem(turn, stages)
        plgpu.barrier_wait(scratch.full.at[slot])
        scales, *offsets = (ring.at[slot] for ring in scratch.by_group)
        weights = int4_units.Step(scratch.w.at[slot], scales, *offsets or [None])
        x_tile = scratch.x.at[slot, pl.ds(0, rows)]
        totals = int4_units.multiply(
            totals, weights, x_tile, group=form.group, sum_depth=form.sum_depth
        )
        refill(turn)
        launch_next(turn)
        return totals

    scales = ring.operands.scales
    has_blocks = isinstance(sizes.codes, Fp8Form) and sizes.codes.has_blocks
    columns = (
        tuple(ring.column_of(part, column) for part in range(parts)) if scales is not None else ()
    )
    item = fp8.Tile(expert, columns, x_row, rows)
    by_column, by_row = [], None
    if scales is not None and not has_blocks:  # loads start here
        by_column, by_row = fp8.load_scales(scales, item)

    def accumulate_fp8(step: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        assert scales is not None
        turn, tile_k = step + index * steps, sizes.tuning.tile_k
        slot = lax.rem(turn, stages)
        factors = []
        if has_blocks:
            depths = [step * tile_k + depth for depth in range(0, tile_k, FP8_BLOCK)]
            factors = [fp8.block_factors(scales, item, depth) for depth in depths]
        plgpu.barrier_wait(scratch.full.at[slot])
        x_tile = scratch.x.at[slot, pl.ds(0, rows)]
        totals = fp8.multiply(totals, scratch.w.at[slot], x_tile, factors)
        refill(turn)
        launch_next(turn)
        return totals

    if sizes.packed or sizes.codes is not None:
        run = {Int4Form: accumulate_int4, Fp8Form: accumulate_fp8}
        step = run.get(type(sizes.codes), accumulate_packed)
        zeros = plgpu.layout_cast(jnp.zeros((TILE_N, rows), jnp.float32), LAYOUT)
        totals = list(lax.fori_loop(0, steps, step, (zeros,) * parts))
    else:
        accumulators = [plgpu.ACC((TILE_N, rows), jnp.float32)] * parts
        totals = list(pl.run_scoped(accumulate, *accumulators))
    if by_row is not None:
        totals = fp8.scaled(totals, by_column, by_row, item)
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
    if results.scales is not None:
        plgpu.commit_smem()
        at = results.scales.at[lax.div(column, FP8_BLOCK), pl.ds(start, rows)]
        fp8.quantise(out_smem, scratch.codes[size], at)
        out_smem = scratch.codes[size]
    plgpu.commit_smem()
    here = pl.ds(start, rows), pl.ds(column, sizes.columns)
    plgpu.copy_smem_to_gmem(out_smem, results.out.at[here])


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
