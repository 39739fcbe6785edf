"""Norms of both latents, rotation and cache write on Hopper: one launch, a block a row."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK = 64  # a row is copied as [chunks, 64]; the key that is rotated is the last
TILE = 16  # chunks that a warpgroup reads at once: 8 values for each of its 128 threads
MAX_CHUNKS = 256  # of one copy


def unsupported(q_lora_rank: int, kv_lora_rank: int, rope_head_dim: int, dtype: Any) -> str | None:
    """Why this kernel cannot run, None if it can."""
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if rope_head_dim != CHUNK:
        return f"expected a rope_head_dim of {CHUNK}, got {rope_head_dim}"
    if (
        q_lora_rank % CHUNK
        or kv_lora_rank % CHUNK
        or q_lora_rank + kv_lora_rank + rope_head_dim > CHUNK * MAX_CHUNKS
    ):
        return f"expected latents of a multiple of {CHUNK} numbers, {CHUNK * MAX_CHUNKS} together, got {q_lora_rank} and {kv_lora_rank}"
    return None


# Compiled as a function of its own, so that a model's layers share one kernel instead of lowering one each.
@partial(jax.jit, static_argnames=("eps", "pdl"))
def norm_and_write(
    latents: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    cache: jax.Array,
    *,
    kv_norm: jax.Array,
    q_norm: jax.Array | None = None,
    eps: float,
    pdl: bool = True,
) -> tuple[jax.Array | None, jax.Array]:
    """See pallas_kernels.latent_cache.norm_and_write."""
    rows, dtype = latents.shape[0], latents.dtype
    num_blocks, block_size, _, width = cache.shape
    num_slots, half = num_blocks * block_size, CHUNK // 2
    q_chunks, kv_chunks = 0 if q_norm is None else q_norm.shape[0] // CHUNK, width // CHUNK - 1
    padded = [-(-chunks // TILE) * TILE for chunks in (q_chunks, kv_chunks)]
    matrix = plgpu.Layout.WGMMA

    def body(*refs: Any) -> None:
        latents_gmem, cos_gmem, sin_gmem, slot_gmem, kv_norm_gmem, *rest = refs
        optional: Any
        optional, rest = (rest[:1], rest[1:]) if q_chunks else ((None,), rest)
        (q_norm_gmem,) = optional
        cache_gmem, *rest = rest
        optional, rest = (rest[:1], rest[1:]) if q_chunks else ((None,), rest)
        (q_gmem,) = optional
        q_smem, kv_smem, q_gain, kv_gain, key_smem, barriers = rest
        row = lax.axis_index("row")
        if q_chunks:
            plgpu.copy_gmem_to_smem(
                q_norm_gmem, q_gain.at[pl.ds(0, q_chunks)], barriers.at[0]
            )  # no kernel writes the gains
        plgpu.copy_gmem_to_smem(kv_norm_gmem, kv_gain.at[pl.ds(0, kv_chunks)], barriers.at[1])
        if pdl:
            plgpu.griddepcontrol_wait()
        source = latents_gmem.at[row]
        if q_chunks:
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

        def norm(
            smem: Any, gain_smem: Any, chunks: int, size: int, gain_barrier: Any, barrier: Any
        ) -> None:
            layout = plgpu.Layout.WG_STRIDED((size, CHUNK), vec_size=8)
            plgpu.barrier_wait(barrier)
            values = plgpu.load(smem, layout=layout).astype(jnp.float32)  # pyright: ignore[reportCallIssue]
            if size > chunks:  # what lies past the row in shared memory is never written
                values = jnp.where(
                    plgpu.broadcasted_iota(jnp.int32, (size, CHUNK), 0, layout=layout) < chunks,
                    values,
                    0.0,
                )
            scale = lax.rsqrt(jnp.sum(values * values) / (chunks * CHUNK) + eps)
            plgpu.barrier_wait(gain_barrier)
            gain = plgpu.load(gain_smem, layout=layout)  # pyright: ignore[reportCallIssue]
            smem[...] = (values * scale).astype(dtype) * gain

        if q_chunks:
            norm(q_smem, q_gain, q_chunks, padded[0], barriers.at[0], barriers.at[2])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_smem.at[pl.ds(0, q_chunks)], q_gmem.at[row])
        norm(kv_smem, kv_gain, kv_chunks, padded[1], barriers.at[1], barriers.at[3])

        # The key is the first row of a tile whose other rows hold anything.
        plgpu.barrier_wait(barriers.at[4])

        def load(start: int) -> jax.Array:
            ref = key_smem.at[:, pl.ds(start, half)]
            return plgpu.load(ref, layout=matrix, optimized=False).astype(jnp.float32)  # pyright: ignore[reportCallIssue]

        def across(ref: Any) -> jax.Array:
            vector = plgpu.load(ref, layout=matrix.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
            return lax.broadcast_in_dim(vector, (CHUNK, half), (1,))

        first, second, cosine, sine = (
            load(0),
            load(half),
            across(cos_gmem.at[row]),
            across(sin_gmem.at[row]),
        )
        key_smem[:, pl.ds(0, half)] = (first * cosine - second * sine).astype(dtype)
        key_smem[:, pl.ds(half, half)] = (second * cosine + first * sine).astype(dtype)
        plgpu.commit_smem()

        @pl.when((slot >= 0) & (slot < num_slots))
        def _write() -> None:
            target = cache_gmem.at[lax.div(slot, block_size), lax.rem(slot, block_size)]
            plgpu.copy_smem_to_gmem(kv_smem.at[pl.ds(0, kv_chunks)], target.at[pl.ds(0, kv_chunks)])
            plgpu.copy_smem_to_gmem(key_smem.at[pl.ds(0, 1)], target.at[pl.ds(kv_chunks, 1)])

        plgpu.wait_smem_to_gmem(0)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, q_chunks, CHUNK), dtype) if q_chunks else (),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"latent_norm_and_write_{q_chunks * CHUNK}_{kv_chunks * CHUNK}",
        scratch_types=[
            *(plgpu.SMEM((size, CHUNK), dtype) if size else None for size in (*padded, *padded)),
            plgpu.SMEM((CHUNK, CHUNK), dtype),
            plgpu.Barrier(num_barriers=5),
        ],
        # Warpgroup semantics may swizzle the tiles, which copies of a part of their rows do not survive (seen on an H200).
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # The cache is changed where it is: a reference in, the same memory out.
    cache_ref = jax.new_ref(cache.reshape(num_blocks, block_size, kv_chunks + 1, CHUNK))
    gains = (
        kv_norm.reshape(kv_chunks, CHUNK),
        *(() if q_norm is None else (q_norm.reshape(q_chunks, CHUNK),)),
    )
    q = call(latents.reshape(rows, -1, CHUNK), cos, sin, slot_mapping, *gains, cache_ref)
    return q.reshape(rows, -1) if q_chunks else None, jax.freeze(cache_ref).reshape(cache.shape)
