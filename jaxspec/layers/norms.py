"""RMS norms."""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxspec.config import Ops
from pallas_kernels import embed_norm as embed_norm_op
from pallas_kernels.rms_norm import rms_norm as rms_norm_op


class Norm(NamedTuple):
    """The RMS norm before a projection: its gain [D], and the epsilon under the root."""

    gain: jax.Array
    eps: float


def rms_norm(x: jax.Array, gain: jax.Array, eps: float, ops: Ops) -> jax.Array:
    """Normalise the last axis of x [..., width] by the rms_norm op."""
    flat = x.reshape(-1, x.shape[-1])
    return rms_norm_op(flat, gain, eps=eps, implementation=ops.rms_norm).reshape(x.shape)


def embed_norm(
    tokens: jax.Array,
    table: jax.Array,
    norm: Norm,
    ops: Ops,
    *,
    hidden: jax.Array | None = None,
    hidden_gain: jax.Array | None = None,
    norm_residual: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Embed tokens [batch, rows] and norm the result by the embed_norm op.

    Returns the residual [batch, rows, D] and the normed embedding [batch, rows, D]. With hidden
    [batch, rows, D], the residual is hidden and its norm stands beside the embedding's,
    [batch, rows, 2D].

    norm_residual: the residual is the normed hidden.

    The op's norm is rms_norm's, with the same limits, so it runs where rms_norm's kernel does.
    """
    inputs = embed_norm_op.Inputs(
        tokens=tokens.reshape(-1),
        table=table,
        weight=norm.gain,
        eps=norm.eps,
        hidden=None if hidden is None else hidden.reshape(-1, hidden.shape[-1]),
        hidden_weight=hidden_gain,
        norm_residual=norm_residual,
    )
    residual, normed = embed_norm_op.embed_norm(inputs, implementation=ops.rms_norm)
    return residual.reshape(*tokens.shape, -1), normed.reshape(*tokens.shape, -1)
