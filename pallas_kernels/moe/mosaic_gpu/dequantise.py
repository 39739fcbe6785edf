"""Packed experts as plain arrays, for the products of many rows.

A CTA takes 64 columns of an expert through the whole depth: TMA brings units, each warp decodes its
16 columns and stores them transposed (stmatrix), TMA takes the array away.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.moe.mosaic_gpu import units as packed
from pallas_kernels.moe.mosaic_gpu.blocks import padded_table
from pallas_kernels.moe.mosaic_gpu.units import TRANSFORMS, WIDTH
from pallas_kernels.moe.mxfp4 import BLOCK, COLUMNS, UNIT, Mxfp4Weight
from pallas_kernels.types import Barrier, Ref

T = TypeVar("T")  # a ref, or its type
STAGES = 4
OUTS = 2


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    ring: steps of units. outs: steps of plain weights. table: the chosen experts. full: for each
    slot of the ring, its copy has arrived. table_ready: the table has arrived.
    """

    ring: T
    outs: T
    table: T
    full: Barrier
    table_ready: Barrier


# Compiled as a function of its own, so that layers and programs share the kernel.
@lowered_once()
def dequantise(weight: Mxfp4Weight, experts: jax.Array) -> jax.Array:
    """Return the matrices of `experts`, int32 [n], as bfloat16 [n, depth, width]."""
    _, depth, width = weight.shape
    count = experts.shape[0]
    step = max(d for d in (64, 128, 192) if depth % d == 0)
    steps = depth // step
    experts = padded_table(experts)

    def body(units: Ref, experts: Ref, out: Ref, scratch: Scratch[Ref]) -> None:
        ring, outs, table, full, ready = scratch
        tile, index = lax.axis_index("tile"), lax.axis_index("expert")
        plgpu.copy_gmem_to_smem(experts, table, ready)
        plgpu.barrier_wait(ready)
        expert = table[index]

        def load(turn: jax.Array | int) -> None:
            source = units.at[
                expert,
                pl.ds(tile * (WIDTH // COLUMNS), WIDTH // COLUMNS),
                pl.ds(turn * (step // BLOCK), step // BLOCK),
            ]
            slot = lax.rem(jnp.int32(turn), STAGES)
            plgpu.copy_gmem_to_smem(source, ring.at[slot], full.at[slot])

        for turn in range(min(STAGES, steps)):
            load(turn)

        @pl.loop(0, steps)
        def _step(turn: jax.Array) -> None:
            slot, place = lax.rem(turn, STAGES), lax.rem(turn, OUTS)
            plgpu.barrier_wait(full.at[slot])
            plgpu.wait_smem_to_gmem(OUTS - 1, wait_read_only=True)
            packed.store(ring.at[slot], outs.at[place], wide=weight.wide)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                outs.at[place],
                out.at[index, pl.ds(turn * step, step), pl.ds(tile * WIDTH, WIDTH)],
            )
            pl.when(turn + STAGES < steps)(lambda: load(turn + STAGES))

        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((count, depth, width), jnp.bfloat16),
        grid=(width // WIDTH, count),
        grid_names=("tile", "expert"),
        kernel_name=f"dequantise_{depth}x{width}",
        scratch_types=[
            Scratch(
                ring=plgpu.SMEM((STAGES, WIDTH // COLUMNS, step // BLOCK, UNIT), jnp.int32),
                outs=plgpu.SMEM((OUTS, step, WIDTH), jnp.bfloat16, transforms=TRANSFORMS),
                table=plgpu.SMEM(experts.shape, jnp.int32),
                full=plgpu.Barrier(num_barriers=STAGES),
                table_ready=plgpu.Barrier(),
            )
        ],
    )
    return call(weight.units, experts)
