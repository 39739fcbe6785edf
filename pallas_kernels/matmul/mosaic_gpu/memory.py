"""Arrays of results and of scratch memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_gpu import cluster_sum
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Results, Scratch, Sizes
from pallas_kernels.matmul.plan import TILE_N, num_pieces


def results_of(sizes: Sizes) -> Results[jax.ShapeDtypeStruct]:
    """Return the kernel's results."""
    product = sizes.product
    out = jax.ShapeDtypeStruct((product.rows, product.width), product.out_dtype)
    pieces = jax.ShapeDtypeStruct((num_pieces(product.width), sizes.padded), jnp.float32)
    return Results(
        out=out,
        scaled=out if product.norms else None,
        squares=pieces if product.norms else None,
        largest=pieces if product.measures else None,
        shares=cluster_sum.outputs(sizes),
    )


def scratch_of(
    sizes: Sizes, operands: Operands[jax.Array] | Operands[jax.Array | None]
) -> Scratch[pl.MemoryRef]:
    """Return the scratch memory of a CTA, but for what a product that quantises adds."""
    product, tuning, padded, slots = sizes.product, sizes.tuning, sizes.padded, sizes.slots
    tile_k, others = tuning.tile_k, tuning.warpgroups - 1
    x_steps = sizes.part_depth // tile_k if sizes.resident else slots
    w_tile = (TILE_N, tile_k) if product.transposed else (tile_k, TILE_N)
    dtype, out_dtype = product.x.dtype, product.out_dtype
    # A product of fp8 has transposed weights, and rows of 64 bytes where a step is as shallow.
    swizzle = min(128, tile_k * dtype.itemsize)
    tile = (8, swizzle // dtype.itemsize)
    transforms = (plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle))
    residual, gain = operands.residual, operands.gain
    copies = product.accumulators if sizes.resident else product.accumulators + 1
    return Scratch(
        x=plgpu.SMEM((x_steps, padded, tile_k), dtype, transforms=transforms),
        w=plgpu.SMEM((slots, product.accumulators, *w_tile), dtype, transforms=transforms),
        out=plgpu.SMEM((padded, TILE_N), out_dtype),
        partial=plgpu.SMEM((others, *sizes.share), jnp.float32) if others else None,
        halves=plgpu.SMEM((2, padded, TILE_N), jnp.uint16) if sizes.is_wide else None,
        residual=None if residual is None else plgpu.SMEM((padded, TILE_N), residual.dtype),
        scale=plgpu.SMEM((padded,), jnp.float32) if product.normed and others else None,
        gain=None if gain is None else plgpu.SMEM((TILE_N,), gain.dtype),
        scaled=None if gain is None else plgpu.SMEM((padded, TILE_N), out_dtype),
        by_row=None,
        full=plgpu.Barrier(num_barriers=slots, num_arrivals=copies),
        x_ready=plgpu.Barrier(num_barriers=others + 1, num_arrivals=sizes.steps)
        if sizes.resident and not product.quantises
        else None,
        seen=None,
        done=plgpu.Barrier(num_arrivals=others) if others else None,
        taken=plgpu.Barrier(num_barriers=others) if others else None,
        residual_ready=None if residual is None else plgpu.Barrier(),
        gain_ready=None if gain is None else plgpu.Barrier(),
        received=cluster_sum.scratch(sizes),
    )
