"""The end of a product whose depth was cut into parts: their sum, the residual, and the norm."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.sum_norm import reference

__all__ = ["IMPLEMENTATIONS", "num_parts", "sum_norm", "unsupported"]

FEWEST_ROWS, MOST_ROWS = 65, 256  # measured: 96 to 256
PARTS = 2
TILE = 64  # columns of cuBLAS's tiles for such products


def sum_norm(
    parts: jax.Array,
    residual: jax.Array,
    gain: jax.Array,
    *,
    eps: float,
    implementation: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Return (residual + the sum of the parts, its norm), [rows, width] of residual's dtype each.

    The parts are added in order, then the residual, in float32; the sum is rounded once, before the
    norm. The norm is that of the rms_norm op, to the bit.

    parts:    float32 [parts, rows, width]
    residual: [rows, width]
    gain:     [width] of residual's dtype, the norm's

    Raises ValueError for shapes and dtypes that do not fit together and for inputs that the
    implementation does not support.
    """
    if (
        parts.ndim != 3
        or not len(parts)
        or residual.shape != parts.shape[1:]
        or gain.shape != residual.shape[1:]
    ):
        got = f"{parts.shape}, {residual.shape} and {gain.shape}"
        expected = "[parts, rows, width], [rows, width] and [width]"
        raise ValueError(f"parts, residual and gain: expected {expected}, got {got}")
    if parts.dtype != jnp.float32 or gain.dtype != residual.dtype:
        got = f"{parts.dtype}, {residual.dtype} and {gain.dtype}"
        expected = "float32, and one dtype of residual and gain"
        raise ValueError(f"parts, residual and gain: expected {expected}, got {got}")

    def reason() -> str | None:
        return hopper.missing() or unsupported(residual.shape[1], residual.dtype)

    if not runs_kernel("sum_norm", implementation, reason):
        return reference.sum_norm(parts, residual, gain, eps=eps)
    from pallas_kernels.sum_norm import mosaic_gpu

    return mosaic_gpu.sum_norm(parts, residual, gain, eps=eps)


def num_parts(rows: int, depth: int, width: int) -> int:
    """Return the parts into which a product's depth should be cut for this op; 1 for none.

    cuBLAS cuts the depth of few, deep tiles itself, and sums by a kernel of its own, which this op
    saves. Two parts should fill the SMs at once. docs/notes/many-row-products.md has the figures.
    """
    fills_device = hopper.NUM_SMS // 2 < PARTS * width // TILE <= hopper.NUM_SMS
    is_deep = depth > width and depth % PARTS == 0
    return PARTS if FEWEST_ROWS <= rows <= MOST_ROWS and is_deep and fills_device else 1


def unsupported(width: int, dtype: DTypeLike) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.sum_norm import mosaic_gpu

    return mosaic_gpu.unsupported(width, dtype)
