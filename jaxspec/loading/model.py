"""A checkpoint folder -> a target or a draft: its config and its weights on the device."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxspec import drafts, models
from jaxspec.config import ConfigError, SpeculativeConfig, is_int, shown
from jaxspec.config.quantization import (
    OwnMethod,
    Quantize,
    is_made_plain,
    quantization_of,
    quantized,
)
from jaxspec.config.reading import values_as_sentences
from jaxspec.drafts import draft_model
from jaxspec.layers.mxfp4 import BLOCK
from jaxspec.layers.params import Params, cut, is_spec, vector
from jaxspec.layers.quantized.table import QuantizedSpec
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.fp8 import with_scales
from jaxspec.loading.quantized import stored_tensors, with_stored_scales
from jaxspec.loading.weights import LazyTensor, load_params
from jaxspec.models.decoder import lm_head
from jaxspec.parallel.layout import ONE_PLACE, Layout, Placement

log = logging.getLogger(__name__)
Config = TypeVar("Config")


def load_target(
    folder: Path,
    dtype: Any,
    placement: Placement = ONE_PLACE,
    *,
    mxfp4: str = "auto",
    quantize: Quantize | None = None,
) -> tuple[models.TargetConfig, Params]:
    """Load the target in a Hugging Face folder, with float tensors cast to dtype.

    mxfp4:    see with_expert_storage
    quantize: the form that plain weights get, as form_while_loading returned it
    """
    checkpoint = open_checkpoint(folder)
    check_counts(checkpoint.config, len(checkpoint.tensors), str(folder))
    cfg: Any = with_quantization(models.config_from_hf(checkpoint.config), checkpoint, quantize)
    if mxfp4 != "auto" and getattr(cfg, "mxfp4", None) is None:
        raise ConfigError(
            f"mxfp4 {mxfp4!r}: expected a target with MXFP4 weights, got none in {folder}"
        )
    cfg = with_expert_storage(cfg, mxfp4, placement.target(cfg))
    if mxfp4 == "auto" and getattr(cfg, "mxfp4", None) == "dequantised":
        log.warning(
            "MXFP4 experts are dequantised, in four times the memory, because a device's piece of "
            f"each expert is not a whole number of blocks of {BLOCK}; enable_expert_parallel=True "
            "keeps them packed"
        )
    family = models.family(cfg)
    ignore = lambda name: family.ignored_tensor(cfg, name)  # noqa: E731
    specs = family.param_specs(cfg)
    warn_of_plain_experts("quantize", quantize, specs)
    return cfg, load_params(
        specs,
        table_tensors(checkpoint, cfg, specs),
        dtype,
        placement.target(cfg),
        ignore=ignore,
        source=str(folder),
    )


def with_quantization(
    cfg: Config, checkpoint: Checkpoint, form: Quantize | OwnMethod | None, key: str = "quantize"
) -> Config:
    """Return a model's config with the quantisation of its weights once they are loaded.

    Codes of the checkpoint keep the dtype of their scales, and plain weights get the form.

    form, key: see quantized
    """
    cfg = with_stored_scales(cfg, checkpoint.tensors)
    return quantized(cfg, form, checkpoint.config, key=key)


def table_tensors(checkpoint: Checkpoint, cfg: Any, specs: Params) -> Mapping[str, LazyTensor]:
    """Return the tensors of a checkpoint that the table of cfg names.

    A config that knows no quantisation has matrices in float8 dequantised as they are read. So does
    a checkpoint that says so, whose weights may then be quantised in another form.
    """
    quantization = quantization_of(cfg)
    tensors: Mapping[str, LazyTensor] = checkpoint.tensors
    if quantization is None or is_made_plain(checkpoint.config):
        tensors = with_scales(tensors, checkpoint.config, str(checkpoint.path))
    if quantization is None:
        return tensors
    leaves = jax.tree.leaves(specs, is_leaf=is_spec)
    wanted = {name: shape for spec in leaves for name, shape in spec.tensors.items()}
    return stored_tensors(tensors, quantization, wanted)


def warn_of_plain_experts(key: str, form: str | None, specs: Params) -> None:
    """Log a WARNING if the form that a model's weights get while they load leaves experts plain."""
    if form is not None and has_plain_experts(specs):
        log.warning(f"{key}={form!r} leaves experts plain, whose widths it does not take")


def has_experts(specs: Params) -> bool:
    """Return whether a parameter table has routed experts."""
    return any("experts" in spec.axes for spec in jax.tree.leaves(specs, is_leaf=is_spec))


def has_plain_experts(specs: Params) -> bool:
    """Return whether a parameter table has routed experts that are not stored as codes."""
    return any(
        "experts" in spec.axes and not isinstance(spec, QuantizedSpec)
        for spec in jax.tree.leaves(specs, is_leaf=is_spec)
    )


def with_expert_storage(cfg: Any, mxfp4: str, layout: Layout) -> Any:
    """Return a target's config that says how MXFP4 experts are kept; others stay as they are.

    mxfp4: "packed" keeps them as they are stored, "dequantised" does not. "auto" keeps them unless
        devices share the width of each expert, and a piece is not a whole number of blocks.
    """
    if getattr(cfg, "mxfp4", None) is None:
        return cfg
    if mxfp4 == "auto":
        width = layout.piece_width(cfg.moe.intermediate_size, "expert_mlp")
        mxfp4 = "dequantised" if layout.is_cut("expert_mlp") and width % BLOCK else "packed"
    return replace(cfg, mxfp4=mxfp4)


