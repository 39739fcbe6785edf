"""SamplingParams: how one request is sampled and when it ends, in vLLM's words."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any

from jaxspec.config import (
    ConfigError,
    is_int,
    is_number,
    is_positive_int,
    items_of,
    settle_integers,
    shown,
)
from jaxspec.config.keys import SAMPLING, checks_keywords, own_keys
from jaxspec.config.reading import MAX_INT32, check_int32, check_unicode
from jaxspec.config.settings import setting
from jaxspec.sampling import limits

MAX_LOGPROBS = 20  # alternatives of a token at most; vLLM's default limit
MAX_TEMPERATURE = 3.4e38  # the device's temperatures are float32


@checks_keywords(SAMPLING)
@dataclass(unsafe_hash=True)  # by value: an assignment changes the hash as it changes equality
class SamplingParams:
    """How one request is sampled. The defaults sample from the model's own distribution.

    A field may be assigned, which checks its value and keeps the old one if the new one is wrong.
    Relations between fields are checked when the parameters are made and when a request takes them,
    so assignments may come in any order. A request keeps a copy, which no later assignment changes.

    Applied in this order, that of vLLM's plain sampler, with and without speculation:
    allowed_token_ids: nothing else is generated; None: every token
    banned_token_ids: never generated
    bad_words: words that the text may not contain: a word's last token is forbidden where the text
        (not the prompt) ends with its other tokens. As in vLLM, a word has the tokens of the
        beginning of a text. It also has those after a blank where they are as many and begin with
        another token. Other tokens of the same letters are allowed.
    bad_words_token_ids: the same as lists of token ids
    min_tokens: no end-of-text or stop token before this many tokens (ignore_eos or not)
    logit_bias: token id -> -100 to 100, added to its logit
    repetition_penalty: divides the positive logits, and multiplies the negative ones, of tokens in
        the prompt or the text so far
    frequency_penalty: subtracted from a token's logit for each time that it was generated
    presence_penalty: subtracted from a token's logit once if it was generated
    temperature: divides the logits; 0 is greedy and ignores min_p, top_k, top_p and seed
    min_p: drops tokens less likely than min_p times the likeliest; 0: off
    top_k: keeps this many tokens; 0 or -1: off
    top_p: keeps the fewest tokens whose probabilities reach top_p; 1: off
    seed: the same seed, prompt and parameters give the same text; None: another text each time

    max_tokens: the text's length at most; None: what max_model_len leaves
    ignore_eos: go on after an end-of-text token
    stop_token_ids: more tokens that end the text
    stop: strings that end the text; they are cut off unless include_stop_str_in_output
    logprobs: log-probabilities of each generated token and of this many likeliest alternatives
        (0 to 20; -1: the whole vocabulary), of the model's own logits without processing; None: off
    prompt_logprobs: the same for the prompt's tokens, 0 to 20; None: off
    n: texts for each prompt
    skip_special_tokens: leave special tokens out of the text
    num_speculative_tokens: draft tokens of a round at most, 0 for none; None, or more than the
        engine's K: the engine's K. vLLM has no such parameter.
    """

    temperature: float = setting(1.0, "Divides the logits; 0 is greedy.")
    _: KW_ONLY
    top_k: int = setting(0, "Sample among this many of the likeliest tokens; 0: all.")
    top_p: float = setting(1.0, "Sample within this probability mass.")
    min_p: float = setting(
        0.0, "Sample among tokens at least this likely relative to the likeliest; 0: all."
    )
    repetition_penalty: float = setting(
        1.0, "Above 1: fewer tokens that the prompt or the text has."
    )
    presence_penalty: float = setting(0.0, "Above 0: fewer tokens that the text has.")
    frequency_penalty: float = setting(
        0.0, "Above 0: fewer tokens, the more often the text has them."
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        hash=False,
        metadata={"help": 'Added to the logits, by token id, as JSON: {"42": -1.5}.'},
    )
    allowed_token_ids: Sequence[int] | None = setting(
        None, "Generate only these token ids, with commas between them."
    )
    banned_token_ids: Sequence[int] = setting((), "Never generate these token ids.")
    bad_words: Sequence[str] = setting((), "Never generate this word; may be given several times.")
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    seed: int | None = setting(None, "Seed of the random streams.")
    max_tokens: int | None = setting(16, "At most this many tokens a text.")
    min_tokens: int = setting(0, "No end before this many tokens.")
    ignore_eos: bool = setting(False, "Go on after end-of-text, to max-tokens.")
    stop: str | Sequence[str] = setting(
        (), "A string that ends a text; may be given several times."
    )
    include_stop_str_in_output: bool = setting(False, "Keep that string.")
    stop_token_ids: Sequence[int] = setting((), "Token ids that end a text, beside end-of-text.")
    logprobs: int | None = setting(
        None, "Log-probabilities of each token and of this many of the likeliest; -1: of all."
    )
    prompt_logprobs: int | None = setting(None, "The same for the tokens of the prompt.")
    n: int = setting(1, "Texts a prompt.")
    skip_special_tokens: bool = setting(True, "Leave special tokens out of the text.")
    num_speculative_tokens: int | None = None

    def __post_init__(self) -> None:
        self._settle_fields()
        self._check_relations()

    def _settle_fields(self) -> None:
        """Convert each field to its own type; ConfigError for a value that no other one allows."""
        self._set("stop", _strings("stop", self.stop))
        limits.check_strings("stop", self.stop, limits.MAX_STOP_STRINGS)
        for name in ("banned_token_ids", "stop_token_ids"):
            self._set(name, _token_ids(name, getattr(self, name)))
        limits.check_count("stop_token_ids", self.stop_token_ids, limits.MAX_STOP_TOKEN_IDS, "ids")
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
        self._set("bad_words", _words(self.bad_words))
        limits.check_strings("bad_words", self.bad_words, limits.MAX_BAD_WORDS)
        self._set("bad_words_token_ids", _words_token_ids(self.bad_words_token_ids))
        limits.check_bad_word_tokens(self.bad_words_token_ids)
        self._set("logit_bias", _biases(self.logit_bias))
        self._check_numbers()
        self._check_counts()
        settle_integers(self)

    def _check_relations(self) -> None:
        """Raise ConfigError for fields that exclude each other."""
        allowed = self.allowed_token_ids
        if allowed is not None and not set(allowed) - set(self.banned_token_ids):
            raise ConfigError(
                f"allowed_token_ids: expected at least one id that is not banned, got {allowed}"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens: expected an integer from 0 to max_tokens {self.max_tokens}, "
                f"got {self.min_tokens}"
            )
        if self.greedy and self.n > 1:
            raise ConfigError(
                "n: expected 1 with temperature 0, whose texts would all be the same, "
                f"got {self.n!r}"
            )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            own_keys("SamplingParams", {name: value}, [f.name for f in fields(self)], SAMPLING)
        elif name in self.__dict__:  # else __init__ sets it, and __post_init__ checks all
            changed = copy.copy(self)
            changed._set(name, value)
            changed._settle_fields()
            value = getattr(changed, name)
        self._set(name, value)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def checked_copy(self) -> SamplingParams:
        """Return a copy that no assignment to these parameters changes.

        ConfigError for fields that exclude each other.
        """
        copied = copy.copy(self)
        # Each other field was checked when it was set, and holds nothing that can change.
        copied._set("logit_bias", _biases(self.logit_bias))
        copied._check_relations()
        return copied

    def clone(self) -> SamplingParams:
        """Return a copy that shares nothing with these parameters that can change."""
        return copy.deepcopy(self)

    def _check_numbers(self) -> None:
        if not is_number(self.temperature) or self.temperature < 0:
            raise ConfigError(
                f"temperature: expected a number of at least 0, got {shown(self.temperature)}"
            )
        if 0 < self.temperature < 1e-5:
            raise ConfigError(
                f"temperature: expected 0 (greedy) or at least 1e-5, got {self.temperature!r}"
            )
        if self.temperature > MAX_TEMPERATURE:
            raise ConfigError(
                f"temperature: expected at most {MAX_TEMPERATURE:g}, got {shown(self.temperature)}"
            )
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p: expected a number in (0, 1], got {shown(self.top_p)}")
        # The lower end keeps float32 from dividing by 0.
        for name, low, high in (
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -2, 2),
            ("frequency_penalty", -2, 2),
        ):
            value = getattr(self, name)
            if not is_number(value) or not low <= value <= high:
                raise ConfigError(
                    f"{name}: expected a number from {low} to {high}, got {shown(value)}"
                )

    def _check_counts(self) -> None:
        if not is_int(self.top_k) or not -1 <= self.top_k <= MAX_INT32:
            raise ConfigError(
                "top_k: expected an integer from 0 to 2**31 - 1 (0 or -1: off), "
                f"got {shown(self.top_k)}"
            )
        if self.seed is not None and (not is_int(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise ConfigError(f"seed: expected a 64-bit integer or None, got {shown(self.seed)}")
        most = self.max_tokens
        if most is not None and not is_positive_int(most):
            raise ConfigError(
                f"max_tokens: expected an integer of at least 1 or None, got {shown(most)}"
            )
        if most is not None and most > MAX_INT32:
            raise ConfigError(
                f"max_tokens: expected at most 2**31 - 1 (None: no limit), got {shown(most)}"
            )
        if not is_int(self.min_tokens) or self.min_tokens < 0:
            raise ConfigError(
                f"min_tokens: expected an integer of at least 0, got {shown(self.min_tokens)}"
            )
        check_int32("min_tokens", self.min_tokens)
        for name, least, wanted in (("logprobs", -1, ", -1 for all"), ("prompt_logprobs", 0, "")):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or not least <= value <= MAX_LOGPROBS):
                raise ConfigError(
                    f"{name}: expected an integer from 0 to {MAX_LOGPROBS}{wanted} or None, "
                    f"got {shown(value)}"
                )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(
                    f"{name}: expected true or false, got {shown(getattr(self, name))}"
                )
        if not is_int(self.n) or not 1 <= self.n <= limits.MAX_N:
            raise ConfigError(
                f"n: expected an integer from 1 to {limits.MAX_N}, got {shown(self.n)}"
            )
        most = self.num_speculative_tokens
        if most is not None and (not is_int(most) or most < 0):
            raise ConfigError(
                "num_speculative_tokens: expected an integer of at least 0 or None, "
                f"got {shown(most)}"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocabulary(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Raise ConfigError for ids outside the vocabulary, or if no token could be generated."""
        words = self.bad_words_token_ids
        listed = {
            name: getattr(self, name) or ()
            for name in ("allowed_token_ids", "banned_token_ids", "logit_bias", "stop_token_ids")
        }
        limits.check_sizes(listed, vocab_size)
        for name, ids in (
            listed | {"bad_words_token_ids": [t for word in words for t in word]}
        ).items():
            wrong = [t for t in ids if t >= vocab_size]
            if wrong:
                raise ConfigError(
                    f"{name}: expected token ids in 0..{vocab_size - 1}, got {wrong[0]}"
                )
        ends = {*eos_token_ids, *self.stop_token_ids}
        num_allowed = (
            vocab_size if self.allowed_token_ids is None else len(set(self.allowed_token_ids))
        )
        if num_allowed > len(self.banned_token_ids) + len(words) + len(ends):
            return
        left = set(
            range(vocab_size) if self.allowed_token_ids is None else self.allowed_token_ids
        ) - set(self.banned_token_ids)
        if not left:
            raise ConfigError(
                f"banned_token_ids: expected fewer than the vocabulary's {vocab_size}, "
                "got all of them"
            )
        going_on = left - ends if self.min_tokens else left
        if not going_on:
            raise ConfigError(
                "min_tokens: expected 0, since allowed_token_ids and banned_token_ids leave "
                "end-of-text and stop tokens only, "
                f"got {self.min_tokens}"
            )
        for tokens in (left, going_on):
            text = _dead_end(words, tokens)
            if text is not None:
                raise ConfigError(
                    "bad_words: expected some token to be left after any text, "
                    f"got none after token ids {list(text)}"
                )


