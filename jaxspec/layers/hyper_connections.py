"""Manifold-constrained hyper-connections (DeepSeek-V4, section 2.2).

The residual has several streams, which are mixed around every block. A block reads a weighted sum
of the streams. Its output is added to each stream with a weight per stream. The streams are mixed
by a matrix whose rows and columns sum to one. One small projection of the streams, in float32,
gives all these weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.layers.params import Params, ParamSpec


@dataclass(frozen=True)
class HyperConnectionConfig:
    """The static part of the connections of one model.

    streams:             number of residual streams
    sinkhorn_iterations: iterations of the normalisation of the mixing matrix
    eps:                 floor of the normalisation
    norm_eps:            epsilon of the norm before the projection
    """

    streams: int
    sinkhorn_iterations: int
    eps: float
    norm_eps: float


def connection_specs(
    prefix: str, cfg: HyperConnectionConfig, hidden_size: int
) -> dict[str, ParamSpec]:
    """Return the weights around one block, `prefix`_{fn,base,scale}."""
    return _specs(prefix, cfg.streams * hidden_size, (2 + cfg.streams) * cfg.streams, 3)


def head_specs(prefix: str, cfg: HyperConnectionConfig, hidden_size: int) -> dict[str, ParamSpec]:
    """Return the weights of `collapse`."""
    return _specs(prefix, cfg.streams * hidden_size, cfg.streams, 1)


def _specs(prefix: str, depth: int, width: int, scales: int) -> dict[str, ParamSpec]:
    return {
        "fn": ParamSpec(
            f"{prefix}_fn", (depth, width), (None, None), transpose=True, dtype="float32"
        ),
        "base": ParamSpec(f"{prefix}_base", (width,), (None,), dtype="float32"),
        "scale": ParamSpec(f"{prefix}_scale", (scales,), (None,), dtype="float32"),
    }


def connect(
    params: Params, cfg: HyperConnectionConfig, x: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return a block's input, from the streams x [batch, rows, streams, D], and `merge`'s weights.

    Returns:
    the input [batch, rows, D]
    post: float32 [batch, rows, streams], the weights of the block's output
    comb: float32 [batch, rows, streams, streams], the mixing matrices
    """
    n = cfg.streams
    pre, post, comb = jnp.split(_mixes(params, cfg, x), [n, 2 * n], axis=-1)
    pre_base, post_base, comb_base = jnp.split(params["base"], [n, 2 * n])
    scale = params["scale"]
    pre = jax.nn.sigmoid(pre * scale[0] + pre_base) + cfg.eps
    post = 2 * jax.nn.sigmoid(post * scale[1] + post_base)
    comb = (comb * scale[2] + comb_base).reshape(*comb.shape[:-1], n, n)
    return _weighted_sum(pre, x), post, _doubly_stochastic(cfg, comb)


def merge(x: jax.Array, output: jax.Array, post: jax.Array, comb: jax.Array) -> jax.Array:
    """Return the streams after a block, [batch, rows, streams, D].

    They are x [batch, rows, streams, D] mixed by comb, plus the block's output [batch, rows, D]
    weighted by post.
    """
    mixed = jnp.einsum("brij,brid->brjd", comb, x.astype(jnp.float32))
    return (mixed + post[..., None] * output[..., None, :].astype(jnp.float32)).astype(x.dtype)


def collapse(params: Params, cfg: HyperConnectionConfig, x: jax.Array) -> jax.Array:
    """Sum the streams x [batch, rows, streams, D] into one for the final norm: [batch, rows, D]."""
    return _weighted_sum(
        jax.nn.sigmoid(_mixes(params, cfg, x) * params["scale"] + params["base"]) + cfg.eps, x
    )


def _mixes(params: Params, cfg: HyperConnectionConfig, x: jax.Array) -> jax.Array:
    """Norm all streams together, without a gain, and project them.

    Returns float32 [batch, rows, width of the weights].
    """
    flat = x.reshape(*x.shape[:2], -1).astype(jnp.float32)
    normed = flat * lax.rsqrt(jnp.mean(jnp.square(flat), axis=-1, keepdims=True) + cfg.norm_eps)
    return jnp.matmul(normed, params["fn"], preferred_element_type=jnp.float32)


def _weighted_sum(weights: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.sum(weights[..., None] * x.astype(jnp.float32), axis=2).astype(x.dtype)


def _doubly_stochastic(cfg: HyperConnectionConfig, logits: jax.Array) -> jax.Array:
    """Normalise by Sinkhorn-Knopp.

    It is a softmax over the rows; then columns and rows are normalised in turn, columns last.
    """

    def divide(matrix: jax.Array, axis: int) -> jax.Array:
        return matrix / (matrix.sum(axis=axis, keepdims=True) + cfg.eps)

    first = divide(jax.nn.softmax(logits, axis=-1) + cfg.eps, -2)
    return lax.fori_loop(
        0, cfg.sinkhorn_iterations - 1, lambda _, matrix: divide(divide(matrix, -1), -2), first
    )
