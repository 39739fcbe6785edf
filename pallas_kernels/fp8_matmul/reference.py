"""The product in plain jnp: the op's specification, and the path for many rows and on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_matmul.rows import Rows, quantise
from pallas_kernels.fp8_matmul.weight import Fp8Weight
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.reference import finish


def fp8_matmul(inputs: Inputs[Fp8Weight]) -> jax.Array:
    """Run the op; see pallas_kernels.fp8_matmul.fp8_matmul."""
    first = inputs.weights[0]
    return multiply(quantise(inputs.x, first.activation, first.activation_scale), inputs)


def multiply(rows: Rows, inputs: Inputs[Fp8Weight]) -> jax.Array:
    """Return the op's result from quantised rows."""
    return finish(inputs, [_product(rows, w).astype(inputs.out_dtype) for w in inputs.weights])


def _product(rows: Rows, weight: Fp8Weight) -> jax.Array:
    """Return float32 [rows, out]."""
    if weight.has_blocks or rows.scales.ndim == 2:
        return lax.platform_dependent(
            rows, weight, cpu=_scaled_before(jnp.float32), default=_scaled_before(jnp.bfloat16)
        )
    sums = lax.platform_dependent(
        rows.codes, weight.codes, cpu=_product_of_float32, default=_product_of_codes
    )
    return sums * weight.scales * rows.spread()


def _product_of_codes(x: jax.Array, codes: jax.Array) -> jax.Array:
    return lax.dot_general(x, codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _product_of_float32(x: jax.Array, codes: jax.Array) -> jax.Array:
    # XLA's CPU products of fp8 would round their sums.
    return _product_of_codes(x.astype(jnp.float32), codes.astype(jnp.float32))


def _scaled_before(dtype: jnp.dtype | type):
    """Return a product of dequantised operands: blocks along the depth differ in scale.

    Values are rounded to dtype. A sum for each block would take memory for all of them.
    """

    def product(rows: Rows, weight: Fp8Weight) -> jax.Array:
        x = (rows.codes.astype(jnp.float32) * rows.spread()).astype(dtype)
        return jnp.matmul(x, weight.to_array(dtype), preferred_element_type=jnp.float32)

    return product
