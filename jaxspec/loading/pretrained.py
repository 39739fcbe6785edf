"""Arguments of an LLM -> its parts: target, draft, tokenizer and settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec import drafts
from jaxspec.config import (
    ConfigError,
    DraftConfig,
    EngineConfig,
    SpeculativeConfig,
    TargetConfig,
    check_options,
    items_of,
    shown,
)
from jaxspec.config.draft_methods import HELD_BY_DRAFT, OPTIONS
from jaxspec.config.keys import ENGINE, own_keys
from jaxspec.config.quantization import Quantization, form_while_loading, quantization_of
from jaxspec.layers.params import Params
from jaxspec.loading.cache import keep_compiled_programs
from jaxspec.loading.checkpoint import open_checkpoint, read_model_config
from jaxspec.loading.generation_config import DefaultSampling, check_choice, default_sampling
from jaxspec.loading.model import load_draft, load_target
from jaxspec.loading.pair import Pair, resolve_pair, with_draft_quantize, with_k
from jaxspec.loading.placement import choose_placement
from jaxspec.loading.resolve import as_path, resolve
from jaxspec.loading.same_vocabulary import check_same_vocabulary
from jaxspec.loading.tokenizer import Tokenizer, eos_token_ids, has_tokenizer, load_tokenizer
from jaxspec.parallel.layout import Placement
from jaxspec.parallel.processes import join_processes
from jaxspec.sampling import synthetic

log = logging.getLogger(__name__)
DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
DEFAULT_MODEL_LEN = 2048
# Keywords of LLM.from_pretrained that are no fields of EngineConfig.
OWN_KEYWORDS = (
    "model",
    "speculative_config",
    "revision",
    "tokenizer",
    "dtype",
    "mxfp4",
    "generation_config",
)


# Fields of EngineConfig for which None is the default in vLLM, and no value here.
NONE_IS_DEFAULT = ("max_model_len", "max_num_seqs", "block_size", "enable_prefix_caching")


@dataclass(frozen=True)
class Parts:
    """The parts of an LLM, from files or as a caller has them.

    target, draft: (config, params).
    tokenizer: None where the target's folder has none.
    config: the engine's.
    dtype: of weights and caches.
    sampling: the parameters of requests that bring none.
    """

    target: tuple[TargetConfig, Params]
    draft: tuple[DraftConfig, Params] | None
    speculative: SpeculativeConfig | None
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    config: EngineConfig
    dtype: DTypeLike
    sampling: DefaultSampling


def load_pretrained(
    target: str | PathLike[str] | None,
    speculative: SpeculativeConfig | Mapping[str, Any] | None,
    *,
    revision: str | None = None,
    tokenizer: Tokenizer | str | PathLike[str] | None = None,
    dtype: str = "auto",
    max_model_len: int | None = None,
    mxfp4: str = "auto",
    generation_config: str | None = None,
    **engine: Any,
) -> Parts:
    """Load the parts of an LLM; the arguments are those of LLM.from_pretrained.

    Errors that need no weights are raised before these are read.
    """
    name = target_name(target, revision)
    speculative = check_speculative(speculative)
    check_own_keywords(dtype, mxfp4, generation_config, tokenizer)
    config = engine_config(engine, max_model_len)
    start_jax()
    weights_dtype = dtype_of_weights(dtype)
    pair = fitting_pair(name, speculative)
    placement = choose_placement(config, pair.speculative)
    pair, config = settle_quantize(pair, config)
    loaded = load_target(
        pair.target, weights_dtype, placement, mxfp4=mxfp4, quantize=config.quantize
    )
    if max_model_len is None:
        longest = min(DEFAULT_MODEL_LEN, loaded[0].max_position_embeddings)
        config = replace(config, max_model_len=longest)
    draft, speculative = load_draft_and_settle(
        pair, loaded, weights_dtype, placement, config.max_model_len
    )
    found = find_tokenizer(tokenizer, pair.target)
    eos = found.eos_token_ids if found else eos_token_ids(pair.target, None)
    sampling = default_sampling(pair.target, generation_config)
    return Parts(loaded, draft, speculative, found, eos, config, weights_dtype, sampling)


def target_name(target: object, revision: str | None) -> str | None:
    """Return a target's path or hub id as text, with its revision; None for the default target."""
    if not isinstance(target, str | PathLike | None):
        raise ConfigError(
            "model: expected a folder, a .gguf file, a hub id or a (config, params) pair, "
            f"got {shown(target)}"
        )
    return at_revision(None if target is None else as_text("model", target), revision)


