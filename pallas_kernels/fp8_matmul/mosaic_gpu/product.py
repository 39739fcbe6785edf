"""The product of quantised rows, with the scales of weights and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_matmul.mosaic_gpu import own_rows
from pallas_kernels.fp8_matmul.rows import RowNorm, Rows
from pallas_kernels.fp8_matmul.weight import BLOCK, Fp8Weight
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.mosaic_gpu import cluster_sum
from pallas_kernels.matmul.mosaic_gpu.epilogue import (
    LAYOUT,
    finish,
    load_bias,
    load_gain_and_residual,
)
from pallas_kernels.matmul.mosaic_gpu.memory import results_of, scratch_of
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Results, Scratch, Sizes
from pallas_kernels.matmul.mosaic_gpu.tile_sum import add_up
from pallas_kernels.matmul.plan import TILE_N, Product, Tuning, choose_tuning
from pallas_kernels.mosaic import load
from pallas_kernels.types import Accumulator, Index, Ref

T = TypeVar("T")  # an array, or the kernel's ref


class Scales(NamedTuple, Generic[T]):
    """Scales of the operands, float32.

    weights: for each weight [out], [], or [out / 128, in / 128]
    rows:    [padded rows], [], or by depth, [in / 128, padded rows]; None: the kernel finds them
    """

    weights: tuple[T, ...]
    rows: T | None


def product_of(product: Product, *, quantises: bool = False, measures: bool = False) -> Product:
    """Return the product of codes that a product of Fp8Weights makes."""
    weights = [weight for weight in product.weights if isinstance(weight, Fp8Weight)]
    return Product(
        jax.ShapeDtypeStruct(product.x.shape, weights[0].dtype),
        tuple(weight.codes for weight in weights),
        residual=product.residual,
        swiglu=product.swiglu,
        norms=product.norms,
        biased=product.biased,
        transposed=True,
        out_dtype=product.out_dtype,
        quantises=quantises,
        measures=measures,
    )


class Made(NamedTuple):
    """What a product returns; see matmul's sizes.Results."""

    out: jax.Array
    scaled: jax.Array | None = None
    squares: jax.Array | None = None
    largest: jax.Array | None = None


def multiply(
    rows: Rows | None,
    inputs: Inputs[Fp8Weight],
    norm: RowNorm | None = None,
    largest: jax.Array | None = None,
    *,
    measures: bool = False,
    tuning: Tuning | None = None,
) -> Made:
    """Return the op's result from quantised rows, and what was found in it.

    rows:     None: the kernel quantises inputs.x. Their scales have the norm of inputs.squares
    norm:     of inputs.x, before the kernel quantises it
    largest:  see own_rows.values_of
    measures: whether `largest` of the results is there
    """
    return Made(*_multiply(rows, inputs, norm, largest, measures=measures, tuning=tuning))


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("measures", "tuning"))
def _multiply(
    rows: Rows | None,
    inputs: Inputs[Fp8Weight],
    norm: RowNorm | None,
    largest: jax.Array | None,
    *,
    measures: bool,
    tuning: Tuning | None,
) -> tuple[jax.Array | None, ...]:
    product = product_of(Product.of(inputs), quantises=rows is None, measures=measures)
    tuning = tuning or choose_tuning(product)
    assert tuning is not None  # the public op has checked `unsupported`
    sizes = Sizes(product, tuning)
    codes = tuple(weight.codes for weight in inputs.weights)
    x = None if rows is None else rows.codes
    operands = Operands(x, codes, None, inputs.bias, inputs.residual, inputs.gain)
    values = None
    if rows is None:
        by_row = inputs.weights[0].activation_scale
        values = own_rows.values_of(
            sizes, inputs.x, norm, largest, inputs.squares, has_scale=by_row is not None
        )
    else:
        by_row = rows.with_scales_of(sizes.padded).scales
    by_column = tuple(weight.scales for weight in inputs.weights)
    scales = Scales(by_column, by_row)
    # A kernel reads no array without axes.
    scales = jax.tree.map(lambda scale: scale if scale.ndim else scale[None], scales)
    scratch = scratch_of(sizes, operands)
    if values is not None:
        scratch = own_rows.with_scratch(scratch, sizes, values)
    eps = inputs.eps if norm is None else norm.eps
    is_normed = norm is not None or (rows is None and inputs.squares is not None)
    (results,) = _kernel(sizes, scratch, eps if is_normed else None)(operands, scales, values)
    return results.out, results.scaled, results.squares, results.largest


