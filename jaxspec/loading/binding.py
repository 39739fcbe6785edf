"""A draft's weights -> those weights bound to a target, with what the draft takes from it.

A head without an embedding or an output matrix of its own shares the target's. A draft with another
vocabulary gets maps between its token ids and the target's.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import jax
import numpy as np

from jaxspec import drafts
from jaxspec.config import ConfigError
from jaxspec.layers.params import Params, vector
from jaxspec.loading.weights import LazyTensor
from jaxspec.models.decoder import lm_head
from jaxspec.parallel.layout import ONE_PLACE, Layout, Placement


def bind_draft(
    cfg: drafts.LayeredConfig,
    params: Params,
    target_params: Params,
    draft_to_target: np.ndarray | None,
    placement: Placement = ONE_PLACE,
) -> Params:
    """Return a draft's own weights, those that it shares with the target, and vocabulary maps.

    draft_to_target: int [draft_vocab], each draft id's target id (not d2t's offset); None if they
        are the same.

    Shares the target's embed_tokens and lm_head, without copies, unless the draft has its own. With
    a map, adds int32 draft_to_target [draft_vocab] and target_to_draft [vocab], which is -1 where
    a target id has no draft id.
    """
    bound: dict[str, Any] = {**params, **shared_weights(cfg, params, target_params)}
    if cfg.maps_vocabulary:
        assert draft_to_target is not None
        bound |= vocabulary_maps(cfg, draft_to_target, placement.draft(cfg))
    return bound


def bind_draft_model(
    cfg: drafts.DraftModelConfig, params: Params, placement: Placement = ONE_PLACE
) -> Params:
    """Return an independent model's weights, with vocabulary maps if the target's is wider."""
    if not cfg.maps_vocabulary:
        return params
    ids = np.arange(cfg.draft_vocab_size)
    return {**params, **vocabulary_maps(cfg, ids, placement.draft(cfg))}


def vocabulary_maps(
    cfg: drafts.LayeredConfig, draft_to_target: np.ndarray, layout: Layout
) -> dict[str, jax.Array]:
    """Return bind_draft's draft_to_target and target_to_draft."""
    target_to_draft = np.full(cfg.vocab_size, -1, np.int32)
    target_to_draft[draft_to_target] = np.arange(cfg.draft_vocab_size, dtype=np.int32)
    tables = {
        "draft_to_target": draft_to_target.astype(np.int32),
        "target_to_draft": target_to_draft,
    }
    return {name: layout.place(table, vector(name, len(table))) for name, table in tables.items()}


def shared_weights(
    cfg: drafts.LayeredConfig, own: Container[str], target_params: Params
) -> dict[str, Any]:
    """Return the target's embedding and head, each unless it is among the draft's own weights."""
    shared: dict[str, Any] = {}
    if "embed_tokens" not in own:
        shared["embed_tokens"] = target_params["embed_tokens"]
    if "lm_head" not in own:
        shared["lm_head"] = lm_head(target_params, tied=cfg.tied_lm_head)
    return shared


def read_draft_to_target(
    cfg: drafts.LayeredConfig, tensors: Mapping[str, LazyTensor], source: str
) -> np.ndarray | None:
    """Return target ids from d2t, checked against t2d's mask.

    d2t holds offsets: target id = draft id + d2t[draft id].
    """
    if "d2t" not in tensors:
        return None
    size, vocab = cfg.draft_vocab_size, cfg.vocab_size
    d2t = np.asarray(tensors["d2t"].read())
    if d2t.shape != (size,) or not np.issubdtype(d2t.dtype, np.integer):
        raise ConfigError(
            f"{source}: d2t: expected {size} integers (draft_vocab_size), "
            f"got {d2t.dtype} {list(d2t.shape)}"
        )
    ids = d2t.astype(np.int64) + np.arange(size)
    if ids.min() < 0 or ids.max() >= vocab or len(np.unique(ids)) != size:
        raise ConfigError(
            f"{source}: d2t: expected offsets to {size} different ids below {vocab}, "
            f"got ids {ids.min()}..{ids.max()}"
        )
    if "t2d" in tensors:
        t2d = np.asarray(tensors["t2d"].read())
        if t2d.shape != (vocab,) or t2d.dtype != bool or t2d.sum() != size or not t2d[ids].all():
            raise ConfigError(
                f"{source}: t2d: expected a bool mask of {vocab} that holds just d2t's {size} ids, "
                "got one that does not"
            )
    if not cfg.maps_vocabulary:
        if not np.array_equal(ids, np.arange(vocab)):
            raise ConfigError(
                f"{source}: d2t: expected the identity in a draft with the target's whole "
                "vocabulary, got a permutation"
            )
        return None
    return ids