def check_own_keywords(
    dtype: object, mxfp4: object, generation_config: str | None, tokenizer: object
) -> None:
    """Raise ConfigError for a wrong value of a keyword that is no field of EngineConfig."""
    if not isinstance(dtype, str) or dtype not in ("auto", *DTYPES):
        raise ConfigError(f"dtype: expected one of auto, {', '.join(DTYPES)}, got {shown(dtype)}")
    if not isinstance(mxfp4, str) or mxfp4 not in ("auto", "packed", "dequantised"):
        raise ConfigError(f"mxfp4: expected auto, packed or dequantised, got {shown(mxfp4)}")
    check_choice(generation_config)
    if not isinstance(tokenizer, Tokenizer | str | PathLike | None):
        raise ConfigError(f"tokenizer: expected a folder or a hub id, got {shown(tokenizer)}")


def engine_config(given: Mapping[str, Any], max_model_len: int | None) -> EngineConfig:
    """Return the engine's settings by a caller's keywords; ConfigError for an unknown one."""
    known = (*OWN_KEYWORDS, *sorted(f.name for f in fields(EngineConfig)))
    settings = own_keys("LLM", given, known, ENGINE)
    settings["max_model_len"] = max_model_len
    for name in NONE_IS_DEFAULT:
        if settings.get(name, ...) is None:
            del settings[name]
    return EngineConfig(**settings)


def start_jax() -> None:
    """Join the processes of one engine, check the platform, and keep compiled programs on disk."""
    try:
        join_processes()
    except (ValueError, RuntimeError) as e:  # jax's own, if it was used before
        raise ConfigError(str(e).splitlines()[0]) from e
    check_platform()
    keep_compiled_programs()


def dtype_of_weights(name: str) -> DTypeLike:
    """Return the dtype of this name; "auto" is float32 on a CPU and bfloat16 elsewhere."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return DTYPES[name]


def fitting_pair(target: str | None, speculative: SpeculativeConfig | None) -> Pair:
    """Return the folders of a target and its draft.

    ConfigError if the draft is an independent model with another vocabulary.
    """
    pair = resolve_pair(target, speculative)
    if pair.head is not None and is_draft_model(pair.head, pair.speculative):
        check_same_vocabulary(pair.target, pair.head)
    return pair


def settle_quantize(pair: Pair, config: EngineConfig) -> tuple[Pair, EngineConfig]:
    """Return both with settings that name the forms of plain weights while they load, or None."""
    speculative = pair.speculative
    if speculative is not None and speculative.method not in drafts.MODEL_FREE:
        speculative = with_draft_quantize(speculative, read_model_config(pair.draft_weights))
    form = form_while_loading(config.quantize, read_model_config(pair.target))
    return replace(pair, speculative=speculative), replace(config, quantize=form)


def load_draft_and_settle(
    pair: Pair,
    target: tuple[TargetConfig, Params],
    dtype: DTypeLike,
    placement: Placement,
    max_model_len: int,
) -> tuple[tuple[DraftConfig, Params] | None, SpeculativeConfig | None]:
    """Load the draft of a loaded target, and settle what its files decide.

    That is the method, the longest context of an independent model, and K.
    """
    speculative = pair.speculative
    if speculative is None:
        return None, None
    if speculative.method in drafts.MODEL_FREE:
        cfg = drafts.MODEL_FREE[speculative.method].config(target[0], speculative)
        return (cfg, {}), with_k(speculative, cfg, {})
    cfg, params = load_draft(pair.draft_weights, *target, speculative, dtype, placement)
    speculative = within_context(speculative, cfg, max_model_len)
    if speculative.method is None:
        speculative = replace(speculative, method=drafts.method_name(cfg))
    return (cfg, params), with_k(speculative, cfg, read_model_config(pair.draft_weights))


def find_tokenizer(given: Tokenizer | str | PathLike[str] | None, target: Path) -> Tokenizer | None:
    """Return the tokenizer that a caller has or names, else the target's; None if it has none."""
    if isinstance(given, Tokenizer):
        return given
    if given is not None:
        return load_tokenizer(resolve(as_text("tokenizer", given), kind="tokenizer"))
    return load_tokenizer(target) if has_tokenizer(target) else None


