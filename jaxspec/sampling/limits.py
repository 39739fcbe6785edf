"""How much one request may ask for, so that none slows or fills the engine for the others.

vLLM limits these lists too. allowed_token_ids, banned_token_ids and logit_bias become one number
for each token of the vocabulary, whose size is their limit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from jaxspec.config import ConfigError

MAX_N = 1024  # texts for each prompt
MAX_STOP_TOKEN_IDS = 128
MAX_STOP_STRINGS = 128
MAX_BAD_WORDS = 1024
MAX_STRING = 1024  # characters of one stop string, or of one bad word
MAX_BAD_WORD_TOKENS = 4096  # of all words together, with their forms after a blank


def check_count(name: str, items: Collection[object], most: int, kind: str) -> None:
    """Raise ConfigError for more than `most` items of this kind."""
    if len(items) > most:
        raise ConfigError(f"{name}: expected at most {most} {kind}, got {len(items)}")


def check_strings(name: str, strings: Sequence[str], most: int) -> None:
    """Raise ConfigError for more than `most` strings, or for one that is too long."""
    check_count(name, strings, most, "strings")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STRING:
        raise ConfigError(
            f"{name}: expected strings of at most {MAX_STRING} characters, got one of {longest}"
        )


def check_bad_word_tokens(words: Sequence[Sequence[int]]) -> None:
    """Raise ConfigError for bad words that have too many tokens together."""
    total = sum(map(len, words))
    if total > MAX_BAD_WORD_TOKENS:
        raise ConfigError(
            f"bad_words: expected at most {MAX_BAD_WORD_TOKENS} tokens of all words together, "
            f"got {total}"
        )


def check_sizes(lists: Mapping[str, Collection[int]], vocab_size: int) -> None:
    """Raise ConfigError for a list with more token ids than the vocabulary."""
    for name, ids in lists.items():
        check_count(name, ids, vocab_size, "token ids, the size of the vocabulary")
