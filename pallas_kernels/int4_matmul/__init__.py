"""Products with weights in int4, of rows in bfloat16 or float32."""

from __future__ import annotations

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.int4_matmul import reference
from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, ZERO, Int4Weight, pack
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.plan import MAX_ROWS, Product
from pallas_kernels.matmul.reference import Result

# Widest rows whose norm two products share. Each CTA sums the squares of all pieces of a row.
MAX_NORM_WIDTH = 8192

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
    "shares_norm",
    "unsupported",
]


def int4_matmul(inputs: Inputs[Int4Weight], *, implementation: str = "reference") -> Result:
    """Return [x @ w for w in weights] side by side, as pallas_kernels.matmul does.

    Rows keep their dtype. Sums are float32, and the result is cast to out_dtype. Kernels of up to
    64 rows do not round weights: scales multiply sums. More rows, and XLA but on a CPU, multiply
    weights that are rounded to the rows' dtype.

    Raises ValueError for shapes that do not fit together and for inputs that the implementation
    does not support.
    """
    check(inputs)

    def reason() -> str | None:
        return hopper.missing() or unsupported(Product.of(inputs))

    if not runs_kernel("int4_matmul", implementation, reason):
        return reference.int4_matmul(inputs)
    from pallas_kernels.int4_matmul import mosaic_gpu

    return mosaic_gpu.int4_matmul(inputs)


def shares_norm(rows: int, width: int) -> bool:
    """Return whether two products of few rows share the norm between them.

    Shared or not, the norm has other bits. So it depends on the width of the rows alone, for up to
    64 rows.
    """
    return rows <= MAX_ROWS and width <= MAX_NORM_WIDTH


def unsupported(product: Product) -> str | None:
    """Return why no Mosaic kernel can make this product, None if one can."""
    if reason := hopper.too_old():
        return reason
    from pallas_kernels.int4_matmul.mosaic_gpu import many_rows, plan

    if product.rows > MAX_ROWS:
        return many_rows.unsupported(product)
    return plan.unsupported(product)


def check(inputs: Inputs[Int4Weight]) -> None:
    """Raise ValueError for weights and inputs that do not fit together."""
    inputs.check()
    if inputs.transposed:
        raise ValueError("int4_matmul: expected no transposed weights")
    first = inputs.weights[0]
    for weight in inputs.weights:
        weight.check_scales()
        if weight.group != first.group or weight.scales.dtype != first.scales.dtype:
            raise ValueError("scales: expected one group and dtype for all weights, got several")
        if (weight.zeros is None) != (first.zeros is None):
            raise ValueError("zeros: expected those of all weights, or of none")
