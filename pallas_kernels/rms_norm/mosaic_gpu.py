"""RMS norm on Hopper, one block for each row.

XLA's own kernel is as fast, but it sums a row in an order that depends on the number of rows (one,
a few, many: three programs). Plain decoding and verification would then round differently, and
greedy text would depend on speculation. Here a row's bits depend on the row alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.hopper import interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load
from pallas_kernels.types import Barrier, Ref

CHUNK = 64  # a row is copied as [chunks, 64]
TILE = 16  # chunks that a warpgroup reads at once: 8 values for each of its 128 threads
MAX_CHUNKS = 256  # of one copy


def unsupported(width: int, dtype: DTypeLike) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    most = CHUNK * MAX_CHUNKS
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if width % CHUNK or width > most:
        return f"expected rows of a multiple of {CHUNK} values up to {most}, got {width}"
    return None


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Run the op; see pallas_kernels.rms_norm.rms_norm."""
    return _rms_norm(x, weight, eps=eps, pdl=not interpreting())


def tile_of(width: int) -> tuple[int, int]:
    """Return the shape of a row in shared memory: [chunks, 64], padded to whole TILEs.

    The padding is never written.
    """
    return -(-width // (CHUNK * TILE)) * TILE, CHUNK


def scale_of(values: jax.Array, width: int, eps: float) -> jax.Array:
    """Return the factor by which the norm multiplies a row of `width` float32 values."""
    return lax.rsqrt(jnp.sum(values * values) / width + eps)


def normed_row(
    x_smem: Ref, weight_smem: Ref, weight_barrier: Barrier, width: int, eps: float
) -> jax.Array:
    """Return the norm of the row in x_smem, of shape tile_of(width), times the gain.

    weight_smem: the gain; weight_barrier completes when its copy has arrived.
    """
    (padded, _), chunks = tile_of(width), width // CHUNK
    layout = plgpu.Layout.WG_STRIDED((padded, CHUNK), vec_size=8)
    values = load(x_smem, layout).astype(jnp.float32)
    if padded > chunks:  # the padding counts as zero
        chunk = plgpu.broadcasted_iota(jnp.int32, (padded, CHUNK), 0, layout=layout)
        values = jnp.where(chunk < chunks, values, 0.0)
    scale = scale_of(values, width, eps)
    plgpu.barrier_wait(weight_barrier)
    gain = load(weight_smem, layout)
    return (values * scale).astype(x_smem.dtype) * gain


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("eps", "pdl"))
def _rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, pdl: bool) -> jax.Array:
    rows, width = x.shape
    chunks = width // CHUNK
    # Without padding, values move between registers and device memory: 0.3 to 0.4 us faster.
    is_whole = chunks % TILE == 0

    def through_registers(x_gmem: Ref, weight_gmem: Ref, out_gmem: Ref) -> None:
        row = lax.axis_index("row")
        layout = plgpu.Layout.WG_STRIDED((chunks, CHUNK), vec_size=8)
        gain = load(weight_gmem, layout)
        if pdl:
            plgpu.griddepcontrol_wait()
        values = load(x_gmem.at[row], layout).astype(jnp.float32)
        out_gmem.at[row][...] = (values * scale_of(values, width, eps)).astype(x.dtype) * gain

    def through_shared_memory(
        x_gmem: Ref,
        weight_gmem: Ref,
        out_gmem: Ref,
        x_smem: Ref,
        weight_smem: Ref,
        barrier: Barrier,
    ) -> None:
        row = lax.axis_index("row")
        row_in_smem = pl.ds(0, chunks)
        # No kernel writes the gain: its copy need not wait for the kernel before.
        plgpu.copy_gmem_to_smem(weight_gmem, weight_smem.at[row_in_smem], barrier.at[0])
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
        # Warpgroup semantics may swizzle the tiles. Copies of some of a swizzled tile's rows
        # come out wrong (seen on an H200).
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return call(x.reshape(rows, chunks, CHUNK), weight.reshape(chunks, CHUNK)).reshape(rows, width)
