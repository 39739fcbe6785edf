"""The product in plain jnp: the specification of the op, and the path for most products of many rows and on CPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def matmul(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    squares: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    gain: jax.Array | None = None,
    swiglu: bool = False,
    transposed: bool = False,
    out_dtype: Any = jnp.bfloat16,
) -> Any:
    """See pallas_kernels.matmul.matmul."""

    def product(w: jax.Array) -> jax.Array:
        # The barrier keeps XLA from merging products of one x: on a GPU it would join the weights anew in every call.
        operand = lax.optimization_barrier(x)
        y = jnp.einsum(
            "rd,nd->rn" if transposed else "rd,dn->rn",
            operand,
            w,
            preferred_element_type=accumulator,
        )
        return (
            y
            if squares is None
            else y.astype(jnp.float32)
            * lax.rsqrt(squares.sum(0)[: x.shape[0], None] / x.shape[1] + eps)
        )

    # A bfloat16 product accumulates in float32 on a GPU whatever its result; asking for float32 there costs another kernel for the cast.
    accumulator = (
        jnp.float32
        if out_dtype != jnp.bfloat16 or squares is not None or jax.default_backend() == "cpu"
        else out_dtype
    )
    results = [product(w).astype(out_dtype) for w in weights]
    result = jax.nn.silu(results[0]) * results[1] if swiglu else jnp.concatenate(results, axis=-1)
    result = result if residual is None else residual + result
    if gain is None:
        return result
    value = result.astype(jnp.float32)
    return (
        result,
        (value * gain.astype(jnp.float32)).astype(out_dtype),
        jnp.sum(value * value, axis=1)[None],
    )
