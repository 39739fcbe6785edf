"""Draft methods, one file each.

drafter          Drafter: how a method drafts, and the state that it keeps
autoregressive   the drafter of methods that draft a token a pass: a loop that runs a step K times
independent      the drafter of a model that reads tokens alone: the same loop
block            the drafter of methods that draft a block a pass, and draw its tokens in turn
columns          how all three draw a draft token and write it into the proposal
families         the methods with layers, by name
family           DraftFamily: the functions of such a method; parts that families share
head_layout      the method, the target and the layer that a published head's files name
eagle            EAGLE-1
eagle3           EAGLE-3
eagle_llama4     EAGLE for Llama 4
dflash           DFlash: a block of tokens in one pass
dspark           DSpark: DFlash, with heads that draft from left to right
mtp              multi-token prediction layers of a checkpoint
mtp_deepseek_v4  the MTP layer of DeepSeek-V4
draft_model      an independent model of any target family
ngram            prompt lookup: drafts from the request's own text, without a model
suffix           suffix matching: drafts voted by all places where that text went on from its end
"""

from __future__ import annotations

from jaxspec.config import ConfigError, DraftConfig
from jaxspec.config.draft_methods import OPTIONS
from jaxspec.drafts import draft_model, families, ngram, suffix
from jaxspec.drafts.autoregressive import Autoregressive
from jaxspec.drafts.block import BlockDrafter
from jaxspec.drafts.dflash import DFlashConfig
from jaxspec.drafts.draft_model import DraftModelConfig
from jaxspec.drafts.drafter import Drafter, ModelFreeDrafter
from jaxspec.drafts.dspark import DSparkConfig
from jaxspec.drafts.eagle import EagleConfig
from jaxspec.drafts.eagle3 import Eagle3Config
from jaxspec.drafts.families import (
    BLOCKS,
    FAMILIES,
    STEPS,
    canonical_shapes,
    check_named_method,
    family,
    family_of_checkpoint,
    head_family,
)
from jaxspec.drafts.family import DraftFamily, DraftOutput, LayeredConfig, hidden_width
from jaxspec.drafts.independent import Independent
from jaxspec.drafts.mtp import MtpConfig

# Methods that need no checkpoint, by name. A method with layers is registered in families.py.
MODEL_FREE: dict[str, ModelFreeDrafter] = {
    "ngram": ngram.NgramDrafter(),
    "suffix": suffix.SuffixDrafter(),
}
METHODS = tuple(OPTIONS)  # as SpeculativeConfig.method names them
AUTOREGRESSIVE, BLOCK, INDEPENDENT = Autoregressive(), BlockDrafter(), Independent()

__all__ = [
    "BLOCKS",
    "FAMILIES",
    "METHODS",
    "MODEL_FREE",
    "STEPS",
    "DFlashConfig",
    "DSparkConfig",
    "DraftConfig",
    "DraftFamily",
    "DraftModelConfig",
    "DraftOutput",
    "Drafter",
    "Eagle3Config",
    "EagleConfig",
    "LayeredConfig",
    "MtpConfig",
    "block_capacity",
    "canonical_shapes",
    "check_method",
    "check_named_method",
    "draft_model",
    "drafter",
    "family",
    "family_of_checkpoint",
    "head_family",
    "hidden_width",
    "layered_drafter",
    "method_name",
    "needs_model",
]


def check_method(method: str | None) -> None:
    """Raise ConfigError unless this is a method that SpeculativeConfig may name, or None."""
    if method is not None and method not in METHODS:
        raise ConfigError(f"method: expected one of {', '.join(METHODS)}, got {method!r}")


def method_name(cfg: DraftConfig) -> str:
    """Return the method of a draft as SpeculativeConfig names it, its own where none does."""
    names = sorted(METHODS, key=len, reverse=True)
    return next((name for name in names if cfg.method.startswith(name)), cfg.method)


def block_capacity(cfg: DraftConfig) -> int | None:
    """Return the drafts that a block holds; None for a draft that makes any number."""
    return families.block(cfg).block_capacity if cfg.method in BLOCKS else None


def needs_model(method: str | None) -> bool:
    """Return whether a method drafts with a checkpoint of its own, SpeculativeConfig.model.

    A method of None is read from that checkpoint.
    """
    return method not in ("mtp", *MODEL_FREE)  # an MTP module is in the target's checkpoint


def drafter(cfg: DraftConfig) -> Drafter:
    """Return the drafter of a config's method."""
    return MODEL_FREE.get(cfg.method) or layered_drafter(cfg)


def layered_drafter(cfg: DraftConfig) -> Autoregressive | BlockDrafter | Independent:
    """Return the drafter of a method with layers, which takes buffers for its proposal."""
    if isinstance(cfg, DraftModelConfig):
        return INDEPENDENT
    return BLOCK if cfg.method in BLOCKS else AUTOREGRESSIVE