def check_counts(config: Mapping[str, Any], num_tensors: int, source: str) -> None:
    """Raise ConfigError for more layers or experts than the checkpoint has tensors.

    The table of names is made before it is compared with the checkpoint, and must not be large.
    """
    for key in ("num_hidden_layers", "n_routed_experts", "num_experts"):
        count = config.get(key)
        if count is not None and is_int(count) and count > num_tensors:
            raise ConfigError(
                f"{source}/config.json: expected {key} of at most the checkpoint's {num_tensors} "
                f"tensors, got {shown(count)}"
            )


def load_draft(
    folder: Path,
    target: models.TargetConfig,
    target_params: Params,
    speculative: SpeculativeConfig,
    dtype: Any,
    placement: Placement = ONE_PLACE,
) -> tuple[drafts.LayeredConfig, Params]:
    """Load the draft head or model in a folder, and bind it to a loaded target.

    speculative: its draft_quantize is the form that with_draft_quantize settled

    ConfigError if speculative.method is not the head's; None reads it from the head.
    """
    checkpoint = open_checkpoint(folder)
    try:
        family = drafts.family_of_checkpoint(
            speculative.method, checkpoint.config, checkpoint.tensors
        )
    except ConfigError as e:
        raise ConfigError(f"{folder}: {e}") from e
    if family is draft_model:
        return load_draft_model(checkpoint, target, speculative, dtype, placement)
    cfg, checkpoint = head_config(family, checkpoint, target, speculative)
    if speculative.draft_confidence_threshold is not None and not has_confidence(cfg):
        raise ConfigError(
            "draft_confidence_threshold: expected it only with a draft that has a confidence head, "
            f"got it with the {cfg.method} draft {folder}"
        )
    ignore = lambda name: family.ignored_tensor(cfg, name)  # noqa: E731
    specs = family.param_specs(cfg)
    params = load_params(
        specs,
        table_tensors(checkpoint, cfg, specs),
        dtype,
        placement.draft(cfg),
        ignore=ignore,
        source=f"{cfg.method} draft {folder}",
    )
    draft_to_target = _draft_to_target(cfg, checkpoint.tensors, str(folder))
    return cfg, bind_draft(cfg, params, target_params, draft_to_target, placement)


def head_config(
    family: drafts.DraftFamily,
    checkpoint: Checkpoint,
    target: models.TargetConfig,
    speculative: SpeculativeConfig,
) -> tuple[Any, Checkpoint]:
    """Return a head's config, and its checkpoint with the names of the family's table."""
    folder = checkpoint.path
    tensors: dict[str, LazyTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        canonical = family.canonical_name(name)
        if canonical in tensors:
            raise ConfigError(
                f"{folder}: expected one tensor named {canonical}, got a second one as {name}"
            )
        tensors[canonical] = tensor
    shapes = drafts.canonical_shapes(family, checkpoint.shapes)
    with values_as_sentences():
        try:
            cfg = family.config_from_checkpoint(checkpoint.config, shapes, target, speculative)
        except KeyError as e:
            raise ConfigError(
                f"{folder}/config.json: expected the key {e} of a draft, got none"
            ) from e
    checkpoint = replace(checkpoint, tensors=tensors)
    cfg = with_quantization(cfg, checkpoint, speculative.draft_quantize, "draft_quantize")
    return cfg, checkpoint


def load_draft_model(
    checkpoint: Checkpoint,
    target: models.TargetConfig,
    speculative: SpeculativeConfig,
    dtype: Any,
    placement: Placement = ONE_PLACE,
) -> tuple[drafts.DraftModelConfig, Params]:
    """Load an independent model that drafts for a target, cut to the target's vocabulary."""
    source = f"draft model {checkpoint.path}"
    check_counts(checkpoint.config, len(checkpoint.tensors), str(checkpoint.path))
    whole: Any = draft_model.model_from_checkpoint(
        checkpoint.config, checkpoint.tensors, speculative
    )
    whole = with_quantization(whole, checkpoint, speculative.draft_quantize, "draft_quantize")
    whole = with_expert_storage(whole, "auto", placement.draft(whole))
    cfg = draft_model.drafts_for(whole, target)
    whole_specs = models.family(whole).param_specs(whole)
    # Cut after it is read: codes of 4 bits come with the shape of the whole matrix.
    specs = jax.tree.map(cut, whole_specs, draft_model.param_specs(cfg), is_leaf=is_spec)
    warn_of_plain_experts("draft_quantize", speculative.draft_quantize, specs)
    params = load_params(
        specs,
        table_tensors(checkpoint, whole, whole_specs),
        dtype,
        placement.draft(cfg),
        ignore=lambda name: draft_model.ignored_tensor(cfg, name),
        source=source,
    )
    return cfg, bind_draft_model(cfg, params, placement)


def bind_draft_model(
    cfg: drafts.DraftModelConfig, params: Params, placement: Placement = ONE_PLACE
) -> Params:
    """Return an independent model's weights, with vocabulary maps if the target's is wider."""
    if not cfg.maps_vocabulary:
        return params
    ids = np.arange(cfg.draft_vocab_size)
    return {**params, **vocabulary_maps(cfg, ids, placement.draft(cfg))}


def has_confidence(cfg: drafts.DraftConfig) -> bool:
    """Return whether a draft predicts the acceptance of its tokens."""
    return getattr(cfg, "has_confidence", False)


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


def _draft_to_target(
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