def is_draft_model(folder: Path, speculative: SpeculativeConfig | None) -> bool:
    """Return whether the draft in a folder is an independent model."""
    method = speculative.method if speculative else None
    if method is not None:
        return method == drafts.draft_model.METHOD
    checkpoint = open_checkpoint(folder)
    return drafts.draft_model.is_model(checkpoint.config, checkpoint.tensors)


def within_context(
    speculative: SpeculativeConfig, draft: DraftConfig, max_model_len: int
) -> SpeculativeConfig:
    """Return the settings with drafts that end at an independent model's longest context."""
    if not isinstance(draft, drafts.DraftModelConfig):
        return speculative
    longest = draft.model.max_position_embeddings
    if min(speculative.draft_max_model_len or max_model_len, max_model_len) <= longest:
        return speculative
    log.warning(
        "draft_max_model_len: %d, the draft's max_position_embeddings, since requests may hold %d "
        "tokens",
        longest,
        max_model_len,
    )
    return replace(speculative, draft_max_model_len=longest)


def _check_given_draft(speculative: SpeculativeConfig, draft: Any) -> None:
    """Raise ConfigError for settings that a loaded draft's config does not bear out.

    They are another method, other methods' options, and what loading alone can follow. A value
    that equals the default passes, since it cannot be told from an unset one.
    """
    method = drafts.method_name(draft)
    if method in drafts.METHODS:
        drafts.check_named_method(speculative.method, method, "the given draft is")
        check_options(speculative, method)
    defaults = {f.name: f.default for f in fields(speculative)}
    # The engine makes a fallback, by its own options.
    of_fallback = OPTIONS.get(speculative.fallback_method or "", ())
    held: dict[str, Any] = {
        name: getattr(draft, field, None)
        for name, field in HELD_BY_DRAFT.items()
        if name not in of_fallback
    }
    for name in ("eagle_aux_hidden_state_layer_ids", "draft_confidence_threshold"):
        held[name] = held[name] or None  # () and 0.0, by which a config says none
    quantization = quantization_of(draft)
    held["draft_quantize"] = quantization and quantization.made_form
    for name, own in held.items():
        default, value = defaults[name], getattr(speculative, name)
        if value in (default, own):
            continue
        has_own = own is not None and own != default
        other = f"or the draft's own {own!r}" if has_own else "for a draft that is loaded already"
        raise ConfigError(f"{name}: expected {default!r} (unset) {other}, got {value!r}")


