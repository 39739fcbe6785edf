"""Arguments of LLM.from_pretrained -> the parts of an LLM."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec import drafts
from jaxspec.config import ConfigError, DraftConfig, EngineConfig, SpeculativeConfig, TargetConfig
from jaxspec.layers.params import Params
from jaxspec.loading.cache import keep_compiled_programs
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.pair import resolve_pair
from jaxspec.loading.placement import choose_placement
from jaxspec.loading.tokenizer import Tokenizer, eos_token_ids, has_tokenizer, load_tokenizer
from jaxspec.sampling import synthetic

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
DEFAULT_MODEL_LEN = 2048


@dataclass(frozen=True)
class Pretrained:
    """The parts of an LLM.

    target, draft: (config, params).
    tokenizer: None where the target's folder has none.
    config: the engine's.
    dtype: of weights and caches.
    """

    target: tuple[TargetConfig, Params]
    draft: tuple[DraftConfig, Params] | None
    speculative: SpeculativeConfig | None
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    config: EngineConfig
    dtype: DTypeLike


def load_pretrained(
    target: str | None,
    speculative: SpeculativeConfig | Mapping[str, Any] | None,
    *,
    dtype: str,
    max_model_len: int | None,
    batch_buckets: Sequence[int] | None,
    mxfp4: str,
    engine: Mapping[str, Any],
) -> Pretrained:
    """Load the parts of an LLM; the arguments are those of LLM.from_pretrained.

    Errors that need no weights are raised before these are read.
    """
    speculative = check_speculative(speculative)
    if dtype != "auto" and dtype not in DTYPES:
        raise ConfigError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {dtype!r}")
    if mxfp4 not in ("dequantised", "packed"):
        raise ConfigError(f"mxfp4: expected dequantised or packed, got {mxfp4!r}")
    settings = dict(engine)
    if batch_buckets is not None:
        settings["batch_buckets"] = batch_buckets
    if max_model_len is not None:
        settings["max_model_len"] = max_model_len
    config = EngineConfig(**settings)
    check_platform()
    keep_compiled_programs()
    resolved = (
        DTYPES["float32" if jax.default_backend() == "cpu" else "bfloat16"]
        if dtype == "auto"
        else DTYPES[dtype]
    )
    names = resolve_pair(target, speculative)
    folder, speculative = names.target, names.speculative
    placement = choose_placement(config, speculative)
    loaded = load_target(folder, resolved, placement, mxfp4=mxfp4)
    if max_model_len is None:
        config = replace(
            config, max_model_len=min(DEFAULT_MODEL_LEN, loaded[0].max_position_embeddings)
        )
    draft = None
    if speculative is not None and speculative.method in drafts.MODEL_FREE:
        draft = drafts.MODEL_FREE[speculative.method].config(loaded[0], speculative), {}
    elif speculative is not None:
        # An MTP module is in the target's own checkpoint.
        head = names.head or folder
        draft = load_draft(head, *loaded, speculative, resolved, placement)
        if speculative.method is None:
            speculative = replace(speculative, method=drafts.method_name(draft[0]))
    tokenizer = load_tokenizer(folder) if has_tokenizer(folder) else None
    eos = tokenizer.eos_token_ids if tokenizer else eos_token_ids(folder, None)
    return Pretrained(loaded, draft, speculative, tokenizer, eos, config, resolved)


def check_platform() -> None:
    """Raise ConfigError if JAX finds none of the platforms that JAX_PLATFORMS names."""
    try:
        jax.default_backend()
    except (RuntimeError, AssertionError) as e:  # the latter without a word, for lack of a plugin
        reason = (str(e) or "no such backend").splitlines()[0]
        raise ConfigError(
            "JAX_PLATFORMS: expected a platform that this machine and this jax have, got "
            f"{os.environ.get('JAX_PLATFORMS')!r}: {reason}"
        ) from e


def check_speculative(
    speculative: SpeculativeConfig | Mapping[str, Any] | None,
) -> SpeculativeConfig | None:
    """Return the config, made from its keys if need be.

    ConfigError for an unknown method, or rates that do not fit.
    """
    if isinstance(speculative, Mapping):
        speculative = SpeculativeConfig.from_dict(speculative)
    if speculative is not None:
        if not isinstance(speculative, SpeculativeConfig):
            raise ConfigError(
                "speculative: expected a SpeculativeConfig, its keys or None, "
                f"got {speculative!r:.200}"
            )
        drafts.check_method(speculative.method)
        synthetic.acceptance_rates(speculative)
    return speculative
