"""The experts in plain jnp: the specification of the op, and the path for few rows on CPU.

Every expert multiplies every row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.moe.inputs import Gate, Inputs
from pallas_kernels.moe.mxfp4 import Mxfp4Weight
from pallas_kernels.moe.stored import Codes, Operand, multiply, operand_of


def experts(inputs: Inputs) -> jax.Array:
    """Run the op; see pallas_kernels.moe.experts."""
    x, weights, ids = inputs.x, inputs.weights, inputs.ids[:, : inputs.top_k]
    gate_up_weight, down_weight = (
        w.to_array(x.dtype) if isinstance(w, Mxfp4Weight) else w
        for w in (inputs.gate_up, inputs.down)
    )
    count, dtype = gate_up_weight.shape[0], x.dtype
    if inputs.first_expert is not None:
        ids = ids - inputs.first_expert

    def contract(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("etd,edf->etf", x, weight, preferred_element_type=jnp.float32)

    def product(x: Operand, weight: jax.Array | Codes, bias: jax.Array | None) -> jax.Array:
        if isinstance(weight, Codes):
            y = multiply(contract, x, weight, dtype)
        else:
            y = contract(x.values, weight)
        return (y if bias is None else y + bias[:, None].astype(jnp.float32)).astype(dtype)

    # A copy of the rows for each expert: for one shared operand, XLA transposes the weights.
    rows = operand_of(x, gate_up_weight)
    spread = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), rows)
    gate_up = product(spread, gate_up_weight, inputs.gate_up_bias)
    inner = gated(gate_up, inputs.gate, alpha=inputs.alpha, limit=inputs.limit)
    out = product(operand_of(inner, down_weight), down_weight, inputs.down_bias)
    # [experts, rows]: 0 for experts that a row did not choose; ids of others match none
    of_expert = jnp.where(ids == jnp.arange(count)[:, None, None], weights, 0.0).sum(-1)
    return jnp.einsum("et,etd->td", of_expert, out.astype(jnp.float32)).astype(x.dtype)


def gated(gate_up: jax.Array, kind: Gate, *, alpha: float, limit: float) -> jax.Array:
    """Return the activation [..., intermediate] of [..., 2 * intermediate], in float32."""
    gate, up = jnp.split(gate_up.astype(jnp.float32), 2, axis=-1)
    return activated(gate, up, kind, alpha=alpha, limit=limit).astype(gate_up.dtype)


def activated(
    gate: jax.Array, up: jax.Array, kind: Gate, *, alpha: float, limit: float
) -> jax.Array:
    """Return the activation of float32 gate and up of one shape."""
    if kind != "silu":
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    if kind == "clamped":
        return (up + 1) * gate * jax.nn.sigmoid(alpha * gate)
    return jax.nn.silu(gate) * up
