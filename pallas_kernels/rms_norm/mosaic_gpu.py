"""RMS norm on Hopper, a block a row.

XLA's own kernel is as fast, but it sums a row in an order that depends on how many rows there are (one row, a few, many: three programs).
Then plain decoding and verification round differently, and greedy text depends on speculation. Here a row's bits are its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting

CHUNK = 64  # a row is copied as [chunks, 64]
TILE = 16  # chunks that a warpgroup reads at once: 8 values for each of its 128 threads
MAX_CHUNKS = 256  # of one copy


def unsupported(width: int, dtype: Any) -> str | None:
    """Why this kernel cannot run, None if it can."""
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if width % CHUNK or width > CHUNK * MAX_CHUNKS:
        return (
            f"expected rows of a multiple of {CHUNK} values up to {CHUNK * MAX_CHUNKS}, got {width}"
        )
    return None


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """See pallas_kernels.rms_norm.rms_norm."""
    return _rms_norm(x, weight, eps=eps, pdl=not interpreting())


def tile_of(width: int) -> tuple[int, int]:
    """The shared memory of a row: [chunks, 64], padded to what a warpgroup reads at once. What lies past the row is never written."""
    return -(-width // (CHUNK * TILE)) * TILE, CHUNK


def scale_of(values: Any, width: int, eps: float) -> Any:
    """What a row of `width` values, float32, is multiplied by."""
    return lax.rsqrt(jnp.sum(values * values) / width + eps)


def normed_row(x_smem: Any, weight_smem: Any, weight_barrier: Any, width: int, eps: float) -> Any:
    """The norm of the row of `width` values in x_smem (tile_of(width)), times the gain that weight_barrier says has come to weight_smem."""
    padded, chunks = x_smem.shape[0], width // CHUNK
    layout = plgpu.Layout.WG_STRIDED((padded, CHUNK), vec_size=8)
    values = plgpu.load(x_smem, layout=layout).astype(jnp.float32)  # pyright: ignore[reportCallIssue]
    if padded > chunks:  # what lies past the row counts as zero
        values = jnp.where(
            plgpu.broadcasted_iota(jnp.int32, (padded, CHUNK), 0, layout=layout) < chunks,
            values,
            0.0,
        )
    scale = scale_of(values, width, eps)
    plgpu.barrier_wait(weight_barrier)
    gain = plgpu.load(weight_smem, layout=layout)  # pyright: ignore[reportCallIssue]
    return (values * scale).astype(x_smem.dtype) * gain


# Compiled as a function of its own, so that a model's layers share one kernel instead of lowering one each.
@partial(jax.jit, static_argnames=("eps", "pdl"))
def _rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, pdl: bool) -> jax.Array:
    rows, width = x.shape
    chunks = width // CHUNK
    is_whole = (
        chunks % TILE == 0
    )  # a thread's values are all there: they come and go without shared memory, 0.3 to 0.4 us faster

    def through_registers(x_gmem: Any, weight_gmem: Any, out_gmem: Any) -> None:
        row = lax.axis_index("row")
        layout = plgpu.Layout.WG_STRIDED((chunks, CHUNK), vec_size=8)
        gain = plgpu.load(weight_gmem, layout=layout)  # pyright: ignore[reportCallIssue]
        if pdl:
            plgpu.griddepcontrol_wait()
        values = plgpu.load(x_gmem.at[row], layout=layout).astype(jnp.float32)  # pyright: ignore[reportCallIssue]
        out_gmem.at[row][...] = (values * scale_of(values, width, eps)).astype(x.dtype) * gain

    def through_shared_memory(
        x_gmem: Any, weight_gmem: Any, out_gmem: Any, x_smem: Any, weight_smem: Any, barrier: Any
    ) -> None:
        row = lax.axis_index("row")
        row_in_smem = pl.ds(0, chunks)
        plgpu.copy_gmem_to_smem(
            weight_gmem, weight_smem.at[row_in_smem], barrier.at[0]
        )  # no kernel writes it
        if pdl:
            plgpu.griddepcontrol_wait()
        plgpu.copy_gmem_to_smem(x_gmem.at[row], x_smem.at[row_in_smem], barrier.at[1])
        plgpu.barrier_wait(barrier.at[1])
        x_smem[...] = normed_row(x_smem, weight_smem, barrier.at[0], width, eps)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem.at[row_in_smem], out_gmem.at[row])
        plgpu.wait_smem_to_gmem(0)

    shared = [
        plgpu.SMEM(tile_of(width), x.dtype),
        plgpu.SMEM(tile_of(width), weight.dtype),
        plgpu.Barrier(num_barriers=2),
    ]
    call = plgpu.kernel(
        through_registers if is_whole else through_shared_memory,
        out_type=jax.ShapeDtypeStruct((rows, chunks, CHUNK), x.dtype),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"rms_norm_{width}",
        scratch_types=[] if is_whole else shared,
        # Warpgroup semantics may swizzle the tiles, which copies of a part of their rows do not survive (seen on an H200).
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(x.reshape(rows, chunks, CHUNK), weight.reshape(chunks, CHUNK)).reshape(rows, width)
