"""Products of each head with its own matrix: latent attention's absorbed projections."""

from __future__ import annotations

import jax

from pallas_kernels import hopper
from pallas_kernels.head_matmul import reference
from pallas_kernels.head_matmul.inputs import Inputs
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.types import Shaped

__all__ = ["IMPLEMENTATIONS", "Inputs", "head_matmul", "unsupported"]


def head_matmul(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Return x[:, h] @ weights[h] for each head h, accumulated in float32, in x's dtype.

    With cos and sin, the numbers of a head past the depth are rotated and follow the product.

    Returns [rows, out_heads, width (+ rope_head_dim)]. Raises ValueError for shapes that do not
    fit together and for inputs that the implementation does not support.
    """
    inputs.check()

    def reason() -> str | None:
        return hopper.missing() or unsupported(inputs.x, inputs.weights)

    if not runs_kernel("head_matmul", implementation, reason):
        return reference.head_matmul(inputs)
    from pallas_kernels.head_matmul import mosaic_gpu

    return mosaic_gpu.head_matmul(inputs, pdl=not hopper.interpreting())


def unsupported(x: Shaped, weights: Shaped) -> str | None:
    """Return why the Mosaic kernel cannot make this product, None if it can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.head_matmul import mosaic_gpu

    return mosaic_gpu.unsupported(x, weights)
