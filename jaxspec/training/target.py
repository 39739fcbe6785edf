"""The target's hidden states of whole sequences, recomputed for every batch instead of stored."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxspec import models
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import build_metadata
from jaxspec.config import REFERENCE_OPS
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params


def target_states(
    params: Params,
    cfg: models.TargetConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    aux_layers: tuple[int, ...],
) -> tuple[jax.Array, jax.Array | None]:
    """Return the target's hidden states [batch, rows, D] after the final norm, and aux.

    tokens: int32 [batch, rows], of which lengths [batch] are real. This is the target's own paged
    forward, which decoding runs too, over a fresh cache of one block a sequence.
    """
    batch, rows = tokens.shape
    groups = cfg.cache_groups(rows, rows)
    block_table = jnp.arange(batch, dtype=jnp.int32)[:, None]
    metadata = build_metadata(
        groups,
        (block_table,) * len(groups),
        jnp.zeros(batch, jnp.int32),
        lengths,
        rows,
        attention=cfg.attention,
        ops=REFERENCE_OPS,
    )
    caches = init_cache(cfg.attention, (batch,) * cfg.num_layers, rows, params["norm"].dtype)
    pass_ = Pass(metadata, REFERENCE_OPS)
    out = models.family(cfg).forward(params, cfg, tokens, pass_, caches, aux_layers=aux_layers)
    return out.hidden, out.aux


def head_columns(params: Params, cfg: models.TargetConfig, token_ids: jax.Array) -> jax.Array:
    """Return the columns of the target's lm_head for some tokens: [D, len(token_ids)]."""
    if cfg.tie_word_embeddings:
        return params["embed_tokens"][token_ids].T
    return params["lm_head"].values[:, token_ids]


def greedy_tokens(
    params: Params, cfg: models.TargetConfig, hidden: jax.Array, chunk: int = 4096
) -> jax.Array:
    """Return the argmax over the whole vocabulary, int32 [batch, rows], of hidden [batch, rows, D].

    Never more than `chunk` rows of logits are in memory.
    """
    rows = hidden.reshape(-1, hidden.shape[-1])
    count = rows.shape[0]
    chunk = min(chunk, count)
    padded = jnp.pad(rows, ((0, -count % chunk), (0, 0))).reshape(-1, chunk, rows.shape[1])
    best = jax.lax.map(
        lambda x: jnp.argmax(
            models.family(cfg).logits(params, cfg, x, REFERENCE_OPS), axis=-1
        ).astype(jnp.int32),
        padded,
    )
    return best.reshape(-1)[:count].reshape(hidden.shape[:-1])
