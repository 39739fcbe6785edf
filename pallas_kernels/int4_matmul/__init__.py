"""Products with weights in int4, of rows in bfloat16 or float32."""

from __future__ import annotations

import jax

from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.int4_matmul import reference
from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, ZERO, Int4Weight, pack
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.plan import Product

__all__ = [
    "COLUMNS",
    "DEPTHS",
    "IMPLEMENTATIONS",
    "ZERO",
    "Inputs",
    "Int4Weight",
    "Product",
    "int4_matmul",
    "pack",
    "unsupported",
]


def int4_matmul(inputs: Inputs[Int4Weight], *, implementation: str = "reference") -> jax.Array:
    """Return [x @ w for w in weights] side by side, as pallas_kernels.matmul does.

    Rows keep their dtype. Sums are float32, and the result is cast to out_dtype.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    check(inputs)
    if not runs_kernel("int4_matmul", implementation, lambda: unsupported(Product.of(inputs))):
        return reference.int4_matmul(inputs)
    raise NotImplementedError


def unsupported(product: Product) -> str | None:
    """Return why no Mosaic kernel can make this product, None if one can."""
    return "has no kernel for int4 weights"


def check(inputs: Inputs[Int4Weight]) -> None:
    """Raise ValueError for weights and inputs that do not fit together."""
    inputs.check()
    if inputs.squares is not None or inputs.gain is not None or inputs.transposed:
        raise ValueError("int4_matmul: expected no squares, gain or transposed weights")
    for weight in inputs.weights:
        depth, width = weight.shape
        groups = weight.scales.shape[0]
        if weight.scales.shape != (groups, width) or not groups or depth % groups:
            expected = f"[groups that divide {depth}, {width}]"
            raise ValueError(f"scales: expected {expected}, got {weight.scales.shape}")
        if weight.zeros is not None and weight.zeros.shape != weight.scales.shape:
            raise ValueError(f"zeros: expected {weight.scales.shape}, got {weight.zeros.shape}")
