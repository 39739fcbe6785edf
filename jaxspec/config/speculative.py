"""SpeculativeConfig: the draft, and how its tokens are verified."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from os import PathLike, fspath
from typing import Any, Literal, get_args

from jaxspec.config.attention import AttentionKind, CompressedAttentionConfig
from jaxspec.config.cache_dtype import KVCacheDtype, check_kv_cache_dtype
from jaxspec.config.keys import SPECULATIVE, checks_keywords, own_keys
from jaxspec.config.quantization import Quantize, check_quantize
from jaxspec.config.reading import ConfigError, is_int, is_number, settle_integers, shown
from jaxspec.config.settings import setting

RejectionRule = Literal["strict", "probabilistic", "block", "synthetic"]
DraftSampling = Literal["greedy", "probabilistic"]
_RULE_ALIASES = {"standard": "probabilistic"}  # vLLM's later name
_DRAFT_ALIASES = {"gumbel": "probabilistic"}
# vLLM names the module of multi-token prediction after its model too: deepseek_mtp, mimo_mtp.
_MTP_SUFFIX = "_mtp"
# The options that some methods alone read, by method.
_LAYERED = ("draft_kv_cache_dtype", "draft_tensor_parallel_size")
_HEAD = ("draft_quantize", *_LAYERED)
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "eagle": _HEAD,
    "eagle3": (
        *_HEAD,
        "eagle_aux_hidden_state_layer_ids",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
    ),
    "dflash": _LAYERED,
    "dspark": (*_LAYERED, "draft_confidence_threshold"),
    "mtp": (*_HEAD, "mtp_zero_first_embedding"),
    "draft_model": _HEAD,
    "ngram": ("prompt_lookup_max", "prompt_lookup_min"),
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
}
DEFAULT_K = 3  # of a round, if neither the caller nor the head names a number
_NGRAM_MODELS = ("ngram", "[ngram]")  # models of vLLM's that mean the method


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
        it.
    num_speculative_tokens_per_batch_size: (first, last, K) for batches of first to last running
        requests, K from 0 to num_speculative_tokens, which other batch sizes keep. The text of a
        sampled request then depends on the number of its neighbours.
    adaptive: each request has 1 to num_speculative_tokens drafts a round, as many as its acceptance
        so far makes worthwhile.
    draft_max_model_len: the longest context, in tokens, that is drafted for; longer requests
        continue without drafts.
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
    draft_kv_cache_dtype: of the draft's keys and values, as EngineConfig's kv_cache_dtype, which
        None takes.
    suffix_decoding_max_tree_depth: with "suffix", the longest run of last tokens that is matched.
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
    draft_max_model_len: int | None = None
    max_num_verify_tokens: int | None = setting(
        None, "Tokens that the target verifies in a round, at most. [default: K + 1 a request]"
    )
    draft_confidence_threshold: float | None = None
    mtp_zero_first_embedding: bool | None = None
    draft_quantize: Quantize | None = setting(
        None, "Quantise the draft's plain weights while they load: fp8, fp8-block or int4."
    )
    draft_kv_cache_dtype: KVCacheDtype | None = setting(
        None, "Dtype of the draft's keys and values. [default: the target's]"
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
        def set_field(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if isinstance(self.model, PathLike):
            set_field("model", fspath(self.model))
        for name in ("method", "rejection_sample_method", "draft_sample_method", "model"):
            value = getattr(self, name)
            if not isinstance(value, str) and not (name in ("method", "model") and value is None):
                raise ConfigError(f"{name}: expected a name, got {shown(value)}")
        check_quantize("draft_quantize", self.draft_quantize)
        if self.draft_kv_cache_dtype is not None:
            check_kv_cache_dtype("draft_kv_cache_dtype", self.draft_kv_cache_dtype)
        if self.method in (None, "ngram") and self.model in _NGRAM_MODELS:
            set_field("method", "ngram")
            set_field("model", None)
        if self.method is not None and self.method.endswith(_MTP_SUFFIX):
            set_field("method", "mtp")
        for name in (
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "mtp_zero_first_embedding",
        ):
            if not isinstance(getattr(self, name), bool | None):
                raise ConfigError(
                    f"{name}: expected true, false or none, got {getattr(self, name)!r}"
                )
        for name, is_right in (
            ("synthetic_acceptance_rates", is_number),
            ("eagle_aux_hidden_state_layer_ids", is_int),
        ):
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, list | tuple) and all(map(is_right, value))
            ):
                kind = "numbers" if is_right is is_number else "integers"
                raise ConfigError(f"{name}: expected a list of {kind}, got {value!r}")
        set_field(
            "rejection_sample_method",
            _RULE_ALIASES.get(self.rejection_sample_method, self.rejection_sample_method),
        )
        set_field(
            "draft_sample_method",
            _DRAFT_ALIASES.get(self.draft_sample_method, self.draft_sample_method),
        )
        for name in ("synthetic_acceptance_rates", "eagle_aux_hidden_state_layer_ids"):
            if getattr(self, name) is not None:
                set_field(name, tuple(getattr(self, name)))
        K = self.num_speculative_tokens
        if K is not None and (not is_int(K) or K < 1):
            raise ConfigError(
                f"num_speculative_tokens: expected an integer of at least 1, got {K!r}"
            )
        set_field("num_speculative_tokens_per_batch_size", self._read_schedule())
        if not isinstance(self.adaptive, bool):
            raise ConfigError(f"adaptive: expected true or false, got {shown(self.adaptive)}")
        if self.adaptive and self.num_speculative_tokens_per_batch_size:
            raise ConfigError(
                "adaptive: expected it without num_speculative_tokens_per_batch_size, "
                f"got {self.num_speculative_tokens_per_batch_size!r} beside it"
            )
        if self.draft_max_model_len is not None and (
            not is_int(self.draft_max_model_len) or self.draft_max_model_len < 1
        ):
            raise ConfigError(
                "draft_max_model_len: expected an integer of at least 1 or none, "
                f"got {self.draft_max_model_len!r}"
            )
        most, least = self.max_num_verify_tokens, (K or 1) + 1
        if most is not None and (not is_int(most) or most < least):
            raise ConfigError(
                f"max_num_verify_tokens: expected an integer of at least {least} "
                f"(num_speculative_tokens + 1) or none, got {shown(most)}"
            )
        chance = self.draft_confidence_threshold
        if chance is not None and not (is_number(chance) and 0 < chance <= 1):
            raise ConfigError(
                "draft_confidence_threshold: expected a number above 0 and at most 1, or none, "
                f"got {shown(chance)}"
            )
        size = self.draft_tensor_parallel_size
        if size is not None and (not is_int(size) or size < 1):
            raise ConfigError(
                "draft_tensor_parallel_size: expected an integer of at least 1 or none, "
                f"got {size!r}"
            )
        longest, shortest = self.prompt_lookup_max, self.prompt_lookup_min
        if not (is_int(longest) and is_int(shortest) and 1 <= shortest <= longest):
            raise ConfigError(
                "prompt_lookup_min, prompt_lookup_max: expected integers with 1 <= min <= max, "
                f"got {shortest!r} and {longest!r}"
            )
        depth = self.suffix_decoding_max_tree_depth
        if not is_int(depth) or depth < 1:
            raise ConfigError(
                "suffix_decoding_max_tree_depth: expected an integer of at least 1, "
                f"got {shown(depth)}"
            )
        factor, least = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if not (is_number(factor) and factor > 0):
            raise ConfigError(
                f"suffix_decoding_max_spec_factor: expected a number above 0, got {shown(factor)}"
            )
        if not (is_number(least) and 0 <= least <= 1):
            raise ConfigError(
                f"suffix_decoding_min_token_prob: expected a number from 0 to 1, got {shown(least)}"
            )
        settle_integers(self)
        if self.rejection_sample_method not in get_args(RejectionRule):
            raise ConfigError(
                f"rejection_sample_method: expected one of {', '.join(get_args(RejectionRule))}, "
                f"got {self.rejection_sample_method!r}"
            )
        if self.draft_sample_method not in get_args(DraftSampling):
            raise ConfigError(
                f"draft_sample_method: expected one of {', '.join(get_args(DraftSampling))}, "
                f"got {self.draft_sample_method!r}"
            )
        for name in ("synthetic_acceptance_length", "synthetic_acceptance_rate"):
            if getattr(self, name) is not None and not is_number(getattr(self, name)):
                raise ConfigError(f"{name}: expected a number, got {getattr(self, name)!r}")
        given = [
            n
            for n in ("rates", "length", "rate")
            if getattr(self, f"synthetic_acceptance_{n}") is not None
        ]
        if (self.rejection_sample_method == "synthetic") != (len(given) == 1) or len(given) > 1:
            raise ConfigError(
                "synthetic_acceptance_rates, _length or _rate: expected exactly one with "
                "rejection_sample_method 'synthetic' and none with another method, "
                f"got {given or 'none'} with {self.rejection_sample_method!r}"
            )

    def _read_schedule(self) -> tuple[tuple[int, int, int], ...]:
        given, K = self.num_speculative_tokens_per_batch_size, self.num_speculative_tokens
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
                f"{'' if K is None else f' {K}'}, got {given!r}"
            )
        ranges = tuple(sorted((int(r[0]), int(r[1]), int(r[2])) for r in given))
        if any(before[1] >= after[0] for before, after in pairwise(ranges)):
            raise ConfigError(
                "num_speculative_tokens_per_batch_size: expected ranges that do not overlap, "
                f"got {given!r}"
            )
        return ranges

    @property
    def max_drafts(self) -> int:
        """K: num_speculative_tokens, or DEFAULT_K."""
        return self.num_speculative_tokens or DEFAULT_K

    def num_drafts(self, batch_size: int) -> int:
        """Return K for so many running requests."""
        schedule = self.num_speculative_tokens_per_batch_size
        return next(
            (K for first, last, K in schedule if first <= batch_size <= last),
            self.max_drafts,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Read the JSON of vLLM's --speculative-config; ConfigError for an unknown key."""
        known = sorted(f.name for f in fields(cls))
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
    if most <= speculative.max_drafts:  # where K was left open
        raise ConfigError(
            f"max_num_verify_tokens: expected at least {speculative.max_drafts + 1} "
            f"(num_speculative_tokens + 1), got {most}"
        )
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
    harmless = {f.name: {f.default} for f in fields(SpeculativeConfig)}
    harmless["draft_tensor_parallel_size"].add(1)
    for key in dict.fromkeys(key for keys in OPTIONS.values() for key in keys):
        if key in OPTIONS[method] or getattr(speculative, key) in harmless[key]:
            continue
        if key == "draft_confidence_threshold":
            owners = "a draft that has a confidence head"
        else:
            owners = "method " + " or ".join(repr(m) for m, keys in OPTIONS.items() if key in keys)
        raise ConfigError(f"{key}: expected it only with {owners}, got it with {method!r}")
