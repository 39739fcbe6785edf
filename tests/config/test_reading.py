"""ConfigError is one line, whatever it quotes."""

from __future__ import annotations

import pickle

import pytest

from jaxspec.config import ConfigError


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
