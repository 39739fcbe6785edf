"""The target's hidden states of whole sequences, recomputed for every batch instead of stored."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxspec import models
from jaxspec.cache.arrays import init_cache
from jaxspec.cache.metadata import PREFILL_METADATA_OPS, build_metadata
from jaxspec.config import REFERENCE_OPS, ConfigError, Ops
from jaxspec.layers.context import Pass
from jaxspec.layers.params import Params, Weight

Reduced = TypeVar("Reduced", jax.Array, tuple[jax.Array, jax.Array])


def target_states(
    params: Params,
    cfg: models.TargetConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    aux_layers: tuple[int, ...],
    starts: jax.Array | None = None,
    ops: Ops = REFERENCE_OPS,
) -> tuple[jax.Array, jax.Array | None]:
    """Return the target's hidden states [batch, rows, D] after the final norm, and aux.

    tokens: int32 [batch, rows], of which lengths [batch] are real. This is the target's own paged
    forward, which decoding runs too, over a fresh cache of one block a sequence.

    starts: int32 [batch, rows], the row that each row's document begins at; None if a row of the
    batch is one document. Attention stops there. Positions count on through the row, which a
    rotation cannot tell from a restart: scores depend on distances.

    ops: of the layers, such as op_choice.for_whole_sequences
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
        ops=PREFILL_METADATA_OPS,
    )
    if starts is not None:
        metadata = tuple(
            dataclasses.replace(group, window_start=jnp.maximum(group.window_start, starts))
            for group in metadata
        )
    caches = init_cache(cfg.attention, (batch,) * cfg.num_layers, rows, params["norm"].dtype)
    pass_ = Pass(metadata, ops)
    out = models.family(cfg).forward(params, cfg, tokens, pass_, caches, aux_layers=aux_layers)
    return out.hidden, out.aux


def require_packable(cfg: models.TargetConfig) -> None:
    """Raise ConfigError for a target whose attention depends on more than distances.

    A chunk begins at a multiple of its size, wherever a document of a packed row begins.
    """
    for group in cfg.cache_groups(1, 1):
        if group.chunk is not None:
            raise ConfigError(
                "pack: expected a target whose attention depends on distances alone, "
                f"got one with chunks of {group.chunk} positions"
            )


def require_plain_head(params: Params) -> None:
    """Raise ConfigError for a target whose lm_head is quantised: training reads its columns."""
    head = params.get("lm_head")
    if head is not None and not isinstance(head, Weight):
        raise ConfigError(
            "target: expected an lm_head that is not quantised to train a head on, "
            f"got {type(head).__name__}"
        )


def head_columns(params: Params, cfg: models.TargetConfig, token_ids: jax.Array) -> jax.Array:
    """Return the columns of the target's lm_head for some tokens: [D, len(token_ids)]."""
    if cfg.tie_word_embeddings:
        return params["embed_tokens"][token_ids].T
    return params["lm_head"].values[:, token_ids]


def greedy_tokens(
    params: Params, cfg: models.TargetConfig, hidden: jax.Array, chunk: int = 4096
) -> jax.Array:
    """Return the argmax over the whole vocabulary, int32 [...], of hidden [..., D].

    Never more than `chunk` rows of logits are in memory.
    """
    return _by_chunks(params, cfg, hidden, chunk, _greedy)


def greedy_and_total(
    params: Params, cfg: models.TargetConfig, hidden: jax.Array, chunk: int = 4096
) -> tuple[jax.Array, jax.Array]:
    """Return greedy_tokens and the logits' logsumexp, float32 [...], of hidden [..., D]."""
    return _by_chunks(params, cfg, hidden, chunk, choice_and_total)


def choice_and_total(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return argmax int32 [...] and logsumexp float32 [...] of logits float32 [..., V].

    The largest logit is looked up at the argmax, which saves a pass over the logits.
    """
    choice = _greedy(logits)
    top = jnp.take_along_axis(logits, choice[..., None], axis=-1)
    return choice, top[..., 0] + jnp.log(jnp.sum(jnp.exp(logits - top), axis=-1))


def _greedy(logits: jax.Array) -> jax.Array:
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def _by_chunks(
    params: Params,
    cfg: models.TargetConfig,
    hidden: jax.Array,
    chunk: int,
    reduce: Callable[[jax.Array], Reduced],
) -> Reduced:
    """Apply reduce to the logits float32 [rows, vocab] of `chunk` rows of hidden at a time."""
    rows = hidden.reshape(-1, hidden.shape[-1])
    count = rows.shape[0]
    chunk = min(chunk, count)
    padded = jnp.pad(rows, ((0, -count % chunk), (0, 0))).reshape(-1, chunk, rows.shape[1])
    family = models.family(cfg)
    found = jax.lax.map(lambda x: reduce(family.logits(params, cfg, x, REFERENCE_OPS)), padded)
    return jax.tree.map(lambda x: x.reshape(-1)[:count].reshape(hidden.shape[:-1]), found)