def check_end_ids(eos_token_ids: Collection[int], vocab_size: int) -> None:
    """Raise ConfigError for an end-of-text id that is no id of the vocabulary."""
    for token in eos_token_ids:
        if not is_int(token) or not 0 <= token < vocab_size:
            raise ConfigError(
                f"eos_token_id: expected token ids in 0..{vocab_size - 1}, the target's "
                f"vocabulary, got {shown(token)}"
            )


def end_token_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> tuple[int, ...]:
    """Return the tokens that end a text, sorted: these end-of-text ids and the request's own."""
    return tuple(sorted({*eos_token_ids, *params.stop_token_ids}))


def most_end_token_ids(eos_token_ids: Collection[int]) -> int:
    """Return how many tokens may end a text at most: these end-of-text ids, and a request's own."""
    return len(eos_token_ids) + limits.MAX_STOP_TOKEN_IDS


def _items(name: str, wanted: str, value: Any) -> tuple[Any, ...]:
    """Return the items of a list, none for None; ConfigError with what is wanted for no list."""
    try:
        items = [] if value is None else items_of(value)
    except ConfigError as e:
        raise ConfigError(f"{name}: {e}") from e.__cause__
    if items is None:
        raise ConfigError(f"{name}: expected {wanted}, got {shown(value)}")
    return tuple(items)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    wanted = "a string or a list of strings, none of them empty"
    listed = (value,) if isinstance(value, str) else _items(name, wanted, value)
    if not all(isinstance(s, str) and s for s in listed):
        raise ConfigError(f"{name}: expected {wanted}, got {shown(value)}")
    for text in listed:
        check_unicode(text, name)
    return listed


