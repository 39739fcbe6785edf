"""The product in plain jnp: the op's specification, and the path where there is no kernel."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.int4_matmul.weight import Int4Weight
from pallas_kernels.matmul.inputs import Inputs
from pallas_kernels.matmul.reference import Result, between_norms


def int4_matmul(inputs: Inputs[Int4Weight]) -> Result:
    """Run the op; see pallas_kernels.int4_matmul.int4_matmul."""
    return between_norms(inputs, [_product(inputs.x, w) for w in inputs.weights])


def _product(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """Return float32 [rows, out]. Only a CPU keeps every bit of the weights."""

    def product(dtype: jnp.dtype | type):
        def multiply(x: jax.Array, weight: Int4Weight) -> jax.Array:
            array = weight.to_array(dtype)
            return jnp.matmul(x.astype(dtype), array, preferred_element_type=jnp.float32)

        return multiply

    return lax.platform_dependent(x, weight, cpu=product(jnp.float32), default=product(x.dtype))
