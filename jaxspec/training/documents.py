"""Documents that share a row: where each begins, and which rows belong to the same one."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def document_starts(documents: jax.Array) -> jax.Array:
    """Return the row that each row's document begins at, int32 [batch, rows].

    documents: int32 [batch, rows], each document's rows side by side (data.Batch)
    """
    before = jnp.pad(documents[:, :-1], ((0, 0), (1, 0)), constant_values=-2)
    row = jnp.arange(documents.shape[1], dtype=jnp.int32)
    return jax.lax.cummax(jnp.where(documents != before, row, 0), axis=1)


def continues(documents: jax.Array, ahead: int) -> jax.Array:
    """Return whether row p + ahead is of row p's document, bool [batch, rows]."""
    real = documents >= 0
    if ahead == 0:
        return real
    later = jnp.pad(documents[:, ahead:], ((0, 0), (0, ahead)), constant_values=-1)
    return real & (later == documents)
