"""The pieces that every decoder layer is made of: projection, norm, rotary embedding, MLP."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import RopeConfig
from jaxspec.params import Params, ParamSpec, matrix


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., in] @ weight [in, out] (+ bias [out]), accumulated in float32, in x's dtype."""
    y = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def vocab_logits(hidden: jax.Array, lm_head: jax.Array, *, tied: bool) -> jax.Array:
    """Float32 logits [..., vocab] of hidden [..., embed]; lm_head is [embed, vocab], or the embedding [vocab, embed] if tied.

    The accumulator is kept: rounding logits to bfloat16 makes ties, and ties make greedy text depend on the path.
    """
    subscripts = "...d,vd->...v" if tied else "...d,dv->...v"
    return jnp.einsum(subscripts, hidden, lm_head, preferred_element_type=jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMS norm in float32, cast to x's dtype, then scaled: the order of casts that Hugging Face's Llama uses."""
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + eps)).astype(x.dtype) * weight.astype(x.dtype)


def swiglu(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x)) with gate, up [embed, mlp] and down [mlp, embed]."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def mlp_block(layer: Params, eps: float, x: jax.Array) -> jax.Array:
    """x + mlp(norm(x)), x [batch, rows, D]: the second half of a decoder layer, target's or draft's."""
    normed = rms_norm(x, layer["post_attention_layernorm"], eps)
    return x + swiglu(normed, layer["gate_proj"], layer["up_proj"], layer["down_proj"])


def mlp_specs(prefix: str, hidden_size: int, intermediate_size: int) -> dict[str, ParamSpec]:
    """The weights of `swiglu` under `prefix` ("...mlp")."""
    return {
        "gate_proj": matrix(f"{prefix}.gate_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")),
        "up_proj": matrix(f"{prefix}.up_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")),
        "down_proj": matrix(f"{prefix}.down_proj.weight", intermediate_size, hidden_size, ("mlp", "embed")),
    }


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies [head_dim / 2], float32; llama3 scaling as in Llama 3.1's reference code."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "llama3":
        wavelength = 2 * np.pi / inverse
        original = rope.original_max_position_embeddings
        smooth = (original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(smooth, 0.0, 1.0)
        inverse = blend * inverse + (1 - blend) * inverse / rope.factor
    return inverse.astype(np.float32)


def rope_tables(rope: RopeConfig, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [batch, rows, 1, head_dim / 2], for positions [batch, rows]; shared by a pass's layers."""
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(rope_frequencies(rope, head_dim))
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [batch, rows, heads, head_dim], halves paired (Hugging Face's rotate_half layout), in float32."""
    cos, sin = tables
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
