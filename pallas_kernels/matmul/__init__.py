"""Matrix products of a decode step, with what stands next to them: SwiGLU, a residual sum, the RMS norm between two of them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.matmul import plan, reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def matmul(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    squares: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    gain: jax.Array | None = None,
    swiglu: bool = False,
    transposed: bool = False,
    out_dtype: Any = jnp.bfloat16,
    implementation: str = "reference",
) -> Any:
    """[x @ w for w in weights] side by side, accumulated in float32, cast to out_dtype.

    x:          [rows, depth]
    weights:    one or more [depth, width]; [width, depth] if transposed (a tied embedding as the head)
    residual:   [rows, width] added to the cast product
    swiglu:     weights are (gate, up) and the result is silu(x @ gate) * (x @ up), each of the three cast in turn

    An RMS norm between two products costs no pass over the rows of its own; its rows are rounded once, after the gain:
    gain:       [width] of the norm that follows. Returns then (result, result * gain, squares), squares float32 [pieces, rows or more]
    squares:    partial sums over the pieces of the squares of the rows that x is, before their gain; x's product is divided by
                sqrt(their sum / depth + eps), in float32

    Returns [rows, sum of widths] ([rows, width] with swiglu), or three arrays with gain. Raises ValueError for shapes that do not fit
    together and for what the implementation does not support, with the reason.
    """
    if (
        x.ndim != 2
        or not weights
        or any(w.ndim != 2 or w.shape[1 if transposed else 0] != x.shape[1] for w in weights)
    ):
        raise ValueError(
            f"weights: expected matrices of depth {x.shape[-1]}, got {[w.shape for w in weights]} for x {x.shape}"
        )
    widths = [w.shape[0 if transposed else 1] for w in weights]
    if swiglu and (len(weights) != 2 or widths[0] != widths[1]):
        raise ValueError(
            f"weights: expected gate and up of one width with swiglu, got widths {widths}"
        )
    width = widths[0] if swiglu else sum(widths)
    if residual is not None and residual.shape != (x.shape[0], width):
        raise ValueError(f"residual: expected {(x.shape[0], width)}, got {residual.shape}")
    if squares is not None and (squares.ndim != 2 or squares.shape[1] < x.shape[0]):
        raise ValueError(
            f"squares: expected [pieces, {x.shape[0]} rows or more], got {squares.shape}"
        )
    if gain is not None and gain.shape != (width,):
        raise ValueError(f"gain: expected {(width,)}, got {gain.shape}")
    options: dict[str, Any] = {"squares": squares, "eps": eps, "residual": residual, "gain": gain}
    options |= {"swiglu": swiglu, "transposed": transposed}
    if implementation == "reference":
        return reference.matmul(x, weights, **options, out_dtype=out_dtype)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    asked: dict[str, Any] = {
        "residual": residual is not None,
        "normed": squares is not None,
        "norms": gain is not None,
    }
    asked |= {"swiglu": swiglu, "transposed": transposed, "out_dtype": out_dtype}
    reason = hopper.missing() or unsupported(x, weights, **asked)
    if reason:
        raise ValueError(f"matmul, implementation {implementation!r}: {reason}")
    if _takes_swiglu_kernel(x.shape[0], swiglu):
        return _kernel("swiglu_mosaic_gpu").swiglu(x, *weights)
    return _kernel("mosaic_gpu").matmul(x, weights, **options, out_dtype=out_dtype)


def shares_norm(rows: int) -> bool:
    """Whether the Mosaic kernel does the norm between two products of so many rows (gain, squares)."""
    return rows <= plan.MAX_NORM_ROWS


def unsupported(
    x: Any, weights: tuple[Any, ...], *, swiglu: bool = False, **options: Any
) -> str | None:
    """Why no Mosaic kernel can make this product (see `unsupported` of plan and swiglu_mosaic_gpu), None if one can."""
    if reason := hopper.too_old():
        return reason
    if _takes_swiglu_kernel(x.shape[0], swiglu):
        return _kernel("swiglu_mosaic_gpu").unsupported(x, weights, **options)
    return plan.unsupported(x, weights, swiglu=swiglu, **options)


def _takes_swiglu_kernel(rows: int, swiglu: bool) -> bool:
    """Gate and up of more rows than the other kernel has."""
    return swiglu and rows > plan.MAX_ROWS


def _kernel(name: str) -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module(f"pallas_kernels.matmul.{name}")
