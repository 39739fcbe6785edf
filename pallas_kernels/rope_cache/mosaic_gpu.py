"""Rotary embedding and cache write on Hopper: one launch between the projections and attention.

A block takes one row: all its heads, queries, keys and values, are one tile in shared memory. Queries and keys are normed (if the model
does) and rotated there; copies then take the queries to the output and keys and values straight to their slot of the paged cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.packing import packed_size

HEAD_DIMS = (64, 128)
MAX_HEADS = 128


def unsupported(num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any) -> str | None:
    """Why this kernel cannot run, None if it can."""
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if head_dim not in HEAD_DIMS:
        return f"expected a head_dim of {HEAD_DIMS}, got {head_dim}"
    if num_heads + 2 * num_kv_heads > MAX_HEADS:
        return f"expected at most {MAX_HEADS} heads, keys' and values' included, got {num_heads} + 2 x {num_kv_heads}"
    return None


def _row_by_row(half: int) -> Any:
    """A warp's 32 pairs of numbers lie side by side in shared memory. In wgmma's layout they are of 8 rows, which share their banks."""
    if half == 64:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4, 64), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, 32), (2, 32), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


# Compiled as a function of its own, so that a model's layers share one kernel instead of lowering one each.
@partial(jax.jit, static_argnames=("num_heads", "eps", "pack", "pdl"))
def rope_and_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    num_heads: int,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    pack: int | None = None,
    pdl: bool = True,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See pallas_kernels.rope_cache.rope_and_write."""
    rows = qkv.shape[0]
    num_blocks, block_size, num_kv_heads, head_dim = k_cache.shape
    num_rotated, total, half = num_heads + num_kv_heads, num_heads + 2 * num_kv_heads, head_dim // 2
    padded, group = -(-total // 64) * 64, num_heads // num_kv_heads
    num_slots = num_blocks * block_size
    normed = q_norm is not None
    layout = _row_by_row(half)

    def body(*refs: Any) -> None:
        qkv_gmem, cos_gmem, sin_gmem, slot_gmem, *rest = refs
        (q_norm_gmem, k_norm_gmem), rest = (rest[:2], rest[2:]) if normed else ((None, None), rest)
        k_gmem, v_gmem, q_gmem, smem, barrier = rest
        row = lax.axis_index("row")
        if pdl:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        plgpu.copy_gmem_to_smem(qkv_gmem.at[row], smem.at[pl.ds(0, total)], barrier)
        slot = slot_gmem[row]

        def load(start: int) -> jax.Array:
            return plgpu.load(smem.at[:, pl.ds(start, half)], layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def across(ref: Any, start: int = 0) -> jax.Array:
            vector = plgpu.load(
                ref.at[pl.ds(start, half)], layout=layout.reduce(0), optimized=False
            )  # pyright: ignore[reportCallIssue]
            return plgpu.layout_cast(lax.broadcast_in_dim(vector, (padded, half), (1,)), layout)

        cosine, sine = (
            across(cos_gmem.at[row]),
            across(sin_gmem.at[row]),
        )  # on their way while the row is
        plgpu.barrier_wait(barrier)
        # In this order: by it the compiler decides which product of a sum it fuses with the addition, and so the last bit.
        raw_second, raw_first = load(half), load(0)
        first, second = raw_first.astype(jnp.float32), raw_second.astype(jnp.float32)
        head = plgpu.broadcasted_iota(jnp.int32, (padded, half), 0, layout=layout)
        if normed:
            scale = lax.rsqrt((first * first + second * second).sum(axis=1) / head_dim + eps)
            scale = plgpu.layout_cast(lax.broadcast_in_dim(scale, (padded, half), (0,)), layout)

            def norm(part: jax.Array, start: int) -> jax.Array:
                gain = jnp.where(
                    head < num_heads, across(q_norm_gmem, start), across(k_norm_gmem, start)
                )
                return ((part * scale).astype(qkv.dtype) * gain).astype(jnp.float32)

            first, second = norm(first, 0), norm(second, half)
        rotates = head < num_rotated
        smem[:, pl.ds(0, half)] = jnp.where(
            rotates, (first * cosine - second * sine).astype(qkv.dtype), raw_first
        )
        smem[:, pl.ds(half, half)] = jnp.where(
            rotates, (second * cosine + first * sine).astype(qkv.dtype), raw_second
        )
        plgpu.commit_smem()
        if pack is None:
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, num_heads)], q_gmem.at[row])
        else:
            request, column = lax.div(row, pack), lax.rem(row, pack) * group
            for i in range(num_kv_heads):
                plgpu.copy_smem_to_gmem(
                    smem.at[pl.ds(i * group, group)], q_gmem.at[request, i, pl.ds(column, group)]
                )

        @pl.when((slot >= 0) & (slot < num_slots))
        def _write() -> None:
            block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
            plgpu.copy_smem_to_gmem(
                smem.at[pl.ds(num_heads, num_kv_heads)], k_gmem.at[block, offset]
            )
            plgpu.copy_smem_to_gmem(
                smem.at[pl.ds(num_rotated, num_kv_heads)], v_gmem.at[block, offset]
            )

        plgpu.wait_smem_to_gmem(0)

    q_shape = (
        (rows, num_heads)
        if pack is None
        else (rows // pack, num_kv_heads, packed_size(pack * group))
    )
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((*q_shape, head_dim), qkv.dtype),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"rope_and_write_{num_heads}_{num_kv_heads}_{head_dim}",
        scratch_types=[plgpu.SMEM((padded, head_dim), qkv.dtype), plgpu.Barrier()],
        # Warpgroup semantics would swizzle the tile, and copies of fewer than 8 of its rows come out wrong then (seen on an H200).
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # The caches are changed where they are: a reference in, the same memory out.
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    norms = (q_norm, k_norm) if normed else ()
    q = call(qkv.reshape(rows, total, head_dim), cos, sin, slot_mapping, *norms, k_ref, v_ref)
    return q, jax.freeze(k_ref), jax.freeze(v_ref)
