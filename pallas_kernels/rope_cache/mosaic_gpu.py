"""Rotary embedding and cache write on Hopper: one launch between the projections and attention.

A block takes one row, whose heads (queries, keys and values) are one tile in shared memory. Queries
and keys are normed (if the model does) and rotated there. Copies then take the queries to the
output, and keys and values to their slot of the paged cache. A cache in fp8 takes them from a
second tile, of the same heads over their scales in e4m3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dtypes import rounded_division
from pallas_kernels.hopper import interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load, store
from pallas_kernels.packing import packed_size
from pallas_kernels.rope_cache.inputs import Inputs
from pallas_kernels.types import Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout

HEAD_DIMS = (64, 128)
FP8 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(FP8).max)
MAX_HEADS = 128


def unsupported(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, cache_dtype: DTypeLike
) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if cache_dtype not in (jnp.bfloat16, FP8):
        got = jnp.dtype(cache_dtype).name
        return f"expected caches of bfloat16 or float8_e4m3fn, got {got}"
    if head_dim not in HEAD_DIMS:
        return f"expected a head_dim of {HEAD_DIMS}, got {head_dim}"
    if num_heads + 2 * num_kv_heads > MAX_HEADS:
        expected = f"at most {MAX_HEADS} heads, keys' and values' included"
        return f"expected {expected}, got {num_heads} + 2 x {num_kv_heads}"
    return None


def _row_by_row(half: int) -> Layout:
    """Return a layout in which a warp's 32 pairs of numbers lie side by side in shared memory.

    In wgmma's layout they belong to 8 rows, which share their banks.
    """
    if half == 64:
        return plgpu.Layout.TILED(
            plgpu.Tiling(((4, 64), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
        )
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, 32), (2, 32), (2,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="pdl")
def rope_and_write(inputs: Inputs, *, pdl: bool = True) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.rope_cache.rope_and_write."""
    qkv, num_heads, pack, eps = inputs.qkv, inputs.num_heads, inputs.pack, inputs.eps
    rows = qkv.shape[0]
    num_blocks, block_size, num_kv_heads, head_dim = inputs.k_cache.shape
    num_rotated, total, half = num_heads + num_kv_heads, num_heads + 2 * num_kv_heads, head_dim // 2
    padded, queries_per_kv = -(-total // 64) * 64, num_heads // num_kv_heads
    num_slots = num_blocks * block_size
    is_fp8 = inputs.k_cache.dtype == FP8
    interpreted = interpreting()
    layout = _row_by_row(half)

    def body(
        qkv_gmem: Ref,
        cos_gmem: Ref,
        sin_gmem: Ref,
        slot_gmem: Ref,
        place_gmem: Ref | None,
        q_norm_gmem: Ref | None,
        k_norm_gmem: Ref | None,
        k_scale_gmem: Ref | None,
        v_scale_gmem: Ref | None,
        k_gmem: Ref,
        v_gmem: Ref,
        *rest: Any,
    ) -> None:
        # One output, or none without query heads.
        *queries, smem, codes, barrier = rest
        row = lax.axis_index("row")
        if pdl:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        plgpu.copy_gmem_to_smem(qkv_gmem.at[row], smem.at[pl.ds(0, total)], barrier)
        slot = slot_gmem[row]

        def half_at(start: int) -> jax.Array:
            return load(smem.at[:, pl.ds(start, half)], layout, optimized=False)

        def across(ref: Ref, start: int = 0) -> jax.Array:
            vector = load(ref.at[pl.ds(start, half)], layout.reduce(0), optimized=False)
            return plgpu.layout_cast(lax.broadcast_in_dim(vector, (padded, half), (1,)), layout)

        def by_row(column: jax.Array) -> jax.Array:
            return plgpu.layout_cast(lax.broadcast_in_dim(column, (padded, half), (0,)), layout)

        def divisors(k_scale: Ref, v_scale: Ref) -> jax.Array:
            # [padded], the scale of each head; of queries, that of the last values
            head = plgpu.broadcasted_iota(jnp.int32, (padded,), 0, layout=layout.reduce(1))
            many = k_scale.shape[0] > 1
            scales = [
                scale[i if many else 0]
                for scale in (k_scale, v_scale)
                for i in range(num_kv_heads if many else 1)
            ]
            width = 1 if many else num_kv_heads
            found = jnp.full((padded,), scales[-1])
            for i, scale in enumerate(scales[:-1]):
                start = num_heads + i * width
                here = (head >= start) & (head < start + width)
                found = jnp.where(here, jnp.full((padded,), scale), found)
            return found

        # Loaded while the row's copy is in flight.
        cosine, sine = across(cos_gmem.at[row]), across(sin_gmem.at[row])
        plgpu.barrier_wait(barrier)
        # This order decides which product the compiler fuses with the sum, and so the last bit.
        raw_second, raw_first = half_at(half), half_at(0)
        first, second = raw_first.astype(jnp.float32), raw_second.astype(jnp.float32)
        head = plgpu.broadcasted_iota(jnp.int32, (padded, half), 0, layout=layout)
        if q_norm_gmem is not None and k_norm_gmem is not None:
            scale = lax.rsqrt((first * first + second * second).sum(axis=1) / head_dim + eps)
            scale = by_row(scale)

            def norm(part: jax.Array, start: int) -> jax.Array:
                gain = jnp.where(
                    head < num_heads, across(q_norm_gmem, start), across(k_norm_gmem, start)
                )
                return ((part * scale).astype(qkv.dtype) * gain).astype(jnp.float32)

            first, second = norm(first, 0), norm(second, half)
        rotates = head < num_rotated
        divisor = None
        if k_scale_gmem is not None and v_scale_gmem is not None:
            divisor = by_row(divisors(k_scale_gmem, v_scale_gmem))

        def keep(start: int, rotated: jax.Array, raw: jax.Array) -> None:
            values = jnp.where(rotates, rotated.astype(qkv.dtype), raw)
            store(smem.at[:, pl.ds(start, half)], values)
            if codes is not None:
                values = values.astype(jnp.float32)
                if divisor is not None:
                    values = rounded_division(values, divisor) if interpreted else values / divisor
                values = jnp.clip(values, -LARGEST, LARGEST)
                store(codes.at[:, pl.ds(start, half)], values.astype(codes.dtype))

        keep(0, first * cosine - second * sine, raw_first)
        keep(half, second * cosine + first * sine, raw_second)
        plgpu.commit_smem()
        for q_gmem in queries:
            if pack is None:
                plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, num_heads)], q_gmem.at[row])
                continue
            place = row if place_gmem is None else place_gmem[row]
            request, column = lax.div(place, pack), lax.rem(place, pack) * queries_per_kv
            for i in range(num_kv_heads):
                plgpu.copy_smem_to_gmem(
                    smem.at[pl.ds(i * queries_per_kv, queries_per_kv)],
                    q_gmem.at[request, i, pl.ds(column, queries_per_kv)],
                )

        @pl.when((slot >= 0) & (slot < num_slots))
        def _write() -> None:
            block, offset = lax.div(slot, block_size), lax.rem(slot, block_size)
            stored = smem if codes is None else codes
            plgpu.copy_smem_to_gmem(
                stored.at[pl.ds(num_heads, num_kv_heads)], k_gmem.at[block, offset]
            )
            plgpu.copy_smem_to_gmem(
                stored.at[pl.ds(num_rotated, num_kv_heads)], v_gmem.at[block, offset]
            )

        plgpu.wait_smem_to_gmem(0)

    q_shape = (
        (rows, num_heads)
        if pack is None
        else (inputs.packed_requests, num_kv_heads, packed_size(pack * queries_per_kv))
    )
    q_type = jax.ShapeDtypeStruct((*q_shape, head_dim), qkv.dtype)
    call = plgpu.kernel(
        body,
        out_type=(q_type,) if num_heads else (),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"rope_and_write_{num_heads}_{num_kv_heads}_{head_dim}",
        scratch_types=[
            plgpu.SMEM((padded, head_dim), qkv.dtype),
            plgpu.SMEM((padded, head_dim), FP8) if is_fp8 else None,
            plgpu.Barrier(),
        ],
        # Warpgroup semantics would swizzle the tile. Copies of fewer than 8 of a swizzled tile's
        # rows come out wrong (seen on an H200).
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # The caches are updated in place: the kernel takes references to them.
    k_ref, v_ref = jax.new_ref(inputs.k_cache), jax.new_ref(inputs.v_cache)
    made = call(
        qkv.reshape(rows, total, head_dim),
        inputs.cos,
        inputs.sin,
        inputs.slot_mapping,
        inputs.places,
        inputs.q_norm,
        inputs.k_norm,
        inputs.k_scale if is_fp8 else None,
        inputs.v_scale if is_fp8 else None,
        k_ref,
        v_ref,
    )
    q = made[0] if num_heads else jnp.zeros(q_type.shape, q_type.dtype)
    return q, jax.freeze(k_ref), jax.freeze(v_ref)
