"""The method, the target and the layer of a published head, by its config.json and tensor names.

SafeAI, SpecForge and NVIDIA write a flat config, the last two with a nested `eagle_config`. z-lab's
is flat with a nested `dflash_config`, DeepSpec's is flat. speculators puts the layer under
`transformer_layer_config`, and the method and the verifier (the target) under `speculators_config`.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from jaxspec.config import ConfigError, read_bool, read_int, read_object
from jaxspec.config.reading import shown
from jaxspec.layers.quantized.files import weight_name

logger = logging.getLogger(__name__)

# Methods that a head's files can name; an MTP module is in the target's own checkpoint.
HEAD_METHODS = ("eagle", "eagle3", "dflash", "dspark")
# EAGLE-3's first layer norms the hidden state; EAGLE-1 has no such norm.
EAGLE3_TENSORS = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
EAGLE1_TENSORS = ("fc.weight", "fusion_fc.weight")
# A draft of blocks norms the target's features once for all layers, and DSpark's has a Markov head.
BLOCK_TENSOR = "hidden_norm.weight"
DSPARK_TENSOR = "markov_head.markov_w1.weight"


def warn_of_guess(key: str, guess: str, *, by_doctor: bool = True) -> None:
    """Log a WARNING: the head's config lacks a key, and the value that stands in is a guess.

    by_doctor: whether `jaxspec doctor` reads heads of this method, which are EAGLE's
    """
    advice = "; if acceptance is low, compare the alternatives with `jaxspec doctor`"
    logger.warning(
        "%s: not in the head's config, taken as %s%s", key, guess, advice if by_doctor else ""
    )


def without_prefix(name: str) -> str:
    """Return a tensor's name without the `model.` that some trainers write before it."""
    return name.removeprefix("model.")


def is_rope_table(name: str) -> bool:
    """Return whether a tensor is a table of rotation frequencies, which the config implies."""
    return name.endswith("rotary_emb.inv_freq")


def is_speculators(config: Mapping[str, Any]) -> bool:
    """Return whether speculators wrote this config of a head."""
    return "transformer_layer_config" in config


def layer_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a head's config that describes its layer.

    vLLM's conversion of EAGLE heads (model_type "eagle") has it under `model`.
    """
    if is_speculators(config):
        return read_object(config, "transformer_layer_config")
    if isinstance(config.get("model"), Mapping):  # others may have a name there
        return with_nested(config, "model")
    return config


def with_nested(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the config with the keys of its object `key` over its own; null counts as absent."""
    nested = read_object(config, key)
    return {**config, **{name: value for name, value in nested.items() if value is not None}}


def head_method(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Return one of HEAD_METHODS, by what speculators wrote, else the tensors, else the config.

    names: of the tensors; empty where no file is at hand. ConfigError for another kind of draft.
    """
    spoken = read_object(config, "speculators_config").get(
        "algorithm", config.get("speculators_model_type")
    )
    if spoken is not None:
        if spoken not in HEAD_METHODS:
            raise ConfigError(
                f"speculators_config.algorithm: expected one of {', '.join(HEAD_METHODS)}, "
                f"got {shown(spoken)}"
            )
        return spoken
    tensors = {without_prefix(weight_name(name)) for name in names}
    if BLOCK_TENSOR in tensors or (not tensors and drafts_blocks(config)):
        is_dspark = DSPARK_TENSOR in tensors or "dspark" in architectures(config)
        return "dspark" if is_dspark else "dflash"
    if tensors:
        if tensors.intersection(EAGLE3_TENSORS):
            return "eagle3"
        if tensors.intersection(EAGLE1_TENSORS):
            return "eagle"
        raise ConfigError(
            f"model: expected a draft head, with {EAGLE1_TENSORS[0]} (EAGLE-1), "
            f"{EAGLE3_TENSORS[0]} (EAGLE-3) or {BLOCK_TENSOR} (DFlash, DSpark) among its tensors, "
            f"got {', '.join(sorted(names)[:3])} and others"
        )
    is_eagle3 = "eagle3" in architectures(config) or any(
        config.get(key) is not None
        for key in ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
    )
    return "eagle3" if is_eagle3 else "eagle"


def is_head(config: Mapping[str, Any], names: Collection[str] = ()) -> bool:
    """Return whether a checkpoint is a draft head, by its config and its tensors' names.

    names: empty where only the config is at hand, by which EAGLE-1's heads look like models
    """
    markers = (BLOCK_TENSOR, *EAGLE3_TENSORS, *EAGLE1_TENSORS)
    return (
        "speculators_config" in config
        or "eagle3" in architectures(config)
        or drafts_blocks(config)
        or any(without_prefix(weight_name(name)) in markers for name in names)
    )


def drafts_blocks(config: Mapping[str, Any]) -> bool:
    """Return whether a flat config is that of a DFlash or DSpark head."""
    named = architectures(config)
    return "dflash_config" in config or "dflash" in named or "dspark" in named


def architectures(config: Mapping[str, Any]) -> str:
    """Return the architectures that a config names, in lower case."""
    return str(config.get("architectures")).lower()


def verifier(config: Mapping[str, Any]) -> str | None:
    """Return the target that a head names: a hub id or a path; None if it names none."""
    name = read_object(read_object(config, "speculators_config"), "verifier").get("name_or_path")
    if name is None or name == "":
        return None
    if not isinstance(name, str):
        raise ConfigError(
            f"speculators_config.verifier.name_or_path: expected a name, got {shown(name)}"
        )
    return name


def proposed_tokens(config: Mapping[str, Any]) -> int | None:
    """Return the draft tokens of a round that a head proposes, None if it proposes no number."""
    said = read_object(config, "speculators_config")
    methods = said.get("proposal_methods")
    if not isinstance(methods, list):
        return None
    chosen = [
        m
        for m in methods
        if isinstance(m, Mapping) and m.get("proposal_type") == said.get("default_proposal_method")
    ]
    if not chosen or chosen[0].get("speculative_tokens") is None:
        return None
    return read_int(chosen[0], "speculative_tokens")


def read_nested_bool(config: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> bool | None:
    """Return a switch of a head's eagle_config, or else of the config itself; None if in neither.

    NVIDIA's heads have `norm_before_fc` in eagle_config, some with another value beside it. The
    nested one is the trainer's own.
    """
    inner = read_bool(nested, key, False) if nested.get(key) is not None else None
    outer = read_bool(config, key, False) if config.get(key) is not None else None
    if inner is None:
        return outer
    if outer is not None and outer != inner:
        logger.warning(
            "%s: %s in the head's eagle_config and %s beside it, taken as %s",
            key,
            inner,
            outer,
            inner,
        )
    return inner
