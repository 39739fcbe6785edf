"""Norms of both latents, rotation and cache write on Hopper: one launch, one block a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.latent_cache.inputs import Inputs
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load, store
from pallas_kernels.types import Barrier, Ref

CHUNK = 64  # a row is copied as [chunks, 64]; the last chunk is the key to rotate
TILE = 16  # chunks that a warpgroup reads at once: 8 values for each of its 128 threads
MAX_CHUNKS = 256  # of one copy


def unsupported(
    q_lora_rank: int,
    kv_lora_rank: int,
    rope_head_dim: int,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if cache_dtype != jnp.bfloat16:
        return f"expected a cache of bfloat16, got {jnp.dtype(cache_dtype).name}"
    if rope_head_dim != CHUNK:
        return f"expected a rope_head_dim of {CHUNK}, got {rope_head_dim}"
    most = CHUNK * MAX_CHUNKS
    together = q_lora_rank + kv_lora_rank + rope_head_dim
    if q_lora_rank % CHUNK or kv_lora_rank % CHUNK or together > most:
        expected = f"latents of a multiple of {CHUNK} numbers, {most} together"
        return f"expected {expected}, got {q_lora_rank} and {kv_lora_rank}"
    return None


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="pdl")
def norm_and_write(inputs: Inputs, *, pdl: bool = True) -> tuple[jax.Array | None, jax.Array]:
    """Run the op; see pallas_kernels.latent_cache.norm_and_write."""
    latents, cache, eps = inputs.latents, inputs.cache, inputs.eps
    kv_norm, q_norm = inputs.kv_norm, inputs.q_norm
    rows, dtype = latents.shape[0], latents.dtype
    num_blocks, block_size, _, width = cache.shape
    num_slots, half = num_blocks * block_size, CHUNK // 2
    q_chunks, kv_chunks = 0 if q_norm is None else q_norm.shape[0] // CHUNK, width // CHUNK - 1
    padded = [-(-chunks // TILE) * TILE for chunks in (q_chunks, kv_chunks)]
    matrix = plgpu.Layout.WGMMA

    def body(
        latents_gmem: Ref,
        cos_gmem: Ref,
        sin_gmem: Ref,
        slot_gmem: Ref,
        kv_norm_gmem: Ref,
        q_norm_gmem: Ref | None,
        cache_gmem: Ref,
        q_gmem: Ref | None,
        q_smem: Ref | None,
        kv_smem: Ref,
        q_gain: Ref | None,
        kv_gain: Ref,
        key_smem: Ref,
        barriers: Barrier,
    ) -> None:
        row = lax.axis_index("row")
        # No kernel writes the gains: their copies need not wait for the kernel before.
        if q_norm_gmem is not None and q_gain is not None:
            plgpu.copy_gmem_to_smem(q_norm_gmem, q_gain.at[pl.ds(0, q_chunks)], barriers.at[0])
        plgpu.copy_gmem_to_smem(kv_norm_gmem, kv_gain.at[pl.ds(0, kv_chunks)], barriers.at[1])
        if pdl:
            plgpu.griddepcontrol_wait()
        source = latents_gmem.at[row]
        if q_smem is not None:
            plgpu.copy_gmem_to_smem(
                source.at[pl.ds(0, q_chunks)], q_smem.at[pl.ds(0, q_chunks)], barriers.at[2]
            )
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(q_chunks, kv_chunks)], kv_smem.at[pl.ds(0, kv_chunks)], barriers.at[3]
        )
        plgpu.copy_gmem_to_smem(
            source.at[pl.ds(q_chunks + kv_chunks, 1)], key_smem.at[pl.ds(0, 1)], barriers.at[4]
        )
        slot = slot_gmem[row]

        def norm(smem: Ref, gain_smem: Ref, chunks: int, gain_barrier: int, barrier: int) -> None:
            size = -(-chunks // TILE) * TILE
            layout = plgpu.Layout.WG_STRIDED((size, CHUNK), vec_size=8)
            plgpu.barrier_wait(barriers.at[barrier])
            values = load(smem, layout).astype(jnp.float32)
            if size > chunks:  # shared memory past the row is never written
                chunk = plgpu.broadcasted_iota(jnp.int32, (size, CHUNK), 0, layout=layout)
                values = jnp.where(chunk < chunks, values, 0.0)
            scale = lax.rsqrt(jnp.sum(values * values) / (chunks * CHUNK) + eps)
            plgpu.barrier_wait(barriers.at[gain_barrier])
            gain = load(gain_smem, layout)
            smem[...] = (values * scale).astype(dtype) * gain

        if q_smem is not None and q_gain is not None and q_gmem is not None:
            norm(q_smem, q_gain, q_chunks, 0, 2)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[pl.ds(0, q_chunks)], q_gmem.at[row])
        norm(kv_smem, kv_gain, kv_chunks, 1, 3)

        # The key is the first row of a tile; the other rows are never written.
        plgpu.barrier_wait(barriers.at[4])

        def half_at(start: int) -> jax.Array:
            ref = key_smem.at[:, pl.ds(start, half)]
            return load(ref, matrix, optimized=False).astype(jnp.float32)

        def across(ref: Ref) -> jax.Array:
            vector = load(ref, matrix.reduce(0), optimized=False)
            return lax.broadcast_in_dim(vector, (CHUNK, half), (1,))

        first, second = half_at(0), half_at(half)
        cosine, sine = across(cos_gmem.at[row]), across(sin_gmem.at[row])
        rotated = first * cosine - second * sine, second * cosine + first * sine
        for start, values in zip((0, half), rotated, strict=True):
            store(key_smem.at[:, pl.ds(start, half)], values.astype(dtype))
        plgpu.commit_smem()

        @pl.when((slot >= 0) & (slot < num_slots))
        def _write() -> None:
            target = cache_gmem.at[lax.div(slot, block_size), lax.rem(slot, block_size)]
            plgpu.copy_smem_to_gmem(kv_smem.at[pl.ds(0, kv_chunks)], target.at[pl.ds(0, kv_chunks)])
            plgpu.copy_smem_to_gmem(key_smem.at[pl.ds(0, 1)], target.at[pl.ds(kv_chunks, 1)])

        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((rows, q_chunks, CHUNK), dtype) if q_chunks else None,),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"latent_norm_and_write_{q_chunks * CHUNK}_{kv_chunks * CHUNK}",
        scratch_types=[
            *(plgpu.SMEM((size, CHUNK), dtype) if size else None for size in (*padded, *padded)),
            plgpu.SMEM((CHUNK, CHUNK), dtype),
            plgpu.Barrier(num_barriers=5),
        ],
        # Warpgroup semantics may swizzle the tiles. Copies of some of a swizzled tile's rows
        # come out wrong (seen on an H200).
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # The cache is updated in place: the kernel takes a reference to it.
    cache_ref = jax.new_ref(cache.reshape(num_blocks, block_size, kv_chunks + 1, CHUNK))
    (q,) = call(
        latents.reshape(rows, -1, CHUNK),
        inputs.cos,
        inputs.sin,
        inputs.slot_mapping,
        kv_norm.reshape(kv_chunks, CHUNK),
        None if q_norm is None else q_norm.reshape(q_chunks, CHUNK),
        cache_ref,
    )
    q = None if q is None else q.reshape(rows, -1)
    return q, jax.freeze(cache_ref).reshape(cache.shape)
