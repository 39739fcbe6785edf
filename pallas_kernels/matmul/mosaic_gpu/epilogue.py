"""What follows a tile's sums: the norm before, bias, SwiGLU, residual sum, and the norm after."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.matmul.mosaic_gpu import row_pieces
from pallas_kernels.matmul.mosaic_gpu.sizes import Operands, Results, Scratch, Sizes
from pallas_kernels.matmul.plan import PIECE, TILE_N
from pallas_kernels.mosaic import load, store
from pallas_kernels.swiglu import swiglu
from pallas_kernels.types import Ref, Slice

LAYOUT = plgpu.Layout.WGMMA


def row_scale(sizes: Sizes, squares: Ref, eps: float) -> jax.Array:
    """Return the inverse of what the norm before divides each row by: float32 [padded rows]."""
    depth, total = sizes.product.depth, None
    for start in range(0, squares.shape[0], TILE_N):
        sums = load(squares.at[pl.ds(start, TILE_N)], LAYOUT, optimized=False)
        piece = start + plgpu.broadcasted_iota(jnp.int32, sums.shape, 0, layout=LAYOUT)
        sums = jnp.where(piece < depth // PIECE, sums, 0.0)
        total = sums if total is None else total + sums
    assert total is not None
    return lax.rsqrt(jnp.sum(total, axis=0) / depth + eps)


def scale_of_norm(
    sizes: Sizes, operands: Operands[Ref], scratch: Scratch[Ref], eps: float, wg: jax.Array
) -> jax.Array | None:
    """Return row_scale for `finish`, None without a norm before or if it is kept in scratch.scale.

    One warpgroup keeps it in registers. Of several, which share the memory for sums across warps,
    only one may sum.
    """
    if operands.squares is None:
        return None
    squares, kept = operands.squares, scratch.scale
    if kept is None:
        return row_scale(sizes, squares, eps)

    @pl.when(wg == 0)
    def _keep() -> None:
        kept[...] = row_scale(sizes, squares, eps)
        plgpu.commit_smem()

    return None


def load_gain_and_residual(
    operands: Operands[Ref],
    scratch: Scratch[Ref],
    finishes: jax.Array,
    tile: jax.Array,
    here: tuple[Slice, Slice],
) -> None:
    """Start the copies that `finish` waits for, in the warpgroup that finishes the tile.

    here: the tile's place in the result.
    """
    if operands.gain is not None and scratch.gain is not None:
        gain = operands.gain.at[pl.ds(tile * TILE_N, TILE_N)]
        copy = partial(plgpu.copy_gmem_to_smem, gain, scratch.gain, scratch.gain_ready)
        pl.when(finishes)(copy)
    if operands.residual is not None and scratch.residual is not None:
        residual = operands.residual.at[here]
        copy = partial(plgpu.copy_gmem_to_smem, residual, scratch.residual, scratch.residual_ready)
        pl.when(finishes)(copy)


def load_bias(operands: Operands[Ref], tile: jax.Array) -> jax.Array | None:
    """Return a tile's piece of the bias, [TILE_N]; None without one."""
    if operands.bias is None:
        return None
    piece = operands.bias.at[pl.ds(tile * TILE_N, TILE_N)]
    return load(piece, LAYOUT.reduce(1), optimized=False)


def by_row(total: jax.Array, halves: Ref) -> jax.Array:
    """Return a tile of float32 sums [TILE_N, padded rows] as [padded rows, TILE_N].

    Only 16-bit values can be stored transposed: store the halves, and join them by row.
    """
    bits = lax.bitcast_convert_type(total, jnp.uint32)
    store(halves.at[0].transpose((1, 0)), (bits >> 16).astype(jnp.uint16))
    store(halves.at[1].transpose((1, 0)), (bits & 0xFFFF).astype(jnp.uint16))
    plgpu.commit_smem()
    upper = halves[0].astype(jnp.uint32) << 16
    return lax.bitcast_convert_type(upper | halves[1].astype(jnp.uint32), jnp.float32)


def finish(
    sizes: Sizes,
    results: Results[Ref],
    scratch: Scratch[Ref],
    totals: list[jax.Array],
    scale: jax.Array | None,
    bias: jax.Array | None,
    tile: jax.Array,
    here: tuple[Slice, Slice],
) -> None:
    """Write a tile of the result from its sums, one array [TILE_N, padded rows] a product.

    scale: row_scale in registers; None: in scratch.scale, or no norm before
    bias:  of load_bias
    """
    out_dtype = sizes.product.out_dtype
    if scratch.scale is not None:
        scale = load(scratch.scale, LAYOUT.reduce(0), optimized=False)
    if scale is not None:
        totals = [total * lax.broadcast_in_dim(scale, total.shape, [1]) for total in totals]
    if bias is not None:
        (total,) = totals
        wide = bias.astype(jnp.float32)
        totals = [total + lax.broadcast_in_dim(wide, total.shape, [0])]
    if sizes.product.swiglu:
        gate, up = (t.astype(out_dtype).astype(jnp.float32) for t in totals)
        total = swiglu(gate, up, out_dtype)
    else:
        (total,) = totals
        total = total.astype(out_dtype)
    if scratch.residual is not None:
        plgpu.barrier_wait(scratch.residual_ready)
        residual = scratch.residual.transpose((1, 0))[...].astype(jnp.float32)
        total = (residual + total.astype(jnp.float32)).astype(out_dtype)
    plgpu.wait_smem_to_gmem(0)  # the tile before has left scratch.out
    measured = total
    if scratch.gain is not None and scratch.scaled is not None:
        plgpu.barrier_wait(scratch.gain_ready)
        gain = load(scratch.gain, LAYOUT.reduce(1), optimized=False).astype(jnp.float32)
        value = total.astype(jnp.float32)
        measured = (value * lax.broadcast_in_dim(gain, value.shape, [0])).astype(out_dtype)
        scratch.scaled.transpose((1, 0))[...] = measured
    if scratch.halves is not None:
        scratch.out[...] = by_row(total, scratch.halves)
    else:
        scratch.out.transpose((1, 0))[...] = total
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.out, results.out.at[here])
    if scratch.scaled is not None and results.scaled is not None:
        plgpu.copy_smem_to_gmem(scratch.scaled, results.scaled.at[here])
    # While the copies run.
    if results.squares is not None:
        row_pieces.store_squares(total.astype(jnp.float32), results.squares, tile)
    if results.largest is not None:
        row_pieces.store_largest(measured.astype(jnp.float32), results.largest, tile)