@dataclass(frozen=True)
class _Sum:
    """The sums of one tile, as a warpgroup makes them.

    ring, scales: of the kernel. tile: of the result
    """

    ring: Ring
    scales: Scales[Ref]
    tile: jax.Array

    @property
    def depth(self) -> int:
        """Depths of a sum of the tensor cores."""
        return min(self.ring.sizes.tuning.tile_k, BLOCK)

    def multiply(self, index: jax.Array, turns: jax.Array) -> Sequence[jax.Array]:
        """Return float32 [TILE_N, padded rows] for each product; see tile_sum.multiply."""
        ring, sizes, scratch = self.ring, self.ring.sizes, self.ring.scratch
        tuning, steps, count = sizes.tuning, sizes.steps, sizes.product.accumulators
        chunks = tuning.tile_k // self.depth
        shape = TILE_N, sizes.padded

        def step(number: jax.Array, totals: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            turn = number + index * steps
            _, depths, slot = ring.place(turn)
            factors = [self.block_factors(depths.start + i * self.depth) for i in range(chunks)]
            plgpu.barrier_wait(scratch.full.at[slot])
            x = scratch.x.at[ring.resident_step(number) if sizes.resident else slot]

            def accumulate(*accumulators: Accumulator) -> list[jax.Array]:
                for i, acc in enumerate(accumulators):
                    chunk, part = divmod(i, count)
                    k = pl.ds(chunk * self.depth, self.depth)
                    w = scratch.w.at[slot, part, :, k]
                    plgpu.wgmma(acc, w, x.at[:, k].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                return [acc[...] for acc in accumulators]

            accumulators = [plgpu.ACC(shape, jnp.float32)] * (count * chunks)
            sums = pl.run_scoped(accumulate, *accumulators)
            pl.when(turn + tuning.stages < turns)(lambda: ring.refill(turn + tuning.stages))
            if sizes.pdl and tuning.launches_next:
                # When the last copy has started: the next kernel's would compete with this one's.
                pl.when(turn == jnp.maximum(turns - tuning.stages, 0))(
                    plgpu.griddepcontrol_launch_dependents
                )
            for chunk, by_part in enumerate(factors):
                for part, factor in enumerate(by_part):
                    added = sums[chunk * count + part]
                    added = added if factor is None else added * factor
                    totals = (*totals[:part], totals[part] + added, *totals[part + 1 :])
            return totals

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), LAYOUT)
        return lax.fori_loop(0, steps, step, (zeros,) * count)

    def block_factors(self, depth: Index) -> list[jax.Array | None]:
        """Return what multiplies the sums of 128 depths or less, for each product.

        None where the epilogue has all scales.
        """
        weights, rows = self.scales
        block = lax.div(jnp.int32(depth), BLOCK)
        by_row = None
        if rows is not None and len(rows.shape) == 2:
            by_row = load(rows.at[block], LAYOUT.reduce(0), optimized=False)
        factors: list[jax.Array | None] = []
        for weight in weights:
            factor = by_row
            if len(weight.shape) == 2:
                one = weight[lax.div(self.tile, BLOCK // TILE_N), block]
                factor = one if factor is None else factor * one
            if factor is not None and factor.ndim:
                shape = TILE_N, self.ring.sizes.padded
                factor = lax.broadcast_in_dim(factor, shape, [1])
            factors.append(factor)
        return factors

    def epilogue_factors(self) -> tuple[list[jax.Array | None], jax.Array | None]:
        """Return what multiplies the totals: of each weight, and of the rows."""
        weights, rows = self.scales
        columns = pl.ds(self.tile * TILE_N, TILE_N)
        factors: list[jax.Array | None] = []
        for weight in weights:
            if len(weight.shape) == 2:
                factors.append(None)
            elif weight.shape == (1,):
                factors.append(weight[0])
            else:
                factors.append(load(weight.at[columns], LAYOUT.reduce(1), optimized=False))
        if rows is None:
            rows = own_rows.row_scales(self.ring.scratch)
        if len(rows.shape) == 2:
            return factors, None
        if rows.shape == (1,):
            return factors, rows[0]
        return factors, load(rows, LAYOUT.reduce(0), optimized=False)


def _kernel(sizes: Sizes, memory: Scratch[pl.MemoryRef], eps: float | None):
    """Return the kernel with this scratch memory. eps: of the norm of rows that it quantises"""
    product, tuning = sizes.product, sizes.tuning
    shape = TILE_N, sizes.padded

    def body(
        operands: Operands[Ref],
        scales: Scales[Ref],
        values: own_rows.Values[Ref] | None,
        results: Results[Ref],
        scratch: Scratch[Ref],
    ) -> None:
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        part = lax.axis_index(cluster_sum.AXIS) if tuning.split > 1 else 0
        finishes = (wg == 0) & (part == 0)
        # Copies fill rows past the last one with zeros, and do not write them.
        all_rows = pl.ds(block * 0, sizes.padded)
        ring = Ring(sizes, operands, scratch, block, wg, part, all_rows)
        tiles_here = sizes.tiles_of(block)
        turns = sizes.steps * tiles_here

        # The kernel before is short, or launches this one early.
        ring.fill_weights(turns)
        own = None if values is None else own_rows.OwnRows(ring, values, eps)
        gain = None if own is None else own.read_gain()
        if sizes.pdl:
            plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; x does
        if own is None:
            ring.fill_x(turns)
            ring.await_x()
        else:
            own.quantise(gain, None if scales.rows is None else scales.rows[0])

        @pl.loop(0, tiles_here)
        def _tile(index: jax.Array) -> None:
            tile = sizes.tile(block, index)
            here = (all_rows, pl.ds(tile * TILE_N, TILE_N))
            load_gain_and_residual(operands, scratch, finishes, tile, here)
            bias = load_bias(operands, tile)
            tile_sum = _Sum(ring, scales, tile)
            columns, rows = tile_sum.epilogue_factors()  # loads start here
            sums = tile_sum.multiply(index, turns)

            def finish_tile(totals: list[jax.Array]) -> None:
                scaled = [
                    total if factor is None else total * _spread(factor, shape, 0)
                    for total, factor in zip(totals, columns, strict=True)
                ]
                if rows is not None:
                    scaled = [total * _spread(rows, shape, 1) for total in scaled]
                finish(sizes, results, scratch, scaled, None, bias, tile, here)

            add_up(ring, results, sums, finishes, index, tiles_here, finish_tile)

        plgpu.wait_smem_to_gmem(0)

    fused = {
        "normed": eps is not None,
        "quantised": product.quantises,
        "swiglu": product.swiglu,
        "biased": product.biased,
        "residual": product.residual,
        "norms": product.norms,
    }
    names = [n for n, present in fused.items() if present]
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
        kernel_name="_".join([f"fp8_matmul_{product.depth}x{product.width}", *names]),
        scratch_types=[memory],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
    )


def _spread(factor: jax.Array, shape: tuple[int, int], axis: int) -> jax.Array:
    """Return a scalar, or a vector along an axis, as it multiplies an array of this shape."""
    return lax.broadcast_in_dim(factor, shape, [axis]) if factor.ndim else factor
