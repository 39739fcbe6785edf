"""The product in plain jnp: the op's specification, and the path for many rows and on CPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

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


def fp8_matmul(
    inputs: Inputs[Fp8Weight], norm: RowNorm | None = None, scales: jax.Array | None = None
) -> jax.Array:
    """Run the op; see pallas_kernels.fp8_matmul.fp8_matmul."""
    x, first = inputs.x, inputs.weights[0]
    if scales is not None:
        return multiply(Rows(x, scales), inputs)
    x = x if norm is None else rms_norm(x, norm.gain, eps=norm.eps)
    rows = quantise(x, first.activation, first.activation_scale)
    if (factor := norm_factor(inputs)) is not None:
        rows = replace(rows, scales=rows.scales * factor)
    return multiply(rows, inputs)


def quantised_swiglu(
    inputs: Inputs[Fp8Weight], norm: RowNorm | None, scales: jax.Array | None
) -> Rows:
    """Run the op; see pallas_kernels.fp8_matmul.quantised_swiglu."""
    return quantise(fp8_matmul(inputs, norm, scales), "token")


def product_and_norm(
    inputs: Inputs[Fp8Weight], next_norm: RowNorm, scales: jax.Array | None
) -> tuple[jax.Array, Rows]:
    """Run the op; see pallas_kernels.fp8_matmul.product_and_norm."""
    out = fp8_matmul(inputs, scales=scales)
    return out, quantise(rms_norm(out, next_norm.gain, eps=next_norm.eps), "token")


def multiply(rows: Rows, inputs: Inputs[Fp8Weight]) -> jax.Array:
    """Return the op's result from quantised rows."""
    splits = not inputs.in_order
    return finish(inputs, [_product(rows, weight, splits=splits) for weight in inputs.weights])


def _product(rows: Rows, weight: Fp8Weight, *, splits: bool) -> jax.Array:
    """Return float32 [rows, out]. splits: whether a great depth may have parts"""
    if weight.has_blocks or rows.scales.ndim == 2:
        return lax.platform_dependent(
            rows, weight, cpu=_scaled_before(jnp.float32), default=_scaled_before(jnp.bfloat16)
        )
    parts = products_of_parts(rows.codes, weight.codes, splits=splits)
    return add_parts(parts) * weight.scales * rows.spread()


def products_of_parts(x: jax.Array, codes: jax.Array, *, splits: bool = True) -> jax.Array:
    """Return float32 [parts, rows, width], whose sum is the product of codes.

    The depth of a narrow result of 129 to 256 rows has several parts if it is great.

    splits: whether it may have them. In order it has one part, as it has with other rows
    """
    # XLA would merge two products of the same rows, up to about 150, and join their weights in
    # every call. It also merges equal barriers, so each one has its weight too.
    operands = lax.optimization_barrier((x, codes))
    return lax.platform_dependent(
        *operands,
        cpu=partial(_parts_of_float32, splits=splits),
        default=partial(_parts_of_codes, splits=splits),
    )


def add_parts(parts: jax.Array) -> jax.Array:
    """Return the sum of products_of_parts, float32 [rows, width]."""
    return parts[0] if parts.shape[0] == 1 else parts.sum(0)


def _parts_of_codes(x: jax.Array, codes: jax.Array, *, splits: bool) -> jax.Array:
    (rows, depth), width, parts = x.shape, codes.shape[0], DEPTH_PARTS
    tiles = -(-rows // TILE) * -(-width // TILE)
    is_narrow = rows in SPLIT_ROWS and tiles * parts <= 2 * NUM_SMS
    if not splits or not is_narrow or depth < parts * PART_DEPTH or depth % (parts * BLOCK):
        contract = (((1,), (1,)), ((), ()))
        return lax.dot_general(x, codes, contract, preferred_element_type=jnp.float32)[None]
    by_part = x.reshape(rows, parts, -1), codes.reshape(width, parts, -1)
    contract = (((2,), (2,)), ((1,), (1,)))
    return lax.dot_general(*by_part, contract, preferred_element_type=jnp.float32)


def _parts_of_float32(x: jax.Array, codes: jax.Array, *, splits: bool) -> jax.Array:
    # XLA's CPU products of fp8 would round their sums.
    return _parts_of_codes(x.astype(jnp.float32), codes.astype(jnp.float32), splits=splits)


def _scaled_before(dtype: jnp.dtype | type):
    """Return a product of dequantised operands: blocks along the depth differ in scale.

    Values are rounded to dtype. A sum for each block would take memory for all of them.
    """

    def product(rows: Rows, weight: Fp8Weight) -> jax.Array:
        x = rows.to_array(dtype)
        return jnp.matmul(x, weight.to_array(dtype), preferred_element_type=jnp.float32)

    return product
