"""The end of a product whose depth was cut into parts: their sum, the residual, and the norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.rms_norm import unsupported as norm_unsupported
from pallas_kernels.sum_norm import reference

__all__ = ["IMPLEMENTATIONS", "sum_norm", "unsupported"]


def sum_norm(
    parts: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    implementation: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Return (residual + the sum of the parts, its norm), [rows, width] each.

    The parts are added in order, then the residual, in float32; the sum is rounded once, before the
    norm. The norm is that of the rms_norm op, to the bit.

    parts:    float32 [parts, rows, width]
    residual: [rows, width]
    weight:   [width], the norm's gain

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    if (
        parts.ndim != 3
        or not len(parts)
        or residual.shape != parts.shape[1:]
        or weight.shape != residual.shape[1:]
    ):
        got = f"{parts.shape}, {residual.shape} and {weight.shape}"
        expected = "[parts, rows, width], [rows, width] and [width]"
        raise ValueError(f"parts, residual and weight: expected {expected}, got {got}")
    if parts.dtype != jnp.float32:
        raise ValueError(f"parts: expected float32, got {parts.dtype}")

    def reason() -> str | None:
        return hopper.missing() or unsupported(residual)

    if not runs_kernel("sum_norm", implementation, reason):
        return reference.sum_norm(parts, residual, weight, eps=eps)
    from pallas_kernels.sum_norm import mosaic_gpu

    return mosaic_gpu.sum_norm(parts, residual, weight, eps=eps)


def unsupported(residual: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can."""
    width = residual.shape[1]
    if reason := norm_unsupported(width, residual.dtype):
        return reason
    from pallas_kernels.sum_norm import mosaic_gpu

    return mosaic_gpu.unsupported(width)
