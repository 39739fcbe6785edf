"""The product of few rows with int4 weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.int4_matmul.mosaic_gpu import units
from pallas_kernels.int4_matmul.mosaic_gpu.plan import (
    choose_tuning,
    groups_of,
    plain,
    sum_depth,
)
from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, UNIT, Int4Weight
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.mosaic_gpu import cluster_sum
from pallas_kernels.matmul.mosaic_gpu.epilogue import (
    LAYOUT,
    finish,
    load_bias,
    load_gain_and_residual,
    scale_of_norm,
)
from pallas_kernels.matmul.mosaic_gpu.memory import results_of, scratch_of
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Results, Scratch, Sizes
from pallas_kernels.matmul.mosaic_gpu.tile_sum import add_up
from pallas_kernels.matmul.plan import REDUCTION_BYTES, TILE_N, Product, Tuning
from pallas_kernels.matmul.reference import Result
from pallas_kernels.types import Ref, Slice

T = TypeVar("T")  # an array, its type, or the kernel's ref
WGMMA_ROWS = 32  # padded; fewer are multiplied by mma.sync, which was as fast for 16


class ByGroup(NamedTuple, Generic[T]):
    """Scales and zeros: of each weight, or the rings of their steps.

    scales: [in / group, out] for each weight; rings [slots, products, groups, 64]
    zeros:  the same, uint8; none without zeros
    """

    scales: tuple[T, ...]
    zeros: tuple[T, ...]


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def multiply(inputs: Inputs[Int4Weight], *, tuning: Tuning | None = None) -> Result:
    """Run the op; see pallas_kernels.int4_matmul.int4_matmul."""
    product, weights = Product.of(inputs), inputs.weights
    tuning = tuning or choose_tuning(product)
    assert tuning is not None  # the public op has checked `unsupported`
    sizes = Sizes(plain(product), tuning)
    words = tuple(weight.words for weight in weights)
    operands = Operands(inputs.x, words, inputs.squares, inputs.bias, inputs.residual, inputs.gain)
    by_group = ByGroup(
        tuple(weight.scales for weight in weights),
        tuple(weight.zeros for weight in weights if weight.zeros is not None),
    )
    (results,) = _kernel(sizes, weights[0], inputs.eps, operands)(operands, by_group)
    return results.out if inputs.gain is None else (results.out, results.scaled, results.squares)


@dataclass(frozen=True)
class _Ring(Ring):
    """Copies of units, with the scales and zeros of their groups.

    by_group: of the weights. rings: of their steps. group: depths that share a scale
    """

    by_group: ByGroup[Ref]
    rings: ByGroup[Ref]
    group: int

    def _copy_weight(
        self, ref: Ref, column: jax.Array, k: Slice, slot: jax.Array, product: int
    ) -> None:
        full, tile_k = self.scratch.full.at[slot], self.sizes.tuning.tile_k
        columns = pl.ds(column * (TILE_N // COLUMNS), TILE_N // COLUMNS)
        depths = pl.ds(lax.div(k.start, DEPTHS), tile_k // DEPTHS)
        plgpu.copy_gmem_to_smem(ref.at[columns, depths], self.scratch.w.at[slot, product], full)
        count = max(1, tile_k // self.group)
        here = pl.ds(lax.div(k.start, self.group), count), pl.ds(column * TILE_N, TILE_N)
        for sources, rings in zip(self.by_group, self.rings, strict=True):
            for ring in rings:
                target = ring.at[slot, product, pl.ds(0, count)]
                plgpu.copy_gmem_to_smem(sources[product].at[here], target, full)

    def multiply(self, index: jax.Array, turns: jax.Array, depth: int) -> Sequence[jax.Array]:
        """Return float32 [TILE_N, padded rows] for each product; see tile_sum.multiply."""
        sizes, scratch = self.sizes, self.scratch
        tuning, steps = sizes.tuning, sizes.steps
        by_wgmma = sizes.padded >= WGMMA_ROWS
        multiply_step = units.multiply_by_wgmma if by_wgmma else units.multiply

        def step(number: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            turn = number + index * steps
            _, _, slot = self.place(turn)
            plgpu.barrier_wait(scratch.full.at[slot])
            zeros = self.rings.zeros[0].at[slot] if self.rings.zeros else None
            weights = units.Step(scratch.w.at[slot], self.rings.scales[0].at[slot], zeros)
            x = scratch.x.at[self.resident_step(number) if sizes.resident else slot]
            totals = multiply_step(totals, weights, x, group=self.group, sum_depth=depth)
            pl.when(turn + tuning.stages < turns)(lambda: self.refill(turn + tuning.stages))
            if sizes.pdl and tuning.launches_next:
                # When the last copy has started: the next kernel's would compete with this one's.
                pl.when(turn == jnp.maximum(turns - tuning.stages, 0))(
                    plgpu.griddepcontrol_launch_dependents
                )
            return totals

        zeros = plgpu.layout_cast(jnp.zeros((TILE_N, sizes.padded), jnp.float32), LAYOUT)
        return lax.fori_loop(0, steps, step, (zeros,) * sizes.product.accumulators)


def _kernel(sizes: Sizes, weight: Int4Weight, eps: float, operands: Operands[jax.Array]):
    """Return the kernel for these operands. weight: the first one. eps: of the norm before"""
    product, tuning = sizes.product, sizes.tuning

    def body(
        operands: Operands[Ref],
        by_group: ByGroup[Ref],
        results: Results[Ref],
        scratch: Scratch[Ref],
        rings: ByGroup[Ref],
    ) -> None:
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        part = lax.axis_index(cluster_sum.AXIS) if tuning.split > 1 else 0
        finishes = (wg == 0) & (part == 0)
        # Copies fill rows past the last one with zeros, and do not write them.
        all_rows = pl.ds(block * 0, sizes.padded)
        ring = _Ring(
            sizes, operands, scratch, block, wg, part, all_rows, by_group, rings, weight.group
        )
        tiles_here = sizes.tiles_of(block)
        turns = sizes.steps * tiles_here

        if tuning.weights_first:
            ring.fill_weights(turns)
        if sizes.pdl:
            plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; x does
        ring.fill_x(turns)
        if not tuning.weights_first:
            ring.fill_weights(turns)
        ring.await_x()
        scale = scale_of_norm(sizes, operands, scratch, eps, wg)

        @pl.loop(0, tiles_here)
        def _tile(index: jax.Array) -> None:
            tile = sizes.tile(block, index)
            here = (all_rows, pl.ds(tile * TILE_N, TILE_N))
            load_gain_and_residual(operands, scratch, finishes, tile, here)
            bias = load_bias(operands, tile)
            sums = ring.multiply(index, turns, sum_depth(weight))

            def finish_tile(totals: list[jax.Array]) -> None:
                finish(sizes, results, scratch, totals, scale, bias, tile, here)

            add_up(ring, results, sums, finishes, index, tiles_here, finish_tile)

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=(results_of(sizes),),
        grid=(sizes.blocks,),
        grid_names=("block",),
        **(
            {"cluster": (tuning.split,), "cluster_names": (cluster_sum.AXIS,)}
            if tuning.split > 1
            else {}
        ),
        num_threads=tuning.warpgroups,
        thread_name="wg",
        kernel_name=product.kernel_name("int4_matmul"),
        scratch_types=_scratch(sizes, weight, operands),
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=REDUCTION_BYTES if product.normed else 0
        ),
    )


def _scratch(
    sizes: Sizes, weight: Int4Weight, operands: Operands[jax.Array]
) -> tuple[Scratch[pl.MemoryRef], ByGroup[pl.MemoryRef]]:
    tuning, products = sizes.tuning, sizes.product.accumulators
    lead, groups = (sizes.slots, products), groups_of(weight, tuning.tile_k)
    words = (*lead, TILE_N // COLUMNS, tuning.tile_k // DEPTHS, UNIT)
    scales = plgpu.SMEM((*lead, groups, TILE_N), weight.scales.dtype)
    # A copy's place is a multiple of 128 bytes.
    zeros = plgpu.SMEM((*lead, max(2, groups), TILE_N), jnp.uint8)
    has_zeros = weight.zeros is not None
    copies = products * (3 if has_zeros else 2) + (0 if sizes.resident else 1)
    scratch = scratch_of(sizes, operands)._replace(
        w=plgpu.SMEM(words, jnp.int32),
        full=plgpu.Barrier(num_barriers=sizes.slots, num_arrivals=copies),
    )
    return scratch, ByGroup((scales,), (zeros,) if has_zeros else ())
