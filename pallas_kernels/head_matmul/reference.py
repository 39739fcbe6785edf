"""Per-head products in plain jnp: the specification of the op, and the path for many rows and on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rope_cache.reference import rotate


def head_matmul(
    x: jax.Array,
    weights: jax.Array,
    *,
    cos: jax.Array | None = None,
    sin: jax.Array | None = None,
    out_heads: int,
) -> jax.Array:
    """See pallas_kernels.head_matmul.head_matmul; heads beyond the last are zeros."""
    heads, depth, _ = weights.shape
    x = x[:, :heads]
    by_head = x[..., :depth].swapaxes(
        0, 1
    )  # on a CPU XLA multiplies bfloat16 with heads in front only
    out = jnp.einsum("hrd,hdn->rhn", by_head, weights, preferred_element_type=jnp.float32).astype(
        x.dtype
    )
    if cos is not None and sin is not None:
        out = jnp.concatenate([out, rotate(x[..., depth:], cos[:, None], sin[:, None])], axis=-1)
    return jnp.pad(out, ((0, 0), (0, out_heads - heads), (0, 0)))
