"""Products of many rows with scales of blocks, by the kernel for any number of rows.

Its sums have one order for all numbers of rows, so a row's bits depend on nothing beside it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.weight import Fp8Weight
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.mosaic_gpu import any_rows
from pallas_kernels.matmul.plan import Product

LEAST_DEPTH = 192  # three steps of 64. 128 would be one step, which the ring does not take


def unsupported(product: Product) -> str | None:
    """Return why the kernel cannot make this product of Fp8Weights, None if it can."""
    weights = [weight for weight in product.weights if isinstance(weight, Fp8Weight)]
    if any(weight.activation != "block" or not weight.has_blocks for weight in weights):
        return "expected scales of blocks, of rows and weights"
    if product.out_dtype != jnp.bfloat16:
        return f"expected a result in bfloat16, got {jnp.dtype(product.out_dtype).name}"
    return any_rows.unfit(product, least_depth=LEAST_DEPTH)


def multiply(
    rows: Rows, inputs: Inputs[Fp8Weight], *, tuning: any_rows.Tuning | None = None
) -> jax.Array:
    """Run the op with quantised rows; see pallas_kernels.fp8_matmul.fp8_matmul."""
    if len(inputs.weights) > 1 and not inputs.swiglu:
        parts = [multiply(rows, each, tuning=tuning) for each in inputs.by_weight()]
        return jnp.concatenate(parts, axis=-1)
    tuning = tuning or any_rows.choose_tuning(Product.of(inputs))
    rows = rows.with_scales_of(any_rows.rows_of_tiles(rows.codes.shape[0]))
    codes = tuple(weight.codes for weight in inputs.weights)
    scales = any_rows.BlockScales(rows.scales, tuple(weight.scales for weight in inputs.weights))
    operands = any_rows.Operands(rows.codes, codes, inputs.bias, inputs.residual, scales)
    return any_rows.multiply(operands, tuning)
