"""RMS norm on Hopper, a block a row.

The norm itself is nothing that XLA could not do. What XLA's kernel does not do is let the next one start: this one asks for it at once
(programmatic dependent launch), so that the product that reads the normed rows fills its rings with weights while the norm runs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

LANES = 128  # threads of a warpgroup
VECTOR = 8  # values of 16 bits in the widest load


def unsupported(width: int, dtype: Any) -> str | None:
    """Why this kernel cannot run, None if it can."""
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if width % (LANES * VECTOR):
        return f"expected rows of a multiple of {LANES * VECTOR} values, got {width}"
    return None


# Compiled as a function of its own, so that a model's layers share one kernel instead of lowering one each.
@partial(jax.jit, static_argnames=("eps", "pdl"))
def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, pdl: bool = True) -> jax.Array:
    """See pallas_kernels.rms_norm.rms_norm; x [rows, width]."""
    rows, width = x.shape

    def body(x_gmem: Any, weight_gmem: Any, out_gmem: Any) -> None:
        row = lax.axis_index("row")
        if pdl:
            plgpu.griddepcontrol_launch_dependents()
        gain = weight_gmem[...]  # no kernel writes it
        if pdl:
            plgpu.griddepcontrol_wait()
        values = x_gmem.at[row][...].astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(values * values) / width + eps)
        out_gmem.at[row][...] = (values * scale).astype(x.dtype) * gain

    call = plgpu.kernel(
        body, out_type=jax.ShapeDtypeStruct((rows, width), x.dtype), grid=(rows,), grid_names=("row",), kernel_name=f"rms_norm_{width}"
    )
    return call(x, weight)
