"""Token embeddings, whole or cut by vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec.config import Ops
from jaxspec.layers.norms import Norm
from jaxspec.layers.sums import sum_of_devices
from pallas_kernels import embed_norm as embed_norm_op
from pallas_kernels.vocab_shards import VocabShards


def embed(tokens: jax.Array, table: jax.Array, ops: Ops) -> jax.Array:
    """Return the rows of table [vocab, D] of tokens int32 [batch, rows]: [batch, rows, D].

    With a vocabulary cut over devices, a device has the rows of its own tokens. The others hold
    zeros, so the sum over the devices is exact.
    """
    group = ops.vocabulary
    if group.size == 1:
        return table[tokens]
    size = table.shape[0]
    index = VocabShards(group.axis, group.size).place(tokens, size)
    rows = table[jnp.minimum(index, size - 1)]
    return sum_of_devices(jnp.where((index < size)[..., None], rows, 0), group, ops)


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

    The op's norm is rms_norm's, with the same limits, so it runs where rms_norm's kernel does. With
    a vocabulary that is cut over devices, it reads the rows that these have summed.
    """
    ids = tokens.reshape(-1)
    if ops.vocabulary.size > 1:
        table = embed(tokens, table, ops).reshape(ids.shape[0], -1)
        ids = jnp.arange(ids.shape[0], dtype=ids.dtype)
    inputs = embed_norm_op.Inputs(
        tokens=ids,
        table=table,
        weight=norm.gain,
        eps=norm.eps,
        hidden=None if hidden is None else hidden.reshape(-1, hidden.shape[-1]),
        hidden_weight=hidden_gain,
        norm_residual=norm_residual,
    )
    residual, normed = embed_norm_op.embed_norm(inputs, implementation=ops.rms_norm)
    return residual.reshape(*tokens.shape, -1), normed.reshape(*tokens.shape, -1)
