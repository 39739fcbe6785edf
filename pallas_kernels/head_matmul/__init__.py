"""Products of each head with a matrix of its own, as latent attention's absorbed projections are, and the rotation beside them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.head_matmul import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def head_matmul(
    x: jax.Array,
    weights: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    out_heads: int | None = None,
    implementation: str = "reference",
) -> jax.Array:
    """x[:, h] @ weights[h] for each head h, accumulated in float32, in x's dtype.

    x:         [rows, at least num_heads, depth]; with cos and sin [..., depth + rope_head_dim], of which depth numbers are multiplied and
               the others rotated
    weights:   [num_heads, depth, width]
    cos, sin:  float32 [rows, rope_head_dim / 2], or neither; halves are paired (Hugging Face's rotate_half layout)
    out_heads: heads of the result, if more than num_heads: those beyond hold anything

    Returns [rows, out_heads, width (+ rope_head_dim)]. Raises ValueError for shapes that do not fit together and for what the
    implementation does not support, with the reason.
    """
    if x.ndim != 3 or weights.ndim != 3 or x.shape[1] < weights.shape[0]:
        raise ValueError(
            f"x and weights: expected [rows, heads, depth] and [heads, depth, width], got {x.shape} and {weights.shape}"
        )
    heads, depth, _ = weights.shape
    rope = x.shape[2] - depth
    if (cos is None) != (sin is None) or (rope == 0) != (cos is None):
        raise ValueError(
            f"cos and sin: expected both for {rope} numbers a head beyond the depth {depth}, or neither for none"
        )
    for name, array in (("cos", cos), ("sin", sin)):
        if array is not None and (
            array.shape != (x.shape[0], rope // 2) or array.dtype != jnp.float32
        ):
            raise ValueError(
                f"{name}: expected float32 {(x.shape[0], rope // 2)}, got {array.dtype} {array.shape}"
            )
    if out_heads is not None and out_heads < heads:
        raise ValueError(f"out_heads: expected at least {heads}, got {out_heads}")
    options: dict[str, Any] = {"cos": cos, "sin": sin, "out_heads": out_heads or heads}
    if implementation == "reference":
        return reference.head_matmul(x, weights, **options)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = hopper.missing() or unsupported(x, weights)
    if reason:
        raise ValueError(f"head_matmul, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().head_matmul(x, weights, pdl=not hopper.interpreting(), **options)


def unsupported(x: Any, weights: Any) -> str | None:
    """Why the Mosaic kernel cannot make this product, None if it can. Takes anything with a shape and a dtype."""
    return hopper.too_old() or _mosaic_gpu().unsupported(x, weights)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.head_matmul.mosaic_gpu")
