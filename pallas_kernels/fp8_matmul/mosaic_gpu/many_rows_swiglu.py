"""silu(x @ gate) * (x @ up) of 128 or 256 rows of codes on Hopper, where arithmetic is the limit.

A CTA makes tiles of 128 rows. In shared memory, the tile's columns of gate and those of up are one
operand, so that one wgmma multiplies both. A thread then has gate and up of the same values, and
applies scales and activation to registers. Neither product goes through memory, where cuBLAS
writes and SwiGLU reads 29 MB for a layer of Llama-3-8B.

As with bfloat16 (pallas_kernels/matmul/mosaic_gpu/many_rows_swiglu.py), two warpgroups multiply 64
rows each, a third starts the TMA copies, and two CTAs form a cluster. Each loads half of what both
read and sends it to both: the weights, or the rows where there are 128. CTAs stay for all of their
tiles, so copies of the next tile are in flight while one ends.

The depth is summed in order by the tensor cores, whose sums of fp8 have about 14 bits. So do the
algorithms of cublasLt that docs/notes/fp8-int4-products.md compares; XLA may choose others. A row's
bits depend neither on its neighbours nor on the tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.weight import DTYPE, Fp8Weight
from pallas_kernels.hopper import NUM_SMS, interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul.mosaic_gpu.many_rows_ring import (
    CONSUMER_ROWS,
    CONSUMERS,
    TILE_ROWS,
    ManyRowsRing,
)
from pallas_kernels.matmul.plan import MAX_SMEM
from pallas_kernels.mosaic import RegisterShares, load, store
from pallas_kernels.online_softmax import LOG2E
from pallas_kernels.types import Accumulator, Barrier, Index, Ref, Slice

T = TypeVar("T")  # an array, the kernel's ref, or its type

LAYOUT = plgpu.Layout.WGMMA
ROWS = (128, 256)
TILE_K = 128  # depth of a step, in bytes too
TILES = (112, 96, 80, 64)  # columns of gate, and as many of up. 128 would leave three stages
CHUNK = 16  # columns that a warpgroup activates at once
MOST_IDLE = 1.25  # time of all waves over that of full ones, at most; more is not measured
MIN_STAGES = 2  # a slot is free after the next step's product has started


class Operands(NamedTuple, Generic[T]):
    """Operands of the kernel: codes, and their scales in float32.

    x:                      [rows, depth]
    gate, up:               [width, depth]
    gate_scales, up_scales: [width]
    row_scales:             [rows]
    """

    x: T
    gate: T
    up: T
    gate_scales: T
    up_scales: T
    row_scales: T


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    x, weights: rings of steps; the weights are those of gate, then those of up
    columns:    scales of gate and up, [2, tiles of the CTA, padded tile]
    rows:       scales of the rows, [TILE_ROWS]
    out:        results of the warpgroups, [CONSUMERS, CONSUMER_ROWS, tile]
    full:       for each slot, its copies have arrived
    consumed:   for each slot, the warpgroups of the cluster have read it
    scaled:     the scales have arrived
    """

    x: T
    weights: T
    columns: T
    rows: T
    out: T
    full: Barrier
    consumed: Barrier
    scaled: Barrier


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    tile:    columns of a tile
    cluster: CTAs that share the weights, or the rows where there is one tile of them
    stages:  of the ring
    ctas:    that run at once
    """

    tile: int
    cluster: int
    stages: int
    ctas: int = NUM_SMS


@dataclass(frozen=True)
class _Division:
    """How column tiles are divided among the CTAs of a row tile.

    shares_x: whether a cluster has neighbouring columns, rather than neighbouring rows
    groups:   column tiles, or pairs of them that a cluster has
    blocks:   CTAs or clusters along the columns
    turns:    groups of a block, at most
    """

    shares_x: bool
    groups: int
    blocks: int
    turns: int

    @classmethod
    def of(cls, rows: int, width: int, tuning: Tuning) -> _Division:
        cluster = tuning.cluster
        shares_x = cluster > 1 and rows == TILE_ROWS
        groups = width // tuning.tile // (cluster if shares_x else 1)
        turns = -(-groups // (tuning.ctas // max(rows // TILE_ROWS, cluster)))
        return cls(shares_x, groups, -(-groups // turns), turns)


def choose_tuning(rows: int, width: int) -> Tuning | None:
    """Return the division whose waves take least time, None if no tile divides the width.

    The wider tile of two equals.
    """
    candidates = [tile for tile in TILES if width % tile == 0]
    if not candidates:
        return None
    row_tiles = rows // TILE_ROWS
    tile = min(candidates, key=lambda tile: -(-row_tiles * (width // tile) // NUM_SMS) * tile)
    cluster = 2 if (row_tiles if row_tiles > 1 else width // tile) % 2 == 0 else 1
    turns = _Division.of(rows, width, Tuning(tile, cluster, 0)).turns
    scales = 4 * (2 * turns * _padded(tile) + TILE_ROWS)
    fixed = scales + 2 * TILE_ROWS * tile + 4096  # result; Mosaic's own, barriers, alignment
    return Tuning(tile, cluster, (MAX_SMEM - fixed) // (TILE_K * (TILE_ROWS + 2 * tile)))


def _padded(tile: int) -> int:
    """Return how many scales a tile's place has room for: copies start at 128 bytes."""
    return -(-tile // 32) * 32


def takes(rows: int, depth: int, width: int) -> bool:
    """Return whether the kernel takes gate and up of this depth and width; cuBLAS takes all."""
    tuning = choose_tuning(rows, width) if rows in ROWS else None
    if tuning is None or tuning.stages < MIN_STAGES:
        return False
    if depth % TILE_K or depth < MIN_STAGES * TILE_K:
        return False
    tiles = rows // TILE_ROWS * (width // tuning.tile)
    return -(-tiles // NUM_SMS) * NUM_SMS <= MOST_IDLE * tiles


def swiglu(
    rows: Rows, gate: Fp8Weight, up: Fp8Weight, *, tuning: Tuning | None = None
) -> jax.Array:
    """Return silu(x @ gate) * (x @ up) in bfloat16, rounded where swiglu_rows rounds it.

    rows, gate, up: with scales by row and by column
    """
    tuning = tuning or choose_tuning(rows.codes.shape[0], gate.shape[1])
    assert tuning is not None  # the caller has asked `takes`
    operands = Operands(rows.codes, gate.codes, up.codes, gate.scales, up.scales, rows.scales)
    return _swiglu(operands, tuning=tuning)


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def _swiglu(operands: Operands[jax.Array], *, tuning: Tuning) -> jax.Array:
    (rows, depth), width = operands.x.shape, operands.gate.shape[0]
    tile, steps, pdl = tuning.tile, depth // TILE_K, not interpreting()
    if interpreting():  # which has no multicast
        tuning = replace(tuning, cluster=1)
    cluster, division = tuning.cluster, _Division.of(rows, width, tuning)
    shares_weights = cluster > 1 and not division.shares_x
    # A CTA may have a tile less than others.
    stages = min(tuning.stages, division.groups // division.blocks * steps)
    ring = ManyRowsRing(stages, steps, TILE_K)
    assert stages >= MIN_STAGES or division.turns * steps == 1, tuning
    assert rows in ROWS and width % (tile * (cluster if division.shares_x else 1)) == 0, tuning
    registers = RegisterShares(CONSUMERS, 232, 40)

    def body(operands: Operands[Ref], out: Ref, scratch: Scratch[Ref]) -> None:
        wg, rank, block = (lax.axis_index(name) for name in ("wg", "rank", "block"))
        row = (rank if shares_weights else lax.axis_index("rows")) * TILE_ROWS
        own_rows = pl.ds(row, TILE_ROWS)
        groups_here = lax.div(division.groups - block + (division.blocks - 1), division.blocks)
        turns = groups_here * steps

        def columns_of(group: Index) -> Slice:
            """Return the columns of the CTA's n-th tile."""
            place = block + group * division.blocks
            place = place * cluster + rank if division.shares_x else place
            return pl.ds(place * tile, tile)

        def load_weights(turn: jax.Array) -> None:
            slot, k = ring.place(turn)
            columns = columns_of(lax.div(turn, steps))
            for i, ref in enumerate((operands.gate, operands.up)):
                plgpu.copy_gmem_to_smem(
                    ref.at[columns, k],
                    scratch.weights.at[slot, pl.ds(i * tile, tile)],
                    scratch.full.at[slot],
                    collective_axes="rank" if shares_weights else None,
                )

        def load_x(turn: jax.Array) -> None:
            slot, k = ring.place(turn)
            plgpu.copy_gmem_to_smem(
                operands.x.at[own_rows, k],
                scratch.x.at[slot],
                scratch.full.at[slot],
                collective_axes="rank" if division.shares_x else None,
            )

        def load_scales() -> None:
            for turn in range(division.turns):
                columns = columns_of(jnp.minimum(turn, groups_here - 1))
                for i, ref in enumerate((operands.gate_scales, operands.up_scales)):
                    plgpu.copy_gmem_to_smem(
                        ref.at[columns], scratch.columns.at[i, turn, pl.ds(0, tile)], scratch.scaled
                    )
            plgpu.copy_gmem_to_smem(operands.row_scales.at[own_rows], scratch.rows, scratch.scaled)

        @pl.when(wg == CONSUMERS)
        def _produce() -> None:
            registers.give_back()
            ring.produce(turns, load_weights, load_x, scratch.consumed)

        @pl.when(wg < CONSUMERS)
        def _consume() -> None:
            registers.take()
            if pdl:
                plgpu.griddepcontrol_wait()
            pl.when(wg == 0)(load_scales)
            mine = pl.ds(wg * CONSUMER_ROWS, CONSUMER_ROWS)

            def multiply(first_turn: jax.Array) -> jax.Array:
                """Return float32 [CONSUMER_ROWS, 2 * tile], the products of codes."""

                def accumulate(acc: Accumulator) -> jax.Array:
                    @pl.loop(first_turn, first_turn + steps)
                    def _step(turn: jax.Array) -> None:
                        slot = lax.rem(turn, stages)
                        plgpu.barrier_wait(scratch.full.at[slot])
                        weights = scratch.weights.at[slot].transpose((1, 0))
                        plgpu.wgmma(acc, scratch.x.at[slot, mine], weights)
                        plgpu.wgmma_wait(1)  # the step before is done: free its slot
                        before = lax.rem(turn + (stages - 1), stages)
                        pl.when(turn > first_turn)(
                            lambda: plgpu.barrier_arrive(scratch.consumed.at[before])
                        )

                    sums = acc[...]
                    last = lax.rem(first_turn + (steps - 1), stages)
                    plgpu.barrier_arrive(scratch.consumed.at[last])
                    return sums

                return pl.run_scoped(accumulate, plgpu.ACC((CONSUMER_ROWS, 2 * tile), jnp.float32))

            @pl.loop(0, groups_here)
            def _tile(group: jax.Array) -> None:
                sums = multiply(group * steps)
                pl.when(group == 0)(lambda: plgpu.barrier_wait(scratch.scaled))
                by_row = load(scratch.rows.at[mine], LAYOUT.reduce(1), optimized=False)
                target = scratch.out.at[wg]
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
                for first in range(0, tile, CHUNK):
                    gate, up = (
                        _scaled(
                            sums[:, start : start + CHUNK],
                            scratch.columns.at[i, group, pl.ds(first, CHUNK)],
                            by_row,
                        )
                        for i, start in enumerate((first, tile + first))
                    )
                    store(target.at[:, pl.ds(first, CHUNK)], _activated(gate, up))
                plgpu.commit_smem()
                here = pl.ds(row + wg * CONSUMER_ROWS, CONSUMER_ROWS)
                plgpu.copy_smem_to_gmem(target, out.at[here, columns_of(group)])

            plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, TILE_K)), plgpu.SwizzleTransform(TILE_K))
    out_transforms = (plgpu.TilingTransform((8, CHUNK)), plgpu.SwizzleTransform(2 * CHUNK))
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
        grid=(division.blocks, 1 if shares_weights else rows // TILE_ROWS),
        grid_names=("block", "rows"),
        cluster=(cluster,),
        cluster_names=("rank",),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=f"fp8_swiglu_{depth}x{width}_rows{rows}",
        scratch_types=[
            Scratch(
                x=plgpu.SMEM((stages, TILE_ROWS, TILE_K), DTYPE, transforms=transforms),
                weights=plgpu.SMEM((stages, 2 * tile, TILE_K), DTYPE, transforms=transforms),
                columns=plgpu.SMEM((2, division.turns, _padded(tile)), jnp.float32),
                rows=plgpu.SMEM((TILE_ROWS,), jnp.float32),
                out=plgpu.SMEM(
                    (CONSUMERS, CONSUMER_ROWS, tile), jnp.bfloat16, transforms=out_transforms
                ),
                full=plgpu.Barrier(num_barriers=stages, num_arrivals=3),
                consumed=ring.consumed(cluster),
                scaled=plgpu.Barrier(num_arrivals=2 * division.turns + 1),
            )
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return call(operands)


def _scaled(sums: jax.Array, by_column: Ref, by_row: jax.Array) -> jax.Array:
    """Return sums of codes times their scales, rounded to bfloat16, as float32."""
    columns = load(by_column, LAYOUT.reduce(0), optimized=False)
    scaled = sums * lax.broadcast_in_dim(columns, sums.shape, [1])
    scaled = scaled * lax.broadcast_in_dim(by_row, sums.shape, [0])
    return scaled.astype(jnp.bfloat16).astype(jnp.float32)


def _activated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return silu(gate) * up, rounded to bfloat16 twice."""
    silu = (gate * _reciprocal(1.0 + jnp.exp2(-LOG2E * gate))).astype(jnp.bfloat16)
    return (silu.astype(jnp.float32) * up).astype(jnp.bfloat16)


def _reciprocal(x: jax.Array) -> jax.Array:
    """Return 1 / x within a unit in the last place, in one instruction; 0 of more than 2^126."""
    if interpreting():
        return 1.0 / x

    @plgpu.inline_mgpu(
        arg_types=(LAYOUT,),
        return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=LAYOUT),
    )
    def run(_: Any, x: Any) -> Any:
        return x._pointwise(x._lift_fast_instr("rcp.approx.ftz.f32"))

    call: Any = run
    return call(x)
