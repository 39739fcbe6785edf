"""Products by head in plain jnp: the op's specification, and the path for many rows and on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.head_matmul.inputs import Inputs
from pallas_kernels.rope_cache.reference import rotate


def head_matmul(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.head_matmul.head_matmul. Heads past the last are zeros."""
    weights, cos, sin = inputs.weights, inputs.cos, inputs.sin
    heads, depth, _ = weights.shape
    x = inputs.x[:, :heads]
    # On a CPU, XLA multiplies bfloat16 only with heads as the first axis.
    by_head = x[..., :depth].swapaxes(0, 1)
    out = jnp.einsum("hrd,hdn->rhn", by_head, weights, preferred_element_type=jnp.float32)
    out = out.astype(x.dtype)
    if cos is not None and sin is not None:
        out = jnp.concatenate([out, rotate(x[..., depth:], cos[:, None], sin[:, None])], axis=-1)
    return jnp.pad(out, ((0, 0), (0, (inputs.out_heads or heads) - heads), (0, 0)))
