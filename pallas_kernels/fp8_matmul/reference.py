"""The product in plain jnp: the op's specification, and the path for many rows and on CPU."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.fp8_matmul.rows import RowNorm, Rows, quantise
from pallas_kernels.fp8_matmul.weight import BLOCK, Fp8Weight
from pallas_kernels.hopper import NUM_SMS
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.reference import finish, norm_factor
from pallas_kernels.rms_norm import rms_norm

# cublasLt's fp8 products are not split along the depth, so a narrow result leaves SMs idle. With
# these many rows a deep product is a batch of so many parts of the depth, if their tiles of
# 128 x 128 fit an H200 twice (docs/notes/fp8-int4-products.md).
SPLIT_ROWS, DEPTH_PARTS = range(129, 257), 4
PART_DEPTH, TILE = 3072, 128


def fp8_matmul(inputs: Inputs[Fp8Weight], norm: RowNorm | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.fp8_matmul.fp8_matmul."""
    x, first = inputs.x, inputs.weights[0]
    x = x if norm is None else rms_norm(x, norm.gain, eps=norm.eps)
    rows = quantise(x, first.activation, first.activation_scale)
    if (factor := norm_factor(inputs)) is not None:
        rows = replace(rows, scales=rows.scales * factor)
    return multiply(rows, inputs)


def multiply(rows: Rows, inputs: Inputs[Fp8Weight]) -> jax.Array:
    """Return the op's result from quantised rows."""
    return finish(inputs, [_product(rows, weight) for weight in inputs.weights])


def _product(rows: Rows, weight: Fp8Weight) -> jax.Array:
    """Return float32 [rows, out]."""
    if weight.has_blocks or rows.scales.ndim == 2:
        return lax.platform_dependent(
            rows, weight, cpu=_scaled_before(jnp.float32), default=_scaled_before(jnp.bfloat16)
        )
    # Else XLA merges products of few rows and joins their weights in every call. A barrier of the
    # rows alone would be one for all products.
    codes = lax.optimization_barrier((rows.codes, weight.codes))
    sums = lax.platform_dependent(*codes, cpu=_product_of_float32, default=product_in_parts)
    return sums * weight.scales * rows.spread()


def _product_of_codes(x: jax.Array, codes: jax.Array) -> jax.Array:
    return lax.dot_general(x, codes, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def product_in_parts(x: jax.Array, codes: jax.Array) -> jax.Array:
    """Return the product of codes: of a narrow result from great depths, the sum of its parts."""
    (rows, depth), width, parts = x.shape, codes.shape[0], DEPTH_PARTS
    tiles = -(-rows // TILE) * -(-width // TILE)
    is_narrow = rows in SPLIT_ROWS and tiles * parts <= 2 * NUM_SMS
    if not is_narrow or depth < parts * PART_DEPTH or depth % (parts * BLOCK):
        return _product_of_codes(x, codes)
    by_part = x.reshape(rows, parts, -1), codes.reshape(width, parts, -1)
    contract = (((2,), (2,)), ((1,), (1,)))
    return lax.dot_general(*by_part, contract, preferred_element_type=jnp.float32).sum(0)


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
