"""Matrix products of a decode step, fused with SwiGLU, a residual sum, and the norm between two."""

from __future__ import annotations

import jax

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
    if _takes_swiglu_kernel(inputs.x.shape[0], inputs.swiglu):
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
    if _takes_swiglu_kernel(product.rows, product.swiglu):
        from pallas_kernels.matmul.mosaic_gpu import many_rows_swiglu

        return many_rows_swiglu.unsupported(product)
    return plan.unsupported(product)


def _takes_swiglu_kernel(rows: int, swiglu: bool) -> bool:
    """Return whether gate and up have more rows than the kernel for few rows takes."""
    return swiglu and rows > plan.MAX_ROWS
