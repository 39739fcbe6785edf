"""The drafts that have layers of their own, by method.

A family is a module with DraftFamily's functions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, cast

from jaxspec.config import ConfigError, DraftConfig, is_one_of
from jaxspec.drafts import (
    dflash,
    draft_model,
    dspark,
    eagle,
    eagle3,
    eagle_llama4,
    mtp,
    mtp_deepseek_v4,
)
from jaxspec.drafts.family import (
    BlockConfig,
    BlockFamily,
    ConfidentFamily,
    DraftFamily,
    HeadFamily,
    LayeredConfig,
    Shapes,
    StepFamily,
)
from jaxspec.drafts.head_layout import head_method
from jaxspec.layers.quantized.files import weight_shapes

STEPS: dict[str, StepFamily] = {
    "eagle": eagle,
    "eagle3": eagle3,
    "eagle_llama4": eagle_llama4,
    "mtp": mtp,
    "mtp_deepseek_v4": mtp_deepseek_v4,
}
CONFIDENT: dict[str, ConfidentFamily] = {"dspark": dspark}
BLOCKS: dict[str, BlockFamily] = {"dflash": dflash, **CONFIDENT}
FAMILIES: dict[str, DraftFamily] = {**STEPS, **BLOCKS, draft_model.METHOD: draft_model}


def family(cfg: LayeredConfig) -> DraftFamily:
    """Return the functions of a config's method."""
    return FAMILIES[cfg.method]


def head_family(cfg: LayeredConfig) -> HeadFamily:
    """Return the functions of a method that reads the target's hidden states."""
    return cast(HeadFamily, FAMILIES[cfg.method])


def step_family(cfg: LayeredConfig) -> StepFamily:
    """Return the functions of a method that drafts a token a pass."""
    return cast(StepFamily, FAMILIES[cfg.method])


def block_family(cfg: BlockConfig) -> BlockFamily:
    """Return the functions of a method that drafts a block a pass."""
    return BLOCKS[cfg.method]


def confident_family(cfg: BlockConfig) -> ConfidentFamily:
    """Return the functions of a method whose drafts may end by a confidence_threshold."""
    return CONFIDENT[cfg.method]


def block(draft: DraftConfig | None) -> BlockConfig:
    """Return a draft that makes blocks with all members of its config, for the type checker."""
    assert draft is not None and draft.method in BLOCKS, draft
    return cast(BlockConfig, draft)


def layered(draft: DraftConfig | None) -> LayeredConfig:
    """Return a draft that has layers with all members of its config, for the type checker."""
    assert draft is not None and draft.method in FAMILIES, draft
    return cast(LayeredConfig, draft)


def family_of_checkpoint(
    method: str | None, config: Mapping[str, Any], names: Collection[str]
) -> DraftFamily:
    """Return the functions for a checkpoint with this config.json and tensors of these names.

    method: None to read it from the checkpoint, a head or a whole model; no names if none are
        known

    Some targets have draft layers of their own kind. ConfigError if the head has another method.
    """
    if method == draft_model.METHOD or (method is None and draft_model.is_model(config, names)):
        return draft_model
    model_type = config.get("model_type")
    if method == "mtp":
        return mtp_deepseek_v4 if model_type == mtp_deepseek_v4.MODEL_TYPE else mtp
    found = head_method(config, names)
    check_named_method(method, found, "this head is by its files")
    if found == "eagle" and is_one_of(model_type, eagle_llama4.MODEL_TYPES):
        return eagle_llama4
    return FAMILIES[found]


def check_named_method(named: str | None, found: str, which: str) -> None:
    """Raise ConfigError if the method that a caller names is not the draft's.

    which: ends the clause, such as 'the given draft is'
    """
    if named not in (None, found):
        raise ConfigError(
            f"method: expected {found!r}, which {which} (or none, to read it from the draft), "
            f"got {named!r}"
        )


def canonical_shapes(family: DraftFamily, shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Return the shapes that config_from_checkpoint takes of a checkpoint's own.

    They have canonical names, with weights in place of 4-bit codes.
    """
    return weight_shapes({family.canonical_name(name): shape for name, shape in shapes.items()})
