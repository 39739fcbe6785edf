"""Names of a target and of a head -> their folders, and the settings that a head's config decides.

A head may name its own target (verifier).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxspec import drafts
from jaxspec.config import ConfigError, DraftConfig, SpeculativeConfig
from jaxspec.config.quantization import form_while_loading
from jaxspec.config.speculative import DEFAULT_K
from jaxspec.drafts.head_layout import is_head, proposed_tokens, verifier
from jaxspec.loading.checkpoint import read_json
from jaxspec.loading.resolve import own_drafts, read_config, resolve


@dataclass(frozen=True)
class Pair:
    """Local folders, and what to draft with.

    head: None without a draft, and for a draft without a checkpoint of its own.
    speculative: the caller's, or that of a head which the caller gave as the target.
    """

    target: Path
    head: Path | None
    speculative: SpeculativeConfig | None

    @property
    def draft_weights(self) -> Path:
        """The folder of the draft's weights: an MTP module is in the target's own checkpoint."""
        return self.head or self.target


def resolve_pair(target: str | None, speculative: SpeculativeConfig | None) -> Pair:
    """Return the folders of a target and its head.

    A head of speculators as the target loads the target that it names, and itself. Without a
    target, the one that the head names is taken, or else the default. ConfigError if a draft that
    needs a checkpoint has none.
    """
    lacks_model = (
        speculative is not None
        and speculative.model is None
        and drafts.needs_model(speculative.method)
    )
    if lacks_model and (target is None or not is_head(read_config(str(target)))):
        raise ConfigError(
            "speculative model: expected a folder, a name under checkpoints/ or a hub id "
            "of a draft head, got none"
        )
    if target is None:
        head = _head(speculative)
        named = None if head is None else verifier(read_json(head / "config.json"))
        folder = resolve(None, kind="target") if named is None else _verifier(head, named)
        return Pair(folder, head, speculative)
    folder = own_drafts().get(str(target)) or resolve(target, kind="target")
    config = read_json(folder / "config.json")
    if not is_head(config):
        return Pair(folder, _head(speculative), speculative)
    return _pair_of_head(target, folder, config, speculative)


def with_draft_quantize(
    speculative: SpeculativeConfig, config: Mapping[str, Any]
) -> SpeculativeConfig:
    """Return the settings with the form that a draft's plain weights get while they load.

    It is None where the checkpoint's own method is named, also with an MTP module, which has no
    form of its own.

    config: the config.json of the draft's checkpoint
    """
    form = form_while_loading(speculative.draft_quantize, config, key="draft_quantize")
    return replace(speculative, draft_quantize=form)


def with_k(
    speculative: SpeculativeConfig, draft: DraftConfig, config: Mapping[str, Any]
) -> SpeculativeConfig:
    """Return the settings with K for this draft: the caller's, or else the draft's own.

    A head proposes a number in speculators' config.json. Others draft their whole block, and drafts
    without blocks DEFAULT_K. ConfigError for more than a block holds.

    config: the config.json of the head; empty for a draft that has none
    """
    most, K = drafts.block_capacity(draft), speculative.num_speculative_tokens
    if K is not None:
        if most is not None and most < K:
            raise ConfigError(
                f"num_speculative_tokens: expected at most {most}, the drafts of this head's "
                f"block, got {K}"
            )
        return speculative
    proposed = proposed_tokens(config)
    if most is None:
        K = DEFAULT_K if proposed is None else proposed
    else:
        K = most if proposed is None else min(proposed, most)
    return replace(speculative, num_speculative_tokens=K)


def _head(speculative: SpeculativeConfig | None) -> Path | None:
    if speculative is None or speculative.model is None:
        return None
    is_model = speculative.method == drafts.draft_model.METHOD
    return resolve(speculative.model, kind="draft model" if is_model else "draft")


def _pair_of_head(
    name: str, head: Path, config: Mapping[str, Any], speculative: SpeculativeConfig | None
) -> Pair:
    """Return the pair of a head that was given as the target."""
    if speculative is not None and speculative.model is not None:
        raise ConfigError(
            f"target {name}: expected a model beside the head {speculative.model}, got a draft head"
        )
    named = verifier(config)
    if named is None:
        raise ConfigError(
            f"target {name}: expected a model, got a draft head that names no target; name the "
            "target, and the head as the speculative config's model"
        )
    if speculative is None:
        speculative = SpeculativeConfig(num_speculative_tokens=proposed_tokens(config))
    return Pair(_verifier(head, named), head, replace(speculative, model=name))


def _verifier(head: Path | None, name: str) -> Path:
    try:
        return resolve(name, kind="target")
    except ConfigError as e:
        raise ConfigError(
            f"{head}/config.json: expected a verifier that can be loaded, or a target beside the "
            f"head, got {name!r}: {e}"
        ) from e
