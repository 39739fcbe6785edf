"""The experts in plain jnp: the specification of the op, and the path for few rows on CPU. Every expert is given every row."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    gate: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> jax.Array:
    """See pallas_kernels.moe.experts."""
    count = gate_up.shape[0]

    def product(x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        y = jnp.einsum("etd,edf->etf", x, weight, preferred_element_type=jnp.float32)
        return (y if bias is None else y + bias[:, None].astype(jnp.float32)).astype(x.dtype)

    # A copy of the rows for each expert: with one operand for all, XLA transposes the weights at every call.
    spread = jnp.broadcast_to(x, (count, *x.shape))
    out = product(
        gated(product(spread, gate_up, gate_up_bias), gate, alpha=alpha, limit=limit),
        down,
        down_bias,
    )
    # [experts, rows]: 0 for what a row did not choose
    of_expert = jnp.where(ids == jnp.arange(count)[:, None, None], weights, 0.0).sum(-1)
    return jnp.einsum("et,etd->td", of_expert, out.astype(jnp.float32)).astype(x.dtype)


def gated(gate_up: jax.Array, kind: str, *, alpha: float, limit: float) -> jax.Array:
    """The activation [..., 2 * intermediate] -> [..., intermediate], in float32."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return activated(gate, up, kind, alpha=alpha, limit=limit).astype(gate_up.dtype)


def activated(
    gate: jax.Array, up: jax.Array, kind: str, *, alpha: float, limit: float
) -> jax.Array:
    """Of float32 gate and up of one shape."""
    if kind != "silu":
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if kind == "clamped":
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
    return jax.nn.silu(gate) * up
