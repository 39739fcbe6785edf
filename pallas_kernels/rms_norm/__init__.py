"""RMS norm: what stands before every projection of a decoder layer."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import jax

from pallas_kernels import hopper
from pallas_kernels.rms_norm import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def rms_norm(
    x: jax.Array, weight: jax.Array, *, eps: float, implementation: str = "reference"
) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) in float32, cast to x's dtype, then scaled: the order of casts that Hugging Face's Llama uses.

    x: [rows, width]; weight: [width]. Returns [rows, width] in x's dtype. Raises ValueError for shapes that do not fit together and for
    what the implementation does not support, with the reason.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:]:
        raise ValueError(
            f"x and weight: expected [rows, width] and [width], got {x.shape} and {weight.shape}"
        )
    if implementation == "reference":
        return reference.rms_norm(x, weight, eps=eps)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = hopper.missing() or unsupported(x.shape[1], x.dtype)
    if reason:
        raise ValueError(f"rms_norm, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().rms_norm(x, weight, eps=eps)


def unsupported(width: int, dtype: Any) -> str | None:
    """Why the Mosaic kernel cannot run, None if it can."""
    return hopper.too_old() or _mosaic_gpu().unsupported(width, dtype)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.rms_norm.mosaic_gpu")
