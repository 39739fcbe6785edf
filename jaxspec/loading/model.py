"""A checkpoint folder -> a target or a draft: its config and its weights on the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from jaxspec import drafts, models
from jaxspec.config import ConfigError, SpeculativeConfig, is_int, shown
from jaxspec.config.draft_methods import readers_of
from jaxspec.config.quantization import (
    OwnMethod,
    Quantize,
    is_made_plain,
    quantization_of,
    with_form,
)
from jaxspec.config.reading import values_as_sentences
from jaxspec.drafts import draft_model
from jaxspec.layers.mxfp4 import BLOCK
from jaxspec.layers.params import Params, cut, is_spec
from jaxspec.layers.quantized.table import QuantizedSpec
from jaxspec.loading.binding import bind_draft, bind_draft_model, read_draft_to_target
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.fp8 import with_scales
from jaxspec.loading.quantized_tensors import (
    stored_tensors,
    with_stored_names,
    with_stored_scales,
)
from jaxspec.loading.weights import LazyTensor, load_params
from jaxspec.parallel.layout import ONE_PLACE, Layout, Placement

log = logging.getLogger(__name__)
Config = TypeVar("Config")


def load_target(
    folder: Path,
    dtype: Any,
    placement: Placement = ONE_PLACE,
    *,
    mxfp4: str = "auto",
    quantize: Quantize | OwnMethod | None = None,
) -> tuple[models.TargetConfig, Params]:
    """Load the target in a Hugging Face folder, with float tensors cast to dtype.

    mxfp4:    see with_expert_storage
    quantize: the form that plain weights get; see form_while_loading
    """
    checkpoint = open_checkpoint(folder)
    check_counts(checkpoint.config, len(checkpoint.tensors), str(folder))
    cfg: Any = with_quantization(models.config_from_hf(checkpoint.config), checkpoint, quantize)
    if mxfp4 != "auto" and expert_storage(cfg) is None:
        raise ConfigError(
            f"mxfp4 {mxfp4!r}: expected a target with MXFP4 weights, got none in {folder}"
        )
    cfg = with_expert_storage(cfg, mxfp4, placement.target(cfg))
    if mxfp4 == "auto" and expert_storage(cfg) == "dequantised":
        log.warning(
            "MXFP4 experts are dequantised, in four times the memory, because a device's piece of "
            f"each expert is not a whole number of blocks of {BLOCK}; enable_expert_parallel=True "
            "keeps them packed"
        )
    family = models.family(cfg)
    ignore = lambda name: family.ignored_tensor(cfg, name)  # noqa: E731
    specs = family.param_specs(cfg)
    warn_of_plain_experts("quantize", cfg, specs)
    return cfg, load_params(
        specs,
        table_tensors(checkpoint, cfg, specs),
        dtype,
        placement.target(cfg),
        ignore=ignore,
        source=str(folder),
    )


def with_quantization(
    cfg: Config,
    checkpoint: Checkpoint,
    quantize: Quantize | OwnMethod | None,
    key: str = "quantize",
) -> Config:
    """Return a model's config with the quantisation of its weights once they are loaded.

    Codes of the checkpoint keep the dtype of their scales, and plain weights get the form.

    quantize, key: see form_while_loading
    """
    cfg = with_stored_scales(cfg, checkpoint.tensors)
    return with_form(cfg, quantize, checkpoint.config, key=key)


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


def warn_of_plain_experts(key: str, cfg: Any, specs: Params) -> None:
    """Log a WARNING if the form that a model's weights get while they load leaves experts plain."""
    quantization = quantization_of(cfg)
    form = quantization and quantization.made_form
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


def expert_storage(cfg: Any) -> str | None:
    """Return how a target keeps MXFP4 experts; None if its checkpoint has none."""
    return getattr(cfg, "mxfp4", None)


def with_expert_storage(cfg: Any, mxfp4: str, layout: Layout) -> Any:
    """Return a target's config that says how MXFP4 experts are kept; others stay as they are.

    mxfp4: "packed" keeps them as they are stored, "dequantised" does not. "auto" keeps them unless
        devices share the width of each expert, and a piece is not a whole number of blocks.
    """
    if expert_storage(cfg) is None:
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
        key = "draft_confidence_threshold"
        raise ConfigError(
            f"{key}: expected it only with {readers_of(key)}, "
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
    draft_to_target = read_draft_to_target(cfg, checkpoint.tensors, str(folder))
    return cfg, bind_draft(cfg, params, target_params, draft_to_target, placement)


def head_config(
    family: drafts.DraftFamily,
    checkpoint: Checkpoint,
    target: models.TargetConfig,
    speculative: SpeculativeConfig,
) -> tuple[Any, Checkpoint]:
    """Return a head's config, and its checkpoint with the names of the family's table."""
    folder = checkpoint.path
    names = {name: family.canonical_name(name) for name in checkpoint.tensors}
    tensors: dict[str, LazyTensor] = {}
    for name, canonical in names.items():
        if canonical in tensors:
            raise ConfigError(
                f"{folder}: expected one tensor named {canonical}, got a second one as {name}"
            )
        tensors[canonical] = checkpoint.tensors[name]
    shapes = drafts.canonical_shapes(family, checkpoint.shapes)
    with values_as_sentences():
        try:
            cfg = family.config_from_checkpoint(checkpoint.config, shapes, target, speculative)
        except KeyError as e:
            raise ConfigError(
                f"{folder}/config.json: expected the key {e} of a draft, got none"
            ) from e
    cfg = with_stored_names(cfg, names)
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
    warn_of_plain_experts("draft_quantize", whole, specs)
    params = load_params(
        specs,
        table_tensors(checkpoint, whole, whole_specs),
        dtype,
        placement.draft(cfg),
        ignore=lambda name: draft_model.ignored_tensor(cfg, name),
        source=source,
    )
    return cfg, bind_draft_model(cfg, params, placement)


def has_confidence(cfg: drafts.DraftConfig) -> bool:
    """Return whether a draft predicts the acceptance of its tokens."""
    return getattr(cfg, "has_confidence", False)
