"""What one request may ask for is bounded, and refused at once in one sentence."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest

from jaxspec import ConfigError, SamplingParams
from jaxspec.sampling import limits

TOO_MUCH: list[tuple[Mapping[str, Any], str]] = [
    ({"n": 10**6}, "n: expected an integer from 1 to 1024, got 1000000"),
    ({"stop_token_ids": range(129)}, "stop_token_ids: expected at most 128 ids, got 129"),
    ({"stop": ["a"] * 129}, "stop: expected at most 128 strings, got 129"),
    ({"stop": "a" * 1025}, "stop: expected strings of at most 1024 characters, got one of 1025"),
    ({"bad_words": ["a"] * 1025}, "bad_words: expected at most 1024 strings, got 1025"),
    (
        {"bad_words": ["a", "b" * 2000]},
        "bad_words: expected strings of at most 1024 characters, got one of 2000",
    ),
    (
        {"bad_words_token_ids": [range(4000), *[[1]] * 20000]},
        "bad_words: expected at most 4096 tokens of all words together, got 24000",
    ),
]
ENOUGH: list[Mapping[str, Any]] = [
    {"n": limits.MAX_N},
    {"stop_token_ids": range(128)},
    {"stop": ["a" * 1024] * 128},
    {"bad_words": ["a"] * 1024},
    {"bad_words_token_ids": [range(4000), *[[1]] * 96]},
]


@pytest.mark.parametrize(("fields", "message"), TOO_MUCH, ids=lambda x: str(x)[:30])
def test_more_than_a_limit_is_refused(fields: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as e:
        SamplingParams(**fields)
    assert str(e.value) == message


@pytest.mark.parametrize("fields", ENOUGH, ids=lambda x: str(x)[:30])
def test_a_limit_itself_is_allowed(fields: Mapping[str, Any]) -> None:
    SamplingParams(**fields).check_vocabulary(5000, ())


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [1] * 51},
        {"banned_token_ids": [1] * 51},
    ],
)
def test_a_list_longer_than_the_vocabulary_is_refused(fields: Mapping[str, Any]) -> None:
    with pytest.raises(ConfigError) as e:
        SamplingParams(**fields).check_vocabulary(50, ())
    assert str(e.value) == (
        f"{next(iter(fields))}: expected at most 50 token ids, the size of the vocabulary, got 51"
    )


def test_words_that_could_forbid_everything_are_checked_in_no_time() -> None:
    """2,048 words over a small vocabulary: each is a text after which others may forbid all."""
    words = [[a, b] for a in range(50) for b in range(40)]
    params = SamplingParams(allowed_token_ids=range(50), bad_words_token_ids=words)
    begin = time.perf_counter()
    params.check_vocabulary(60, ())
    assert time.perf_counter() - begin < 1
