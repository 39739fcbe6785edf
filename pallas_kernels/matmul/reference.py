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
    x, squares, out_dtype = inputs.x, inputs.squares, inputs.out_dtype

    def product(w: jax.Array) -> jax.Array:
        # Without the barrier, XLA merges products of one x and joins their weights in every call.
        operand = lax.optimization_barrier(x)
        dims = "rd,nd->rn" if inputs.transposed else "rd,dn->rn"
        y = jnp.einsum(dims, operand, w, preferred_element_type=accumulator)
        if squares is None:
            return y
        sums = squares.sum(0)[: x.shape[0], None]
        return y.astype(jnp.float32) * lax.rsqrt(sums / x.shape[1] + inputs.eps)

    # On a GPU, a bfloat16 product accumulates in float32 whatever its result. A float32 result
    # would cost another kernel for the cast.
    is_wide = out_dtype != jnp.bfloat16 or squares is not None
    accumulator = jnp.float32 if is_wide or jax.default_backend() == "cpu" else out_dtype
    result = finish(inputs, [product(w).astype(out_dtype) for w in inputs.weights])
    if inputs.gain is None:
        return result
    value = result.astype(jnp.float32)
    scaled = (value * inputs.gain.astype(jnp.float32)).astype(out_dtype)
    return result, scaled, jnp.sum(value * value, axis=1)[None]


def finish(inputs: Inputs[Any], results: list[jax.Array]) -> jax.Array:
    """Return the op's result from its products: with SwiGLU and the residual sum."""
    if inputs.swiglu:
        result = jax.nn.silu(results[0]) * results[1]
    else:
        result = jnp.concatenate(results, axis=-1)
    return result if inputs.residual is None else inputs.residual + result
