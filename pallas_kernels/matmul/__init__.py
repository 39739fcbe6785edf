"""Matrix products, fused with SwiGLU, a residual sum, and the norm between two of few rows."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.matmul import plan, reference
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.plan import Product, first_reads
from pallas_kernels.matmul.reference import Result

__all__ = [
    "IMPLEMENTATIONS",
    "Inputs",
    "Product",
    "Result",
    "first_reads",
    "matmul",
    "shares_norm",
    "unsupported",
]


def matmul(inputs: Inputs[jax.Array], *, implementation: str = "reference") -> Result:
    """Return [x @ w for w in weights] side by side, accumulated in float32, cast to out_dtype.

    The result is [rows, sum of widths] ([rows, width] with swiglu). With gain, returns (result,
    result * gain, squares), where squares is float32 [pieces, rows or more], the next product's.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    inputs.check()

    def reason() -> str | None:
        return hopper.missing() or unsupported(Product.of(inputs))

    if not runs_kernel("matmul", implementation, reason):
        return reference.matmul(inputs)
    rows = inputs.x.shape[0]
    if inputs.in_order and rows > plan.MAX_ROWS:
        return _in_order(inputs)
    if inputs.swiglu and rows > plan.MAX_ROWS:
        from pallas_kernels.matmul.mosaic_gpu import many_rows_swiglu

        return many_rows_swiglu.swiglu(inputs)
    from pallas_kernels.matmul import mosaic_gpu

    return mosaic_gpu.matmul(inputs)


def shares_norm(rows: int, width: int) -> bool:
    """Return whether two products of few rows share the norm between them.

    Shared or not, the norm has other bits. So it depends on the width of the rows alone, for all
    rows that the kernel for few rows takes.
    """
    return rows <= plan.MAX_ROWS and width <= plan.MAX_NORM_WIDTH


def unsupported(product: Product) -> str | None:
    """Return why no Mosaic kernel can make this product, None if one can."""
    if reason := hopper.too_old():
        return reason
    if product.in_order and product.rows > plan.MAX_ROWS:
        if _is_a_head(product):
            parts = (plan.MAX_ROWS, product.rows % plan.MAX_ROWS or plan.MAX_ROWS)
            reasons = (plan.unsupported(product.with_rows(rows)) for rows in parts)
            return next((reason for reason in reasons if reason is not None), None)
        from pallas_kernels.matmul.mosaic_gpu import any_rows

        return any_rows.unsupported(product)
    if product.swiglu and product.rows > plan.MAX_ROWS:
        from pallas_kernels.matmul.mosaic_gpu import many_rows_swiglu

        return many_rows_swiglu.unsupported(product)
    return plan.unsupported(product)


def _in_order(inputs: Inputs[jax.Array]) -> jax.Array:
    """Return the product of many rows in an order that does not depend on their number."""
    if not _is_a_head(Product.of(inputs)):
        from pallas_kernels.matmul.mosaic_gpu import any_rows

        return any_rows.matmul(inputs)
    from pallas_kernels.matmul import mosaic_gpu

    starts = range(0, inputs.x.shape[0], plan.MAX_ROWS)
    few = replace(inputs, in_order=False)
    parts = [mosaic_gpu.matmul(few.take_rows(i, i + plan.MAX_ROWS)) for i in starts]
    return jnp.concatenate([part for part in parts if not isinstance(part, tuple)])


def _is_a_head(product: Product) -> bool:
    """Return whether the product makes logits: many rows have the order of few then."""
    return product.out_dtype != jnp.bfloat16 or product.transposed
