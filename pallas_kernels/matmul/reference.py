"""The product in plain jnp: the op's specification, and the path for many rows and on CPU."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.matmul.inputs import Inputs

# The product; with a gain (product, product * gain, sums of squares).
Result: TypeAlias = jax.Array | tuple[jax.Array, jax.Array, jax.Array]


def matmul(inputs: Inputs[jax.Array]) -> Result:
    """Run the op; see pallas_kernels.matmul.matmul."""
    x, out_dtype = inputs.x, inputs.out_dtype

    def product(w: jax.Array) -> jax.Array:
        # Without the barrier, XLA merges products of one x and joins their weights in every call.
        operand = lax.optimization_barrier(x)
        dims = "rd,nd->rn" if inputs.transposed else "rd,dn->rn"
        return jnp.einsum(dims, operand, w, preferred_element_type=accumulator)

    # On a GPU, a bfloat16 product accumulates in float32 whatever its result. A float32 result
    # would cost another kernel for the cast.
    is_plain = inputs.squares is None and inputs.bias is None
    is_wide = out_dtype != jnp.bfloat16 or not is_plain
    accumulator = jnp.float32 if is_wide or jax.default_backend() == "cpu" else out_dtype
    return between_norms(inputs, [product(w) for w in inputs.weights])


def between_norms(inputs: Inputs[Any], products: list[jax.Array]) -> Result:
    """Return the op's result from its products: with the norms before and after it."""
    out_dtype, factor = inputs.out_dtype, norm_factor(inputs)
    if factor is not None:
        products = [y.astype(jnp.float32) * factor[:, None] for y in products]
    result = finish(inputs, products)
    if inputs.gain is None:
        return result
    value = result.astype(jnp.float32)
    scaled = (value * inputs.gain.astype(jnp.float32)).astype(out_dtype)
    return result, scaled, jnp.sum(value * value, axis=1)[None]


def norm_factor(inputs: Inputs[Any]) -> jax.Array | None:
    """Return what the norm before multiplies each row by, float32 [rows]; None without one."""
    if inputs.squares is None:
        return None
    rows, depth = inputs.x.shape
    return lax.rsqrt(inputs.squares.sum(0)[:rows] / depth + inputs.eps)


def finish(inputs: Inputs[Any], products: list[jax.Array]) -> jax.Array:
    """Return the op's result from its products: with the bias, SwiGLU and the residual sum."""
    if inputs.bias is not None:
        wide = [y.astype(jnp.float32) for y in products]
        products = [jnp.concatenate(wide, axis=-1) + inputs.bias.astype(jnp.float32)]
    results = [y.astype(inputs.out_dtype) for y in products]
    if inputs.swiglu:
        result = jax.nn.silu(results[0]) * results[1]
    else:
        result = jnp.concatenate(results, axis=-1)
    return result if inputs.residual is None else inputs.residual + result
