"""Products with fp8 weights on Hopper: the bfloat16 kernel of few rows with half of the bytes.

A kernel quantises the rows. Of up to eight rows the product does it itself where the depth allows
it; under a norm that is not shared, of one row. The product streams codes [out, in] as they are
stored, through the rings and clusters of pallas_kernels/matmul, and multiplies codes by codes
(wgmma of e4m3). The scales multiply float32 sums: in the epilogue, or after each 128 depths where
blocks have scales.

Hopper's tensor cores keep about 14 bits of a sum of fp8 products. So a sum ends after 128 depths,
and registers add it to the others in float32 (DeepSeek-V3 technical report, section 3.3.2).

XLA (cublasLt) multiplies more rows, a narrow result from great depths in parts of the depth. Of up
to 256 rows with one scale each, a kernel makes the next product's codes from the float32 sums.
Gate, up and SwiGLU of 128 and 256 rows have a kernel for most widths. Blocks of scales have no
library call. The kernel for any number of rows multiplies them (block_scales.py). Where it does
not, as for results in float32, up to 256 rows are multiplied 64 at a time, and XLA dequantises the
operands of more. Several weights, which blocks of scales keep apart, are multiplied one by one.

The order of summation of few rows depends on the weights alone (pallas_kernels/matmul/plan.py).

    row_parts.py         how warps reduce whole rows, and what a product has found in them
    quantise.py          rows in fp8, after a norm or as they are
    block_scales.py      many rows and weights with scales of blocks
    many_rows_swiglu.py  gate, up and SwiGLU of 128 or 256 rows
    swiglu_rows.py       SwiGLU of other many rows in fp8, from cuBLAS's sums
    own_rows.py          few rows that the product norms and quantises itself
    product.py           the product of few rows
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_matmul import reference
from pallas_kernels.fp8_matmul import rows as plain
from pallas_kernels.fp8_matmul.mosaic_gpu import block_scales, many_rows_swiglu, own_rows, row_parts
from pallas_kernels.fp8_matmul.mosaic_gpu.product import Made, multiply, product_of
from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import (
    Sums,
    add_and_quantise,
    quantise,
    takes,
    takes_sums,
)
from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import Products, swiglu_rows
from pallas_kernels.fp8_matmul.mosaic_gpu.swiglu_rows import takes as takes_swiglu
from pallas_kernels.fp8_matmul.rows import MOST_IN_PARTS, BeforeNorm, RowNorm, Rows
from pallas_kernels.fp8_matmul.weight import Fp8Weight
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.plan import MAX_ROWS, Product

MAX_SWIGLU_WIDTH = 16384  # that one warpgroup quantises without spills


def fp8_matmul(
    inputs: Inputs[Fp8Weight],
    norm: RowNorm | None = None,
    largest: jax.Array | None = None,
    scales: jax.Array | None = None,
    *,
    measures: bool = False,
) -> Made:
    """Run the op; see pallas_kernels.fp8_matmul.fp8_matmul.

    measures: find the largest magnitudes in the result too; for at most MAX_ROWS rows
    """
    is_known = inputs.squares is None or largest is not None
    own = quantises(Product.of(inputs), measured=largest is not None, normed=norm is not None)
    if scales is None and is_known and own:
        return multiply(None, inputs, norm, largest, measures=measures)
    return multiply_quantised(quantised(inputs, norm, scales), inputs, measures=measures)


def product_for_norm(inputs: Inputs[Fp8Weight], largest: jax.Array | None) -> BeforeNorm:
    """Run the op; see pallas_kernels.fp8_matmul.product_for_norm."""
    # The next product has as many rows, and looks for the largest magnitudes of few alone.
    measures = inputs.x.shape[0] <= row_parts.ROWS
    made = fp8_matmul(inputs, None, largest, measures=measures)
    assert made.scaled is not None and made.squares is not None
    return BeforeNorm(made.out, made.scaled, made.squares, made.largest)


def quantised_swiglu(
    inputs: Inputs[Fp8Weight], norm: RowNorm | None, scales: jax.Array | None
) -> Rows:
    """Run the op; see pallas_kernels.fp8_matmul.quantised_swiglu."""
    rows = quantised(inputs, norm, scales)
    gate, up = inputs.weights
    if _swiglu_has_kernel(rows.codes.shape[0], *gate.shape):
        return quantise(many_rows_swiglu.swiglu(rows, gate, up), "token", None)
    sums = [
        reference.add_parts(reference.products_of_parts(rows.codes, weight.codes))
        for weight in (gate, up)
    ]
    return swiglu_rows(Products(sums[0], sums[1], gate.scales, up.scales, rows.scales))


def _swiglu_has_kernel(rows: int, depth: int, width: int) -> bool:
    """Return whether kernels multiply gate and up of many rows, and quantise the result."""
    fits = takes(width) and width <= MAX_SWIGLU_WIDTH
    return fits and many_rows_swiglu.takes(rows, depth, width)


def product_and_norm(
    inputs: Inputs[Fp8Weight], next_norm: RowNorm, scales: jax.Array | None
) -> tuple[jax.Array, Rows]:
    """Run the op; see pallas_kernels.fp8_matmul.product_and_norm."""
    rows, [weight] = quantised(inputs, None, scales), inputs.weights
    assert inputs.residual is not None
    parts = reference.products_of_parts(rows.codes, weight.codes)
    return add_and_quantise(Sums(parts, weight.scales, rows.scales, inputs.residual), next_norm)


def quantised(
    inputs: Inputs[Fp8Weight], norm: RowNorm | None = None, scales: jax.Array | None = None
) -> Rows:
    """Return the rows, or their norm, in fp8: from a kernel where one takes the depth.

    scales: of rows that are codes already
    """
    x, weight = inputs.x, inputs.weights[0]
    if scales is not None:
        return Rows(x, scales)
    if takes(x.shape[1]):
        eps = 0.0 if inputs.squares is None else inputs.eps
        scale = weight.activation_scale
        return quantise(x, weight.activation, scale, norm, inputs.squares, eps)
    assert norm is None and inputs.squares is None
    return plain.quantise(x, weight.activation, weight.activation_scale)


def multiply_quantised(rows: Rows, inputs: Inputs[Fp8Weight], *, measures: bool = False) -> Made:
    """Run the op with quantised rows."""
    count = inputs.x.shape[0]
    if count <= MAX_ROWS:
        if len(inputs.weights) == 1 or inputs.swiglu:
            return multiply(rows, inputs, measures=measures)
        made = [multiply(rows, each).out for each in inputs.by_weight()]
        return Made(jnp.concatenate(made, axis=1))
    assert not measures and inputs.squares is None
    if not block_scales.unsupported(Product.of(inputs)):
        return Made(block_scales.multiply(rows, inputs))
    if rows.scales.ndim < 2 or count > MOST_IN_PARTS:
        return Made(reference.multiply(rows, inputs))
    parts = [(start, min(start + MAX_ROWS, count)) for start in range(0, count, MAX_ROWS)]
    made = [
        multiply_quantised(rows.take_rows(*part), inputs.take_rows(*part)).out for part in parts
    ]
    return Made(jnp.concatenate(made))


def quantises(product: Product, *, measured: bool = False, normed: bool = False) -> bool:
    """Return whether a product of Fp8Weights quantises its rows.

    measured: whether the product before it has stored their largest magnitudes
    normed:   whether it norms them first
    """
    weight = product.weights[0]
    assert isinstance(weight, Fp8Weight)
    is_one = len(product.weights) == 1 or product.swiglu
    if weight.activation == "block" or product.rows > MAX_ROWS or not is_one:
        return False
    own = product_of(product, quantises=True)
    has_scales = measured or weight.activation == "static"
    return own_rows.fits(own, has_scales=has_scales, normed=normed)


def takes_largest(rows: int, weight: Fp8Weight) -> bool:
    """Return whether a product with this weight takes `largest` of the product before it."""
    if weight.activation != "token" or not row_parts.divides_pieces(weight.depth):
        return False
    x = jax.ShapeDtypeStruct((rows, weight.depth), jnp.bfloat16)
    inputs = Inputs(x=x, weights=(weight,))  # type: ignore[arg-type]
    return quantises(Product.of(inputs), measured=True)


def quantises_next(width: int, *, swiglu: bool) -> bool:
    """Return whether a kernel quantises a product's rows of this width for the next product."""
    return takes_swiglu(width) if swiglu else takes_sums(width)


def shares_norm(rows: int, width: int, weights: Sequence[Fp8Weight]) -> bool:
    """Return whether a product with rows of this width shares the norm with the one after it.

    weights: of both products
    """
    by_token = all(weight.activation == "token" for weight in weights)
    return by_token and rows <= MAX_ROWS and takes(width)
