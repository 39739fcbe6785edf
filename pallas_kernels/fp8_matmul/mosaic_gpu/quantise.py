"""Rows in fp8, one CTA for each row: no scale depends on another row."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_matmul import rows as reference
from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.weight import DTYPE, LARGEST, Activation
from pallas_kernels.hopper import interpreting
from pallas_kernels.mosaic import load
from pallas_kernels.types import Ref

CHUNK = 64  # a row is read as [chunks, 64]
TILE = 16  # chunks that a warpgroup reads at once: 8 values for each of its 128 threads


def takes(depth: int, activation: Activation) -> bool:
    """Return whether the kernel takes rows of this depth; XLA takes all."""
    return activation != "block" and depth % (CHUNK * TILE) == 0


def quantise(x: jax.Array, activation: Activation, scale: jax.Array | None) -> Rows:
    """Return x [rows, depth] in fp8; see pallas_kernels.fp8_matmul.rows.quantise."""
    if not takes(x.shape[1], activation):
        return reference.quantise(x, activation, scale)
    return _quantise(x, scale, pdl=not interpreting())


# Compiled as a function of its own, so that a model's layers share one kernel.
@partial(jax.jit, static_argnames="pdl")
def _quantise(x: jax.Array, scale: jax.Array | None, *, pdl: bool) -> Rows:
    rows, depth = x.shape
    chunks = depth // CHUNK

    def body(x_gmem: Ref, scale_gmem: Ref | None, codes_gmem: Ref, scales_gmem: Ref | None) -> None:
        row = lax.axis_index("row")
        layout = plgpu.Layout.WG_STRIDED((chunks, CHUNK), vec_size=8)
        if pdl:
            plgpu.griddepcontrol_wait()
        values = load(x_gmem.at[row], layout).astype(jnp.float32)
        if scale_gmem is None:
            largest = jnp.max(jnp.abs(values))
            one = jnp.where(largest == 0, jnp.float32(1), largest / LARGEST)
        else:
            one = scale_gmem[0]
        scaled = jnp.clip(values / one, -LARGEST, LARGEST)
        codes_gmem.at[row][...] = scaled.astype(DTYPE)
        if scales_gmem is not None:
            scales_gmem[row] = one

    out = jax.ShapeDtypeStruct((rows, chunks, CHUNK), DTYPE)
    scales = jax.ShapeDtypeStruct((rows,), jnp.float32)
    call = plgpu.kernel(
        body,
        out_type=(out, scales if scale is None else None),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"quantise_{depth}",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    codes, made = call(x.reshape(rows, chunks, CHUNK), None if scale is None else scale[None])
    return Rows(codes.reshape(rows, depth), made if scale is None else scale)
