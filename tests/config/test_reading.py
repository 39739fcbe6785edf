"""ConfigError is one line, whatever it quotes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from jaxspec.config import ConfigError, reading


@pytest.mark.parametrize("quoted", ["two\nlines", "a\r\nb", "c\u2028d", "e\x0bf"])
def test_a_quoted_line_break_does_not_break_the_sentence(quoted: str) -> None:
    error = ConfigError(f"expected a name, got {quoted}")
    assert len(str(error).splitlines()) == 1 and str(error).startswith("expected a name, got ")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_two_blanks_of_a_value_stay() -> None:
    assert str(ConfigError("got 'a  b'")) == "got 'a  b'"


def test_a_long_value_is_cut() -> None:
    message = str(ConfigError("expected a name, got " + "x" * 10**6))
    assert len(message) == ConfigError.LONGEST and message.endswith("x...")


@pytest.mark.parametrize("kind", [list, tuple, iter])
def test_a_list_has_a_largest_size(
    kind: Callable[[range], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "MOST_ITEMS", 3)
    assert reading.items_of(kind(range(3))) == [0, 1, 2]
    assert reading.items_of(kind(range(4))) is None
