"""The pieces that every decoder layer is made of: projection, norm, rotary embedding, MLP."""

from __future__ import annotations

import logging
import math
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.config import REFERENCE_KERNELS, Kernels, RopeConfig, rope_frequencies
from jaxspec.layers.params import Params, ParamSpec, matrix
from pallas_kernels import embed_norm as embed_norm_op
from pallas_kernels import matmul as matmul_op
from pallas_kernels.rms_norm import rms_norm as rms_norm_op
from pallas_kernels.rope_cache.reference import rotate
from pallas_kernels.step_metadata.reference import rotation

logger = logging.getLogger(__name__)


def pick_row(x: jax.Array, row: jax.Array | None) -> jax.Array:
    """x [batch, rows, ...] at row int32 [batch]: [batch, 1, ...]; x itself where it has one row, or row is None."""
    if row is None or x.shape[1] == 1:
        return x
    return jnp.take_along_axis(x, row.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x [..., in] @ weight [in, out] (+ bias [out]), accumulated in float32, in x's dtype."""
    y = jnp.matmul(x, weight, preferred_element_type=jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)


@struct.dataclass
class ResidualStream:
    """x [batch, rows, D] and, where the product that made it has prepared the norm before the next one, what that norm's product takes:
    scaled [batch * rows, D], x times the norm's gain, and squares, partial sums of x's squares (the matmul op's). normed: x under that norm
    [batch, rows, D], where the embedding came with it."""

    x: jax.Array
    scaled: jax.Array | None = None
    squares: jax.Array | None = None
    normed: jax.Array | None = None


def values_of(x: jax.Array | ResidualStream) -> jax.Array:
    """[batch, rows, D]"""
    return x.x if isinstance(x, ResidualStream) else x


def product(
    x: jax.Array | ResidualStream,
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
    """The matmul op on x [batch, rows, depth], normed first with the gain `norm` if there is one: where x comes prepared for it, by the op.

    The kernels are made for the few rows of a decode step, and for gate and up of 128 or 256 rows. More rows, and widths that they do not
    take, are XLA's: logged once, with why.
    """
    options = {
        "swiglu": swiglu,
        "transposed": transposed,
        "out_dtype": out_dtype or values_of(x).dtype,
    }
    return _product(x, weights, kernels, norm, eps, residual, None, options).x


def add_product(
    stream: jax.Array | ResidualStream,
    x: jax.Array,
    weight: jax.Array,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    next_norm: jax.Array | None,
) -> ResidualStream:
    """stream + x @ weight, prepared for the norm of gain next_norm if that is given and the kernels of product and norm are chosen."""
    shared = "reference" not in (kernels.matmul, kernels.rms_norm) and matmul_op.shares_norm(
        math.prod(x.shape[:-1])
    )
    prepared = next_norm if shared else None
    options = {"swiglu": False, "transposed": False, "out_dtype": x.dtype}
    return _product(x, (weight,), kernels, None, 0.0, values_of(stream), prepared, options)


def _product(
    x: jax.Array | ResidualStream,
    weights: tuple[jax.Array, ...],
    kernels: Kernels,
    norm: jax.Array | None,
    eps: float,
    residual: jax.Array | None,
    gain: jax.Array | None,
    options: dict[str, Any],
) -> ResidualStream:
    stream = x if isinstance(x, ResidualStream) else ResidualStream(x)
    *shape, depth = stream.x.shape
    rows = math.prod(shape)
    padding = -rows % 8 if rows > 8 else 0
    squares, implementation = stream.squares if norm is not None else None, kernels.matmul
    if implementation != "reference":
        operand = jax.ShapeDtypeStruct((rows + padding, depth), stream.x.dtype)
        beside = {
            "residual": residual is not None,
            "normed": squares is not None,
            "norms": gain is not None,
        }
        reason = matmul_op.unsupported(matmul_op.Product(operand, weights, **beside, **options))
        if reason is not None:
            log_once(f"XLA multiplies by {[w.shape for w in weights]}: the kernel {reason}")
            implementation = "reference"
    if implementation == "reference":
        padding, squares, gain = 0, None, None
    flat = stream.x
    if norm is not None:
        flat = stream.scaled if squares is not None else stream.normed
        flat = rms_norm(stream.x, norm, eps, kernels) if flat is None else flat
    pad = lambda a: jnp.pad(a, ((0, padding), (0, 0))) if padding else a  # noqa: E731
    added = None if residual is None else pad(residual.reshape(rows, -1))
    inputs = matmul_op.Inputs(
        x=pad(flat.reshape(rows, depth)),
        weights=weights,
        squares=squares,
        residual=added,
        gain=gain,
        eps=eps,
        **options,
    )
    made = matmul_op.matmul(inputs, implementation=implementation)
    out, scaled, squares = made if isinstance(made, tuple) else (made, None, None)
    return ResidualStream(
        out[:rows].reshape(*shape, -1), None if scaled is None else scaled[:rows], squares
    )


@cache
def log_once(message: str) -> None:
    """For what is decided anew whenever a program is traced."""
    logger.info("%s", message)


def vocab_logits(
    hidden: jax.Array, lm_head: jax.Array, kernels: Kernels = REFERENCE_KERNELS, *, tied: bool
) -> jax.Array:
    """Float32 logits [..., vocab] of hidden [..., embed]; lm_head is [embed, vocab], or the embedding [vocab, embed] if tied.

    The accumulator is kept: rounding logits to bfloat16 makes ties, and ties make greedy text depend on the path.
    """
    return product(hidden, (lm_head,), kernels, transposed=tied, out_dtype=jnp.float32)


def rms_norm(
    x: jax.Array, weight: jax.Array, eps: float, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """The rms_norm op over the last axis of x [..., width]."""
    return rms_norm_op(
        x.reshape(-1, x.shape[-1]), weight, eps=eps, implementation=kernels.rms_norm
    ).reshape(x.shape)


def embed_norm(
    tokens: jax.Array,
    table: jax.Array,
    weight: jax.Array,
    eps: float,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    hidden: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array]:
    """The embed_norm op over tokens [batch, rows] and hidden [batch, rows, D]: (residual [batch, rows, D], normed [batch, rows, D or 2D]).

    It runs where rms_norm does: its norm is that one, with the same limits.
    """
    flat = None if hidden is None else hidden.reshape(-1, hidden.shape[-1])
    inputs = embed_norm_op.Inputs(
        tokens=tokens.reshape(-1), table=table, weight=weight, eps=eps, hidden=flat, **options
    )
    residual, normed = embed_norm_op.embed_norm(inputs, implementation=kernels.rms_norm)
    return residual.reshape(*tokens.shape, -1), normed.reshape(*tokens.shape, -1)


def mlp_block(
    layer: Params, eps: float, x: jax.Array | ResidualStream, kernels: Kernels = REFERENCE_KERNELS
) -> jax.Array:
    """x + down(silu(gate(norm(x))) * up(norm(x))), x [batch, rows, D]: the second half of a decoder layer, target's or draft's."""
    return add_mlp(layer, eps, x, kernels, next_norm=None).x


def add_mlp(
    layer: Params,
    eps: float,
    x: jax.Array | ResidualStream,
    kernels: Kernels = REFERENCE_KERNELS,
    *,
    next_norm: jax.Array | None,
) -> ResidualStream:
    """mlp_block's sum, prepared for the norm of gain next_norm (see add_product)."""
    gate_up = (layer["gate_proj"], layer["up_proj"])
    inner = product(
        x, gate_up, kernels, norm=layer["post_attention_layernorm"], eps=eps, swiglu=True
    )
    return add_product(x, inner, layer["down_proj"], kernels, next_norm=next_norm)


def mlp_specs(prefix: str, hidden_size: int, intermediate_size: int) -> dict[str, ParamSpec]:
    """The weights of the MLP under `prefix` ("...mlp")."""
    return {
        "gate_proj": matrix(
            f"{prefix}.gate_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")
        ),
        "up_proj": matrix(
            f"{prefix}.up_proj.weight", hidden_size, intermediate_size, ("embed", "mlp")
        ),
        "down_proj": matrix(
            f"{prefix}.down_proj.weight", intermediate_size, hidden_size, ("mlp", "embed")
        ),
    }


def rope_tables(
    rope: RopeConfig, head_dim: int, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """cos and sin, float32 [batch, rows, 1, head_dim / 2], for positions [batch, rows]; shared by a pass's layers."""
    cos, sin = rotation(positions, rope_frequencies(rope, head_dim), rope.attention_factor)
    return cos[..., None, :], sin[..., None, :]


def apply_rope(x: jax.Array, tables: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate x [batch, rows, heads, head_dim], halves paired (Hugging Face's rotate_half layout), in float32."""
    return rotate(x, *tables)
