"""Sum and norm on Hopper: a block sums and norms one row, which stays in registers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.hopper import interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load
from pallas_kernels.rms_norm.mosaic_gpu import CHUNK, TILE, scale_of
from pallas_kernels.types import Ref

MOST_WIDTH = 8192  # whose rows fit the registers of a warpgroup


def unsupported(width: int, dtype: DTypeLike) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    unit = CHUNK * TILE
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if width % unit or width > MOST_WIDTH:
        return f"expected rows of a multiple of {unit} values up to {MOST_WIDTH}, got {width}"
    return None


def sum_norm(
    parts: jax.Array, residual: jax.Array, gain: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.sum_norm.sum_norm."""
    return _sum_norm(parts, residual, gain, eps=eps, pdl=not interpreting())


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("eps", "pdl"))
def _sum_norm(
    parts: jax.Array, residual: jax.Array, gain: jax.Array, *, eps: float, pdl: bool
) -> tuple[jax.Array, jax.Array]:
    num_parts, rows, width = parts.shape
    chunks, dtype = width // CHUNK, residual.dtype

    def body(
        parts_gmem: Ref, residual_gmem: Ref, gain_gmem: Ref, sum_gmem: Ref, normed_gmem: Ref
    ) -> None:
        row = lax.axis_index("row")
        layout = plgpu.Layout.WG_STRIDED((chunks, CHUNK), vec_size=8)
        gain = load(gain_gmem, layout)
        if pdl:
            plgpu.griddepcontrol_wait()
        total = load(parts_gmem.at[0, row], layout)
        for part in range(1, num_parts):
            total = total + load(parts_gmem.at[part, row], layout)
        residual_row = load(residual_gmem.at[row], layout)
        total = (total + residual_row.astype(jnp.float32)).astype(dtype)
        sum_gmem.at[row][...] = total
        values = total.astype(jnp.float32)
        normed_gmem.at[row][...] = (values * scale_of(values, width, eps)).astype(dtype) * gain

    out = jax.ShapeDtypeStruct((rows, chunks, CHUNK), dtype)
    call = plgpu.kernel(
        body,
        out_type=(out, out),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"sum_norm_{num_parts}x{width}",
        # As in rms_norm.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    total, normed = call(
        parts.reshape(num_parts, rows, chunks, CHUNK),
        residual.reshape(rows, chunks, CHUNK),
        gain.reshape(chunks, CHUNK),
    )
    return total.reshape(rows, width), normed.reshape(rows, width)
