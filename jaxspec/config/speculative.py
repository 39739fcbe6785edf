"""SpeculativeConfig: the draft, and how its tokens are verified."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, Literal, get_args

from jaxspec.config import draft_methods
from jaxspec.config.attention import AttentionKind, CompressedAttentionConfig
from jaxspec.config.cache_dtype import KVCacheDtype, settled_kv_cache_dtype
from jaxspec.config.draft_methods import ADVICE, OPTIONS
from jaxspec.config.keys import (
    SPECULATIVE,
    checks_keywords,
    given_names,
    named_as_given,
    own_keys,
)
from jaxspec.config.quantization import OwnMethod, Quantize, settled_quantize
from jaxspec.config.reading import (
    ConfigError,
    check_int32,
    check_positive_int,
    is_int,
    is_number,
    set_field,
    settle_integers,
    shown,
)
from jaxspec.config.settings import setting

RejectionRule = Literal["strict", "probabilistic", "block", "synthetic"]
DraftSampling = Literal["greedy", "probabilistic"]
_RULE_ALIASES = {"standard": "probabilistic"}  # vLLM's later name
_DRAFT_ALIASES = {"gumbel": "probabilistic"}
DEFAULT_K = 3  # of a round, if neither the caller nor the head names a number


@checks_keywords(SPECULATIVE)
@dataclass(frozen=True)
class SpeculativeConfig:
    """The draft, its number of tokens, and how they are verified; the keys are vLLM's.

    model: a folder, a hub id, or a name under checkpoints/ that holds the draft head; with
        "draft_model" a model, or a .gguf file; None with "mtp": the target's.
    method: "eagle" (EAGLE-1), "eagle3", "dflash" or "dspark" (a block of drafts a pass), "mtp" (the
        module of multi-token prediction in the target's own checkpoint), "draft_model" (a smaller
        model with the target's vocabulary), or without a model "ngram" (prompt lookup) and
        "suffix" (suffix matching); see jaxspec.drafts.METHODS. None reads it from the head.
    num_speculative_tokens: K, the draft tokens of a round. None: those that the head proposes, or
        else its whole block, or else DEFAULT_K; a loaded pair has the number.
    rejection_sample_method: "strict", "probabilistic" (vLLM's "standard"), "block" or "synthetic".
    draft_sample_method: "greedy" (argmax, a one-hot q) or "probabilistic" (sampled at the request's
        temperature).
    synthetic_acceptance_rates: unconditional rate of each position, non-increasing.
    synthetic_acceptance_length: their mean length instead, bonus token included.
    synthetic_acceptance_rate: their mean over positions instead.
    eagle_aux_hidden_state_layer_ids, norm_*, fc_norm: override the checkpoint's config; None keeps
        it, as an empty list of ids does.
    num_speculative_tokens_per_batch_size: (first, last, K) for batches of first to last running
        requests, K from 0 to num_speculative_tokens, which other batch sizes keep. The text of a
        sampled request then depends on the number of its neighbours.
    adaptive: each request has 1 to num_speculative_tokens drafts a round, as many as its acceptance
        so far makes worthwhile.
    fallback_method: "ngram" or "suffix", which drafts for a request while its head's drafts cost
        more than they bring; None for no such method.
    draft_max_model_len: the longest context, in tokens, that is drafted for; longer requests
        continue without drafts.
    draft_sliding_window: tokens, up to the latest, that an EAGLE head attends to. None keeps the
        checkpoint's. A head accepts more in long contexts if it sees no more than in training.
    max_num_verify_tokens: the most tokens that the target verifies in a round, each request's next
        token included; None for K + 1 a slot. A pass of fewer has this many rows for all requests
        together. A request whose drafts do not fit waits for the next round; its text is the same.
    draft_confidence_threshold: with a DSpark head that has a confidence head, a request's drafts of
        a round end before the first that reaches acceptance with less than this chance, by the
        head's estimate; None for no end.
    draft_tensor_parallel_size: devices that share the draft's layers: the engine's
        tensor_parallel_size (None), or 1, where each of them runs the whole draft.
    prompt_lookup_max, prompt_lookup_min: with "ngram", the longest and the shortest run of tokens
        that is looked up.
    draft_quantize: quantises the draft's plain weights while they load, as EngineConfig's quantize.
    draft_kv_cache_dtype: of the draft's keys and values, as EngineConfig's kv_cache_dtype; None
        takes the target's. An "auto" of either is fp8 if the draft's own checkpoint says so.
    suffix_decoding_max_tree_depth: with "suffix", tokens of a match and its drafts, at most.
    suffix_decoding_max_spec_factor: with "suffix", drafts for each token of the match, at most.
    suffix_decoding_min_token_prob: with "suffix", the chance below which drafts end.
    mtp_zero_first_embedding: whether an MTP module's row of position 0 has a zero embedding (None:
        the default in drafts/mtp.py).
    """

    model: str | None = setting(
        None, "Folder, name under checkpoints/ or hub id of the draft head or model."
    )
    method: str | None = setting(
        None,
        "eagle, eagle3, dflash, dspark, mtp (the module in the target's own folder), "
        "draft_model (a smaller model), or without a model ngram or suffix. "
        "[default: the head's]",
    )
    num_speculative_tokens: int | None = setting(
        None, "K, the draft tokens a round. [default: the head's own number or block, else 3]"
    )
    rejection_sample_method: str = setting(
        "probabilistic", "strict, probabilistic, block or synthetic."
    )
    draft_sample_method: str = setting("probabilistic", "greedy or probabilistic.")
    synthetic_acceptance_rates: tuple[float, ...] | None = setting(
        None, "For synthetic: K acceptance rates with commas between them."
    )
    synthetic_acceptance_length: float | None = setting(
        None, "For synthetic: the mean acceptance length instead, bonus token included."
    )
    synthetic_acceptance_rate: float | None = None
    eagle_aux_hidden_state_layer_ids: tuple[int, ...] | None = None
    norm_before_residual: bool | None = None
    norm_before_fc: bool | None = None
    fc_norm: bool | None = None
    norm_output: bool | None = None
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] = ()
    adaptive: bool = setting(
        False, "Give each request as many drafts, up to K, as its acceptance so far makes pay."
    )
    fallback_method: str | None = setting(
        None, "ngram or suffix: drafts for a request while its head's drafts do not pay."
    )
    draft_max_model_len: int | None = None
    draft_sliding_window: int | None = setting(
        None, "Tokens that an EAGLE head attends to, up to the latest. [default: the head's]"
    )
    max_num_verify_tokens: int | None = setting(
        None, "Tokens that the target verifies in a round, at most. [default: K + 1 a request]"
    )
    draft_confidence_threshold: float | None = None
    mtp_zero_first_embedding: bool | None = None
    draft_quantize: Quantize | OwnMethod | None = setting(
        None, "Quantise the draft's plain weights while they load: fp8, fp8-block or int4."
    )
    draft_kv_cache_dtype: KVCacheDtype | None = setting(
        None,
        "Dtype of the draft's keys and values. [default: the target's, or fp8 if the draft's "
        "checkpoint says so beside an auto]",
    )
    draft_tensor_parallel_size: int | None = setting(
        None, "Devices that share the draft's layers: the engine's number (the default), or 1."
    )
    prompt_lookup_max: int = setting(5, "ngram: the longest run of tokens that is looked up.")
    prompt_lookup_min: int = setting(2, "ngram: the shortest.")
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1

    def __post_init__(self) -> None:
        _settle_names(self)
        _settle_formats(self)
        method, model = draft_methods.settled_method(self.method, self.model)
        set_field(self, "method", method)
        set_field(self, "model", model)
        draft_methods.check_switches(self)
        _settle_list(self, "synthetic_acceptance_rates", is_number, "numbers")
        _settle_list(self, "eagle_aux_hidden_state_layer_ids", is_int, "integers")
        if not self.eagle_aux_hidden_state_layer_ids:
            set_field(self, "eagle_aux_hidden_state_layer_ids", None)
        _check_number(self.num_speculative_tokens)
        set_field(self, "num_speculative_tokens_per_batch_size", _settled_schedule(self))
        _check_choice_of_drafts(self)
        draft_methods.check_positive(self)
        _check_verify_pass(self)
        draft_methods.check_values(self)
        settle_integers(self)
        _check_rule(self)
        _check_synthetic(self)

    @property
    def adapts(self) -> bool:
        """Whether a request's acceptance so far chooses the number or the source of its drafts."""
        return self.adaptive or self.fallback_method is not None

    @property
    def max_k(self) -> int:
        """The largest K of a round: num_speculative_tokens, or DEFAULT_K."""
        return self.num_speculative_tokens or DEFAULT_K

    def k_of_batch(self, batch_size: int) -> int:
        """Return K for so many running requests."""
        schedule = self.num_speculative_tokens_per_batch_size
        return next(
            (K for first, last, K in schedule if first <= batch_size <= last),
            self.max_k,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Read the JSON of vLLM's --speculative-config; ConfigError for an unknown key."""
        if not isinstance(values, Mapping):
            raise ConfigError(f"speculative config: expected a mapping, got {shown(values)}")
        known = sorted(f.name for f in fields(cls))
        with named_as_given(given_names(values, SPECULATIVE, "speculative_config.")):
            return cls(**own_keys("speculative config", values, known, SPECULATIVE))


def check_verify_tokens(
    speculative: SpeculativeConfig, *, max_num_seqs: int, attention: AttentionKind
) -> None:
    """Raise ConfigError for a max_num_verify_tokens that rounds of these requests cannot have.

    attention: the target's
    """
    most = speculative.max_num_verify_tokens
    if most is None:
        return
    if most < max_num_seqs:
        raise ConfigError(
            f"max_num_verify_tokens: expected at least max_num_seqs {max_num_seqs}, "
            f"a token of each request, got {most}"
        )
    if isinstance(attention, CompressedAttentionConfig):
        raise ConfigError(
            "max_num_verify_tokens: expected none with a target of compressed attention, "
            f"got {most}"
        )


def check_options(speculative: SpeculativeConfig, method: str) -> None:
    """Raise ConfigError for an option that this method ignores, unless its value changes nothing.

    method: the draft's, also where the config leaves it to the head
    """
    draft_methods.check_fallback(speculative.fallback_method, method)
    read = (*OPTIONS[method], *OPTIONS.get(speculative.fallback_method or "", ()))
    harmless = {f.name: {f.default} for f in fields(speculative)}
    harmless["draft_tensor_parallel_size"].add(1)
    for key in dict.fromkeys(key for keys in OPTIONS.values() for key in keys):
        if key in read or getattr(speculative, key) in harmless[key]:
            continue
        advice = ADVICE.get(method, {}).get(key)
        raise ConfigError(
            f"{key}: expected it only with {draft_methods.readers_of(key)}, got it with {method!r}"
            + (f"; {advice}" if advice else "")
        )


def _settle_names(config: SpeculativeConfig) -> None:
    """Replace a model's path and vLLM's other names; ConfigError for what is no name."""
    if isinstance(config.model, PathLike):
        set_field(config, "model", fspath(config.model))
    for name in ("method", "rejection_sample_method", "draft_sample_method", "model"):
        value = getattr(config, name)
        if not isinstance(value, str) and not (name in ("method", "model") and value is None):
            raise ConfigError(f"{name}: expected a name, got {shown(value)}")
    rule, sampling = config.rejection_sample_method, config.draft_sample_method
    set_field(config, "rejection_sample_method", _RULE_ALIASES.get(rule, rule))
    set_field(config, "draft_sample_method", _DRAFT_ALIASES.get(sampling, sampling))


def _settle_formats(config: SpeculativeConfig) -> None:
    """Replace the formats of the draft's weights and cache by their own names."""
    set_field(config, "draft_quantize", settled_quantize("draft_quantize", config.draft_quantize))
    if config.draft_kv_cache_dtype is not None:
        name = "draft_kv_cache_dtype"
        set_field(config, name, settled_kv_cache_dtype(name, config.draft_kv_cache_dtype))


def _settle_list(
    config: SpeculativeConfig, name: str, is_right: Callable[[object], bool], kind: str
) -> None:
    """Make a tuple of a list whose members are right; ConfigError for anything else but none."""
    value = getattr(config, name)
    if value is None:
        return
    if not (isinstance(value, list | tuple) and all(map(is_right, value))):
        raise ConfigError(f"{name}: expected a list of {kind}, got {shown(value)}")
    for number in value:
        check_int32(name, number)
    set_field(config, name, tuple(value))


def _check_number(K: int | None) -> None:
    if K is not None:
        check_positive_int("num_speculative_tokens", K)


def _settled_schedule(config: SpeculativeConfig) -> tuple[tuple[int, int, int], ...]:
    """Return the ranges of batch sizes in order; ConfigError for what is no schedule."""
    given, K = config.num_speculative_tokens_per_batch_size, config.num_speculative_tokens
    if not isinstance(given, list | tuple) or not all(
        isinstance(r, list | tuple)
        and len(r) == 3
        and all(map(is_int, r))
        and 1 <= r[0] <= r[1]
        and r[2] >= 0
        and (K is None or r[2] <= K)
        for r in given
    ):
        raise ConfigError(
            "num_speculative_tokens_per_batch_size: expected a list of (first, last, K) with "
            f"1 <= first <= last and K from 0 to num_speculative_tokens"
            f"{'' if K is None else f' {K}'}, got {shown(given)}"
        )
    for number in (number for r in given for number in r):
        check_int32("num_speculative_tokens_per_batch_size", number)
    ranges = tuple(sorted((int(r[0]), int(r[1]), int(r[2])) for r in given))
    if any(before[1] >= after[0] for before, after in pairwise(ranges)):
        raise ConfigError(
            "num_speculative_tokens_per_batch_size: expected ranges that do not overlap, "
            f"got {shown(given)}"
        )
    return ranges


def _check_choice_of_drafts(config: SpeculativeConfig) -> None:
    """Raise ConfigError for a choice of drafts by acceptance that has no meaning."""
    if not isinstance(config.adaptive, bool):
        raise ConfigError(f"adaptive: expected true or false, got {shown(config.adaptive)}")
    draft_methods.check_fallback(config.fallback_method, config.method)
    for name in ("adaptive", "fallback_method"):
        if getattr(config, name) and config.num_speculative_tokens_per_batch_size:
            raise ConfigError(
                f"{name}: expected it without num_speculative_tokens_per_batch_size, "
                f"got {shown(config.num_speculative_tokens_per_batch_size)} beside it"
            )


def _check_verify_pass(config: SpeculativeConfig) -> None:
    """Raise ConfigError for a verify pass that a request with all of its drafts does not fit."""
    most, least = config.max_num_verify_tokens, (config.num_speculative_tokens or 1) + 1
    if most is not None and (not is_int(most) or most < least):
        raise ConfigError(
            f"max_num_verify_tokens: expected an integer of at least {least} "
            f"(num_speculative_tokens + 1) or none, got {shown(most)}"
        )
    check_int32("max_num_verify_tokens", most)


def _check_rule(config: SpeculativeConfig) -> None:
    for name, known in (
        ("rejection_sample_method", get_args(RejectionRule)),
        ("draft_sample_method", get_args(DraftSampling)),
    ):
        if getattr(config, name) not in known:
            raise ConfigError(
                f"{name}: expected one of {', '.join(known)}, got {shown(getattr(config, name))}"
            )


def _check_synthetic(config: SpeculativeConfig) -> None:
    """Raise ConfigError unless the synthetic rule, and no other, has one statement of its rates."""
    for name in ("synthetic_acceptance_length", "synthetic_acceptance_rate"):
        if getattr(config, name) is not None and not is_number(getattr(config, name)):
            raise ConfigError(f"{name}: expected a number, got {shown(getattr(config, name))}")
    given = [
        n
        for n in ("rates", "length", "rate")
        if getattr(config, f"synthetic_acceptance_{n}") is not None
    ]
    if (config.rejection_sample_method == "synthetic") != (len(given) == 1) or len(given) > 1:
        raise ConfigError(
            "synthetic_acceptance_rates, _length or _rate: expected exactly one with "
            "rejection_sample_method 'synthetic' and none with another method, "
            f"got {given or 'none'} with {config.rejection_sample_method!r}"
        )
