"""The pieces that every decoder layer is made of: projection, norm, rotary embedding, MLP."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import REFERENCE_KERNELS, Kernels, RopeConfig
from jaxspec.params import Params, ParamSpec, matrix
from pallas_kernels import matmul as matmul_op
from pallas_kernels.matmul import matmul
from pallas_kernels.rms_norm import rms_norm as rms_norm_op
from pallas_kernels.rope_cache.reference import rotate

logger = logging.getLogger(__name__)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., in] @ weight [in, out] (+ bias [out]), accumulated in float32, in x's dtype."""
    y = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


def product(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    norm: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    swiglu: bool = False,
    transposed: bool = False,
    out_dtype: Any = None,
) -> jax.Array:
    """The matmul op on x [batch, rows, depth], normed first with the gain `norm` if there is one.

    The kernel is made for the few rows of a decode step. More rows, and widths that it does not take, are XLA's: logged once, with why.
    """
    flat = (x if norm is None else rms_norm(x, norm, eps, kernels)).reshape(-1, x.shape[-1])
    rows = flat.shape[0]
    added = None if residual is None else residual.reshape(rows, -1)
    options: dict[str, Any] = {"swiglu": swiglu, "transposed": transposed, "out_dtype": out_dtype or x.dtype}
    implementation = kernels.matmul
    if implementation != "reference":
        padding = -rows % 8 if rows > 8 else 0
        padded = jax.ShapeDtypeStruct((rows + padding, flat.shape[1]), flat.dtype)
        reason = matmul_op.unsupported(padded, weights, residual=added is not None, **options)
        if reason is not None:
            log_once(f"XLA multiplies by {[w.shape for w in weights]}: the kernel {reason}")
            implementation = "reference"
        else:
            pad = lambda a: jnp.pad(a, ((0, padding), (0, 0))) if padding else a  # noqa: E731
            flat, added = pad(flat), None if added is None else pad(added)
    out = matmul(flat, weights, residual=added, **options, implementation=implementation)
    return out[:rows].reshape(*x.shape[:-1], -1)


@cache
def log_once(message: str) -> None:
    """For what is decided anew whenever a program is traced."""
    logger.info("%s", message)


def vocab_logits(hidden: jax.Array, lm_head: jax.Array, kernels: Kernels = REFERENCE_KERNELS, *, tied: bool) -> jax.Array:
    """Float32 logits [..., vocab] of hidden [..., embed]; lm_head is [embed, vocab], or the embedding [vocab, embed] if tied.

    The accumulator is kept: rounding logits to bfloat16 makes ties, and ties make greedy text depend on the path.
    """
    return product(hidden, (lm_head,), kernels, transposed=tied, out_dtype=jnp.float32)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, kernels: Kernels = REFERENCE_KERNELS) -> jax.Array:
    """The rms_norm op over the last axis of x [..., width]."""
    return rms_norm_op(x.reshape(-1, x.shape[-1]), weight, eps=eps, implementation=kernels.rms_norm).reshape(x.shape)


def mlp_block(layer: Params, eps: float, x: jax.Array, kernels: Kernels = REFERENCE_KERNELS) -> jax.Array:
    """x + down(silu(gate(norm(x))) * up(norm(x))), x [batch, rows, D]: the second half of a decoder layer, target's or draft's."""
    gate_up = (layer["gate_proj"], layer["up_proj"])
    inner = product(x, gate_up, kernels, norm=layer["post_attention_layernorm"], eps=eps, swiglu=True)
    return product(inner, (layer["down_proj"],), kernels, residual=x)


def mlp_specs(prefix: str, hidden_size: int, intermediate_size: int) -> dict[str, ParamSpec]:
    """The weights of the MLP under `prefix` ("...mlp")."""
    return {
        "gate_proj": matrix(f"{prefix}.gate_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")),
        "up_proj": matrix(f"{prefix}.up_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")),
        "down_proj": matrix(f"{prefix}.down_proj.weight", intermediate_size, hidden_size, ("mlp", "embed")),
    }


def rope_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Inverse frequencies [head_dim / 2], float32; llama3 scaling as in Llama 3.1's reference code, YaRN as in its paper's section 3.2."""
    inverse = 1.0 / rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.rope_type == "yarn":
        turns = np.array([rope.beta_fast, rope.beta_slow])
        ends = head_dim * np.log(rope.original_max_position_embeddings / (turns * 2 * np.pi)) / (2 * np.log(rope.theta))
        low, high = (np.floor(ends[0]), np.ceil(ends[1])) if rope.truncate else ends
        low, high = max(low, 0.0), min(high, head_dim - 1.0)
        interpolated = np.clip((np.arange(head_dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
        inverse = inverse * (interpolated / rope.factor + (1 - interpolated))
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
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if rope.attention_factor == 1.0 else (cos * rope.attention_factor, sin * rope.attention_factor)


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [batch, rows, heads, head_dim], halves paired (Hugging Face's rotate_half layout), in float32."""
    return rotate(x, *tables)
