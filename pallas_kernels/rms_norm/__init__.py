"""RMS norm, as it stands before every projection of a decoder layer."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.rms_norm import reference

__all__ = ["IMPLEMENTATIONS", "rms_norm", "unsupported"]


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: str = "reference"
) -> jax.Array:
    """Return x / sqrt(mean(x^2) + eps) in float32, cast to x's dtype, then scaled by weight.

    This order of casts is that of Hugging Face's Llama.

    x: [rows, width]; weight: [width]. Returns [rows, width] in x's dtype. Raises ValueError for
    shapes that do not fit together and for inputs that the implementation does not support.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        got = f"{x.shape} and {weight.shape}"
        raise ValueError(f"x and weight: expected [rows, width] and [width], got {got}")

    if not runs_kernel(
        "rms_norm", implementation, lambda: hopper.missing() or unsupported(x.shape[1], x.dtype)
    ):
        return reference.rms_norm(x, weight, eps=eps)
    from pallas_kernels.rms_norm import mosaic_gpu

    return mosaic_gpu.rms_norm(x, weight, eps=eps)


def unsupported(width: int, dtype: DTypeLike) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.rms_norm import mosaic_gpu

    return mosaic_gpu.unsupported(width, dtype)