def given_parts(
    target: Any,
    draft: Any,
    speculative: SpeculativeConfig | Mapping[str, Any] | None,
    tokenizer: Any,
    eos_token_ids: Sequence[int] | None,
    config: EngineConfig | None,
    dtype: DTypeLike | None,
) -> Parts:
    """Return the parts that a caller has loaded; ConfigError for anything else."""
    if isinstance(speculative, Mapping):
        speculative = SpeculativeConfig.from_dict(speculative)
    for name, pair in (("target", target), ("draft", draft)):
        if not _is_loaded(pair, name) and (name == "target" or pair is not None):
            raise ConfigError(
                f"{name}: expected a (config, params) pair whose params are jax arrays "
                f"(LLM.from_pretrained takes a folder or hub id), got {shown(pair)}"
            )
    if (draft is None) != (speculative is None):
        raise ConfigError("draft and speculative: expected both or neither")
    for name, value, is_right in (
        ("speculative", speculative, isinstance(speculative, SpeculativeConfig | None)),
        ("tokenizer", tokenizer, tokenizer is None or hasattr(tokenizer, "decode")),
        ("config", config, isinstance(config, EngineConfig | None)),
    ):
        if not is_right:
            raise ConfigError(f"{name}: expected jaxspec's class or None, got {shown(value)}")
    if speculative is not None:
        _check_given_draft(speculative, draft[0])
    if config is not None and config.quantize is not None:
        held: Quantization | None = getattr(target[0], "quantization", None)
        if held is None or held.made_form != config.quantize:
            raise ConfigError(
                f"quantize: expected None for weights that are loaded already, "
                f"got {config.quantize!r}"
            )
    if eos_token_ids is None:
        eos_token_ids = getattr(tokenizer, "eos_token_ids", ())
    end_ids = items_of(eos_token_ids)
    if end_ids is None:
        raise ConfigError(f"eos_token_ids: expected token ids, got {shown(eos_token_ids)}")
    try:
        resolved = jnp.dtype(jnp.float32 if dtype is None else dtype)
    except (TypeError, ValueError):
        resolved = jnp.dtype(jnp.bool_)
    if resolved not in map(jnp.dtype, DTYPES.values()):
        raise ConfigError(f"dtype: expected one of {', '.join(DTYPES)}, got {shown(dtype)}")
    if speculative is not None:
        speculative = with_k(speculative, draft[0], {})
    return Parts(
        target,
        draft,
        speculative,
        tokenizer,
        tuple(end_ids),
        config or EngineConfig(),
        resolved,
        sampling=DefaultSampling(),
    )


def _is_loaded(pair: Any, name: str) -> bool:
    """Return whether this is a (config, params) pair of a target or a draft."""
    if not isinstance(pair, tuple | list) or len(pair) != 2 or isinstance(pair[0], type):
        return False
    config, params = pair
    # Some members of each protocol, which dataclasses of other kinds lack.
    own = {"target": ("vocab_size", "max_position_embeddings"), "draft": ("method", "aux_layers")}
    members = (*own[name], "num_layers", "attention", "cache_groups")
    is_config = is_dataclass(config) and all(hasattr(config, member) for member in members)
    return is_config and isinstance(params, Mapping) and _are_arrays(params)


def _are_arrays(params: Params) -> bool:
    try:
        leaves = jax.tree.leaves(params)
    except Exception:  # keys that cannot be put in order
        return False
    return all(hasattr(leaf, "sharding") for leaf in leaves)


def as_text(name: str, path: str | PathLike[str]) -> str:
    """Return a path as text; ConfigError for one of bytes, as an entry of os.scandir(b".") has."""
    text = fspath(path)
    if not isinstance(text, str):
        raise ConfigError(f"{name}: expected a path of text, got {shown(text)}")
    return text


def at_revision(target: str | None, revision: str | None) -> str | None:
    """Return a hub id with its revision: owner/name@revision."""
    if revision is None:
        return target
    if not isinstance(revision, str) or not revision:
        raise ConfigError(f"revision: expected a commit, a tag or a branch, got {shown(revision)}")
    if not isinstance(target, str) or "@" in target or as_path(target, "model").exists():
        raise ConfigError(
            f"revision: expected none, or a hub id without one beside it, got {shown(revision)} "
            f"for {shown(target)}"
        )
    return f"{target}@{revision}"


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
                f"got {shown(speculative)}"
            )
        drafts.check_method(speculative.method)
        synthetic.acceptance_rates(speculative)
    return speculative