def _words(value: Any) -> tuple[str, ...]:
    wanted = "a list of strings, none of them blank"
    listed = _items("bad_words", wanted, value)
    if not all(isinstance(s, str) and s.strip() for s in listed):
        raise ConfigError(f"bad_words: expected {wanted}, got {shown(value)}")
    return listed


def _words_token_ids(value: Any) -> tuple[tuple[int, ...], ...]:
    name, wanted = "bad_words_token_ids", "lists of token ids, none of them empty"
    words = tuple(_token_ids(name, word) for word in _items(name, wanted, value))
    if not all(words):
        raise ConfigError(f"{name}: expected {wanted}, got {shown(value)}")
    return words


def _dead_end(words: Sequence[Sequence[int]], left: set[int]) -> Sequence[int] | None:
    """Return a text of tokens in `left` after which these words forbid all of `left`, or None.

    Only beginnings of words are tried: a text that ends with the beginnings of several words ends
    with the longest of them, which ends with the others.
    """
    if not left <= {word[-1] for word in words}:
        return None
    forbidden_after: dict[tuple[int, ...], set[int]] = {}
    for *begun, last in words:
        forbidden_after.setdefault(tuple(begun), set()).add(last)
    for text in filter(left.issuperset, forbidden_after):
        ends = (text[start:] for start in range(len(text) + 1))
        if left <= set().union(*(forbidden_after.get(end, ()) for end in ends)):
            return text
    return None


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    listed = _items(name, "a list of token ids", value)
    if not all(is_int(t) and 0 <= t <= MAX_INT32 for t in listed):
        raise ConfigError(f"{name}: expected token ids from 0 to 2**31 - 1, got {shown(value)}")
    return tuple(int(t) for t in listed)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping | None):
        raise ConfigError(f"logit_bias: expected numbers by token id, got {shown(value)}")
    biases = dict(value or {})
    for token, bias in biases.items():
        if not is_int(token) or not 0 <= token <= MAX_INT32:
            raise ConfigError(
                f"logit_bias: expected token ids from 0 to 2**31 - 1, got {shown(token)}"
            )
        if not is_number(bias) or not -100 <= bias <= 100:
            raise ConfigError(
                "logit_bias: expected numbers from -100 to 100, "
                f"got {shown(bias)} for token {token}"
            )
    return biases
