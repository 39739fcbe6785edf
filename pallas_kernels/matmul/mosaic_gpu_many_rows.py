"""Matrix products of many rows on Hopper, where arithmetic counts and no longer the weights' bytes.

At 256 rows the tensor cores and L2 set the time, and cuBLAS loses it to tiles that do not fill the last wave: gate and up of Llama-3-8B are
224 tiles of 256 x 128 on 132 SMs. Here a block makes 128 rows of as many columns as give every SM one block: any multiple of 32, 224 there
(64 x 2 blocks), 96 for the fused query, key and value projection. SwiGLU takes two passes over x with one set of accumulators: gate first,
kept in bfloat16 registers, then up, whose accumulators lie in the same places, so that the activation is elementwise in registers.

Two warpgroups multiply 64 rows each, a third issues the TMA copies. Blocks of one cluster share what they read: those of the same rows
x, those of the same columns the weights, each bringing its part and sending it to all (multicast), because L2 could not feed the tensor
cores otherwise.

Depth is summed in order, 16 at a time: a row's bits depend neither on its neighbours nor on how many there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting

MAX_ROWS = 512
MAX_SMEM = 227 * 1024
NUM_SMS = 132
TILE_ROWS = 128  # of a block; half of them a warpgroup's
TILE_K = 64  # depth of a step
TILES = (224, 192, 160, 128, 96, 64)  # columns of a block: one wgmma's N; 256 leaves too few registers
CONSUMERS = 2


@dataclass(frozen=True)
class Tuning:
    """tile: columns of a block. stages of the ring of copies. cluster: blocks side by side (they share x) and above each other (they share
    the weights). pdl: programmatic dependent launch, which CUDA graphs ignore and the interpreter does not know."""

    tile: int
    stages: int
    cluster: tuple[int, int] = (1, 1)
    pdl: bool = True


def smem_bytes(tile: int, stages: int, residual: bool) -> int:
    """Shared memory of a block, to within the barriers. The result leaves through the ring."""
    return stages * TILE_K * (TILE_ROWS + tile) * 2 + (TILE_ROWS * tile * 2 if residual else 0) + 1024


def choose_tuning(rows: int, width: int, *, residual: bool = False) -> Tuning | None:
    """The tile whose waves take least time, the wider one of two equals; None if none divides the width."""
    row_tiles = rows // TILE_ROWS
    candidates = [tile for tile in TILES if width % tile == 0]
    if not candidates:
        return None
    tile = min(candidates, key=lambda tile: -(-row_tiles * (width // tile) // NUM_SMS) * tile)
    stages = max(n for n in range(2, 9) if smem_bytes(tile, n, residual) <= MAX_SMEM)
    share = lambda count: 2 if count % 2 == 0 else 1  # noqa: E731
    return Tuning(tile, stages, (share(width // tile), share(row_tiles)))


def unsupported(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    residual: bool = False,
    swiglu: bool = False,
    transposed: bool = False,
    out_dtype: Any = jnp.bfloat16,
) -> str | None:
    """Why this kernel cannot make this product, None if it can. Takes anything with a shape and a dtype."""
    (rows, depth), first = x.shape, weights[0]
    if any(a.dtype != jnp.bfloat16 for a in (x, *weights)) or out_dtype != jnp.bfloat16:
        return f"expected bfloat16 operands and result, got {x.dtype}, {first.dtype} and {jnp.dtype(out_dtype)}"
    if rows % TILE_ROWS or not TILE_ROWS <= rows <= MAX_ROWS:
        return f"expected a multiple of {TILE_ROWS} rows up to {MAX_ROWS}, got {rows}"
    if transposed or (len(weights) > 1 and not swiglu):
        return f"expected one weight, or gate and up, of [depth, width] for {rows} rows, got {len(weights)}, transposed {transposed}"
    if depth % TILE_K or depth < 2 * TILE_K or choose_tuning(rows, first.shape[1], residual=residual) is None:
        return f"expected a depth that is a multiple of {TILE_K} and a width that one of {TILES} divides, got {first.shape}"
    return None


# Compiled as a function of its own, so that a model's layers share one kernel instead of lowering one each.
@partial(jax.jit, static_argnames=("swiglu", "transposed", "out_dtype", "tuning"))
def matmul(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    transposed: bool = False,
    out_dtype: Any = jnp.bfloat16,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See pallas_kernels.matmul.matmul."""
    (rows, depth), width = x.shape, weights[0].shape[1]
    tuning = tuning or choose_tuning(rows, width, residual=residual is not None)
    assert tuning is not None and not transposed  # the public op has asked `unsupported`
    tile, pdl = tuning.tile, tuning.pdl and not interpreting()
    side_by_side, above = (1, 1) if interpreting() else tuning.cluster  # the interpreter has no multicast
    # Of 504 that three threads share, one of each warpgroup. The second pass over a wide tile needs most; a producer is better off with 40.
    producer_registers, consumer_registers = (24, 240) if swiglu and tile > 192 else (40, 232)
    steps = depth // TILE_K
    turns = steps * len(weights)
    stages = min(tuning.stages, turns)
    assert stages >= CONSUMERS and width % (tile * side_by_side) == 0 and rows % (TILE_ROWS * above) == 0, tuning
    swizzle = 128 if tile % 64 == 0 else 64
    warpgroup_rows = TILE_ROWS // CONSUMERS
    assert warpgroup_rows == TILE_K  # a warpgroup's result has the shape of a step's weights, and leaves through their place

    def body(*refs: Any) -> None:
        x_gmem, *rest = refs
        w_gmems, rest = rest[: len(weights)], rest[len(weights) :]
        residual_gmem, rest = (rest[0], rest[1:]) if residual is not None else (None, rest)
        out_gmem, x_smem, w_smem, residual_smem, brought, consumed, drained, residual_barrier = rest
        wg = lax.axis_index("wg")
        column = lax.axis_index("columns") * side_by_side + lax.axis_index("column_rank")
        row = lax.axis_index("rows") * above + lax.axis_index("row_rank")
        block_rows, block_columns = pl.ds(row * TILE_ROWS, TILE_ROWS), pl.ds(column * tile, tile)

        def load_weights(turn: Any) -> None:
            slot, depth_here = lax.rem(turn, stages), pl.ds(lax.rem(turn, steps) * TILE_K, TILE_K)
            axes = "row_rank" if above > 1 else None
            for product, w_gmem in enumerate(w_gmems):
                source = w_gmem.at[depth_here, block_columns]
                copy = partial(plgpu.copy_gmem_to_smem, source, w_smem.at[slot], brought.at[slot], collective_axes=axes)
                if len(w_gmems) == 1:
                    copy()
                else:
                    pl.when(lax.div(turn, steps) == product)(copy)

        def load_x(turn: Any) -> None:
            slot, depth_here = lax.rem(turn, stages), pl.ds(lax.rem(turn, steps) * TILE_K, TILE_K)
            axes = "column_rank" if side_by_side > 1 else None
            plgpu.copy_gmem_to_smem(x_gmem.at[block_rows, depth_here], x_smem.at[slot], brought.at[slot], collective_axes=axes)

        @pl.when(wg == CONSUMERS)
        def _produce() -> None:
            plgpu.set_max_registers(producer_registers, action="decrease")
            pl.loop(0, stages)(load_weights)
            if pdl:
                plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; x does
            pl.loop(0, stages)(load_x)
            if residual_gmem is not None:
                plgpu.copy_gmem_to_smem(residual_gmem.at[block_rows, block_columns], residual_smem, residual_barrier)

            @pl.loop(stages, turns)
            def _refill(turn: Any) -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(turn, stages)])
                load_weights(turn)
                load_x(turn)

            if pdl:
                plgpu.griddepcontrol_launch_dependents()  # the last copy is on its way: the next kernel's blocks do not compete with it

            @pl.loop(turns, turns + stages)
            def _drain(turn: Any) -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(turn, stages)])  # the cluster's other blocks signal here: it must not end before

        @pl.when(wg < CONSUMERS)
        def _consume() -> None:
            plgpu.set_max_registers(consumer_registers, action="increase")
            if pdl:
                plgpu.griddepcontrol_wait()
            here = pl.ds(wg * warpgroup_rows, warpgroup_rows)

            def product(first_turn: int) -> Any:
                def accumulate(acc: Any) -> Any:
                    @pl.loop(first_turn, first_turn + steps)
                    def _step(turn: Any) -> None:
                        slot = lax.rem(turn, stages)
                        plgpu.barrier_wait(brought.at[slot])
                        plgpu.wgmma(acc, x_smem.at[slot, here], w_smem.at[slot])
                        plgpu.wgmma_wait(1)  # the step before is done: its slot takes a later turn
                        pl.when(turn > first_turn)(lambda: plgpu.barrier_arrive(consumed.at[lax.rem(turn - 1, stages)]))

                    result = lax.optimization_barrier(acc[...].astype(out_dtype))
                    plgpu.barrier_arrive(consumed.at[(first_turn + steps - 1) % stages])
                    return result

                return pl.run_scoped(accumulate, plgpu.ACC((warpgroup_rows, tile), jnp.float32))

            # Packed until the epilogue takes a few columns at a time: two float32 arrays of a block's size have no place in the registers.
            results = tuple(product(index * steps) for index in range(len(weights)))
            if residual_gmem is not None:
                plgpu.barrier_wait(residual_barrier)
            # Neither warpgroup reads the ring any longer, and nothing more arrives in it.
            plgpu.barrier_arrive(drained)
            plgpu.barrier_wait(drained)
            for first in range(0, tile, swizzle // 2):
                columns = slice(first, first + swizzle // 2)
                total = results[-1][:, columns]
                if swiglu:
                    gate, up = results[0][:, columns].astype(jnp.float32), total.astype(jnp.float32)
                    total = ((gate / (1.0 + jnp.exp(-gate))).astype(out_dtype).astype(jnp.float32) * up).astype(out_dtype)
                if residual_gmem is not None:
                    total = (residual_smem[here, columns].astype(jnp.float32) + total.astype(jnp.float32)).astype(out_dtype)
                w_smem[wg, :, columns] = total
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(w_smem.at[wg], out_gmem.at[pl.ds(row * TILE_ROWS + wg * warpgroup_rows, warpgroup_rows), block_columns])
            plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle))
    # A slot is free when the warpgroups of every block that got a part of it have read it.
    shared = tuple(name for name, size in (("column_rank", side_by_side), ("row_rank", above)) if size > 1)
    consumed = (
        plgpu.ClusterBarrier(collective_axes=shared, num_barriers=stages, num_arrivals=CONSUMERS)
        if shared
        else plgpu.Barrier(num_barriers=stages, num_arrivals=CONSUMERS)
    )
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), out_dtype),
        grid=(width // tile // side_by_side, rows // TILE_ROWS // above),
        grid_names=("columns", "rows"),
        cluster=(side_by_side, above),
        cluster_names=("column_rank", "row_rank"),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name=f"matmul_{depth}x{width}_rows{rows}" + ("_swiglu" if swiglu else "") + ("_residual" if residual is not None else ""),
        scratch_types=[
            plgpu.SMEM((stages, TILE_ROWS, TILE_K), x.dtype, transforms=transforms),
            plgpu.SMEM((stages, TILE_K, tile), x.dtype, transforms=transforms),
            None if residual is None else plgpu.SMEM((TILE_ROWS, tile), residual.dtype, transforms=transforms),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
            consumed,
            plgpu.Barrier(num_arrivals=CONSUMERS),
            None if residual is None else plgpu.Barrier(),
        ],
    )
    return call(x, *weights, *(() if residual is None else (residual,)))
