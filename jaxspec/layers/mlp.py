"""The gated MLP (SwiGLU) of a dense decoder layer."""

from __future__ import annotations

from jaxspec.config import Ops
from jaxspec.layers.norms import Norm
from jaxspec.layers.params import Params, Weight, projection
from jaxspec.layers.products import (
    ResidualStream,
    Stream,
    add_projection,
    project_swiglu_for,
)


def mlp_specs(prefix: str, hidden_size: int, intermediate_size: int) -> dict[str, Weight]:
    """Return the weights of the MLP under `prefix` ("...mlp")."""
    return {
        "gate_proj": projection(
            f"{prefix}.gate_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")
        ),
        "up_proj": projection(
            f"{prefix}.up_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")
        ),
        "down_proj": projection(
            f"{prefix}.down_proj.weight", intermediate_size, hidden_size, ("mlp", "embed")
        ),
    }


def mlp_norm(layer: Params, eps: float) -> Norm:
    """Return the norm before the MLP of a layer."""
    weights = layer["gate_proj"], layer["up_proj"]
    return Norm(layer["post_attention_layernorm"], eps, weights)


def add_mlp(
    layer: Params, eps: float, x: Stream, ops: Ops, *, next_norm: Norm | None = None
) -> ResidualStream:
    """Add down(silu(gate(norm(x))) * up(norm(x))) to the stream x [batch, rows, D].

    eps:       epsilon of the MLP's norm, whose gain the layer holds
    next_norm: see add_projection
    """
    norm = mlp_norm(layer, eps)
    down = layer["down_proj"]
    inner = project_swiglu_for(down, x, layer["gate_proj"], layer["up_proj"], ops, norm=norm)
    return add_projection(x, inner, down, ops, next_norm=next_norm)
