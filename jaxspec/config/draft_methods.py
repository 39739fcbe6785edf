"""The methods of drafting: their names, the options that each reads, and the checks of those.

OPTIONS has each method's options, which are fields of SpeculativeConfig. HELD_BY_DRAFT has those
that the draft's config keeps. ADVICE says what to set instead, where another setting has an
option's effect. READERS names what reads an option, for messages. Values are checked by kind
(SWITCHES, POSITIVE) or by a function of CHECKS. SpeculativeConfig itself checks formats and lists,
which have functions of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxspec.config.reading import (
    MAX_INT32,
    ConfigError,
    check_int32,
    check_positive_int,
    is_int,
    is_number,
    is_one_of,
    shown,
)

# Every method, with the options that it reads and some others do not.
_LAYERED = ("draft_kv_cache_dtype", "draft_tensor_parallel_size")
_HEAD = ("draft_quantize", *_LAYERED)
_EAGLE = (*_HEAD, "draft_sliding_window")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "eagle": _EAGLE,
    "eagle3": (
        *_EAGLE,
        "eagle_aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ),
    "dflash": _LAYERED,
    "dspark": (*_LAYERED, "draft_confidence_threshold"),
    "mtp": (*_LAYERED, "mtp_zero_first_embedding"),
    "draft_model": _HEAD,
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
}
# Options that loading writes into the draft's config, and the field of that config. A draft that is
# loaded already has its own values, so others are refused beside it. Of the rest, draft_quantize is
# compared with the form of the draft's weights, and the engine reads the others.
HELD_BY_DRAFT: Mapping[str, str] = {
    "eagle_aux_hidden_state_layer_ids": "aux_layers",
    "norm_before_residual": "norm_before_residual",
    "norm_before_fc": "norm_before_fc",
    "fc_norm": "fc_norm",
    "norm_output": "norm_output",
    "draft_sliding_window": "sliding_window",
    "draft_confidence_threshold": "confidence_threshold",
    "mtp_zero_first_embedding": "zero_first_embedding",
    "prompt_lookup_max": "lookup_max",
    "prompt_lookup_min": "lookup_min",
    "suffix_decoding_max_tree_depth": "max_tree_depth",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
}
# What to do instead of setting an option that a method does not read; the end of a message.
ADVICE: Mapping[str, Mapping[str, str]] = {
    "mtp": {"draft_quantize": "set quantize, which its module follows"},
}
# What reads an option, for messages, where not all drafts of its methods do.
READERS: Mapping[str, str] = {
    "draft_confidence_threshold": "a draft that has a confidence head",
}
LOOKUPS = ("ngram", "suffix")  # the methods that need no model
# Those without a fallback. An independent model's cache holds its own drafts, and not the looked-up
# ones that a round accepts in their place.
_WITHOUT_FALLBACK = ("draft_model", *LOOKUPS)
_NGRAM_MODELS = ("ngram", "[ngram]")  # models of vLLM's that mean the method
_ALIASES = {"[ngram]": "ngram", "ngram_gpu": "ngram"}  # vLLM's; lookup is on the device
# vLLM names the module of multi-token prediction after its model too: deepseek_mtp, mimo_mtp.
_MTP_SUFFIX = "_mtp"
# Settings that are true, false or none.
SWITCHES = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "mtp_zero_first_embedding",
)
# Settings that are an integer of at least 1, or none.
POSITIVE = ("draft_max_model_len", "draft_sliding_window", "draft_tensor_parallel_size")


def settled_method(method: str | None, model: str | None) -> tuple[str | None, str | None]:
    """Return the method's own name and the model, where vLLM has other names or a model for it."""
    method = None if method is None else _ALIASES.get(method, method)
    if method in (None, "ngram") and model in _NGRAM_MODELS:
        return "ngram", None
    if method is not None and method.endswith(_MTP_SUFFIX):
        method = "mtp"
    return method, model


def check_switches(settings: object) -> None:
    """Raise ConfigError for one of SWITCHES that is neither true, false nor none."""
    for name in SWITCHES:
        value = getattr(settings, name)
        if not isinstance(value, bool | None):
            raise ConfigError(f"{name}: expected true, false or none, got {shown(value)}")


def check_positive(settings: object) -> None:
    """Raise ConfigError for one of POSITIVE that is neither an integer of at least 1 nor none."""
    for name in POSITIVE:
        number = getattr(settings, name)
        if number is not None:
            check_positive_int(name, number, "an integer of at least 1 or none")


def check_values(settings: object) -> None:
    """Raise ConfigError for the first options, in the order of CHECKS, that their check refuses."""
    for names, check in CHECKS.items():
        check(*(getattr(settings, name) for name in names))


def readers_of(option: str) -> str:
    """Return what reads an option, for messages: READERS' words, or its methods by name."""
    methods = " or ".join(repr(method) for method, keys in OPTIONS.items() if option in keys)
    return READERS.get(option, f"method {methods}")


def check_fallback(fallback: str | None, method: str | None) -> None:
    """Raise ConfigError for a fallback that is no lookup, or that this method cannot have.

    method: None while the head has not told it
    """
    if fallback is not None and not is_one_of(fallback, LOOKUPS):
        raise ConfigError(
            f"fallback_method: expected {' or '.join(map(repr, LOOKUPS))}, or none, "
            f"got {shown(fallback)}"
        )
    if fallback is not None and method in _WITHOUT_FALLBACK:
        raise ConfigError(
            f"fallback_method: expected none with method {method!r}, got {fallback!r}"
        )


def _check_confidence(chance: float | None) -> None:
    if chance is not None and not (is_number(chance) and 0 < chance <= 1):
        raise ConfigError(
            "draft_confidence_threshold: expected a number above 0 and at most 1, or none, "
            f"got {shown(chance)}"
        )


def _check_prompt_lookup(longest: int, shortest: int) -> None:
    if not (is_int(longest) and is_int(shortest) and 1 <= shortest <= longest):
        raise ConfigError(
            "prompt_lookup_min, prompt_lookup_max: expected integers with 1 <= min <= max, "
            f"got {shown(shortest)} and {shown(longest)}"
        )
    check_int32("prompt_lookup_max", longest)


def _check_suffix(depth: int, factor: float, least: float) -> None:
    check_positive_int("suffix_decoding_max_tree_depth", depth)
    if not (is_number(factor) and factor > 0):
        raise ConfigError(
            f"suffix_decoding_max_spec_factor: expected a number above 0, got {shown(factor)}"
        )
    if factor > MAX_INT32:
        raise ConfigError(
            f"suffix_decoding_max_spec_factor: expected at most 2**31 - 1, got {shown(factor)}"
        )
    if not (is_number(least) and 0 <= least <= 1):
        raise ConfigError(
            f"suffix_decoding_min_token_prob: expected a number from 0 to 1, got {shown(least)}"
        )


# Options, and the function that takes their values in this order.
CHECKS: Mapping[tuple[str, ...], Callable[..., None]] = {
    ("draft_confidence_threshold",): _check_confidence,
    ("prompt_lookup_max", "prompt_lookup_min"): _check_prompt_lookup,
    (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ): _check_suffix,
}
