"""Text as it comes: pieces put together are the text, stop strings are found wherever tokens cut
them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxspec.engine.detokenizer import Detokenizer

PIECES = ["a", "b", "ab", "ba", "c", "é", "", "aab"]


def take(detokenizer: Detokenizer, *, last: bool) -> str:
    """The new text, which is handed on."""
    text = detokenizer.new_text(last=last)
    detokenizer.num_taken += len(text)
    return text


def decode(ids: list[int]) -> str:
    """A byte tokenizer of the bytes of UTF-8."""
    return bytes(ids).decode(errors="replace")


def joined(ids: list[int]) -> str:
    """A tokenizer that puts blanks between."""
    return " ".join(str(i) for i in ids)


@given(st.text(alphabet="abé\U0001f600", max_size=12))
def test_pieces_put_together_are_the_text_and_no_half_character_shows(text: str) -> None:
    found, pieces = Detokenizer(decode), []
    for byte in text.encode():
        found.push(byte)
        pieces.append(take(found, last=False))
    found.flush()
    pieces.append(take(found, last=True))
    assert "".join(pieces) == found.text == text and "\ufffd" not in "".join(pieces[:-1])


def test_a_character_that_is_never_completed_is_written_at_the_end() -> None:
    found = Detokenizer(decode)
    for byte in "é".encode()[:1]:
        found.push(byte)
    assert found.text == ""
    found.flush()
    assert found.text == "\ufffd"


def test_a_tokens_text_depends_on_the_one_before() -> None:
    found = Detokenizer(joined)
    for i in (1, 22, 3):
        found.push(i)
    assert found.text == "1 22 3"


@given(st.lists(st.sampled_from(["▁a", "▁", "b", "<eos>"]), max_size=8))
def test_a_token_without_text_hides_no_blank(pieces: list[str]) -> None:
    """A tokenizer that, like Llama 2's, writes no blank at the beginning, and no special token."""
    kinds = sorted(set(pieces))

    def decode(ids):
        return (
            "".join(kinds[i] for i in ids).replace("<eos>", "").replace("▁", " ").removeprefix(" ")
        )

    found, ids = Detokenizer(decode), [kinds.index(piece) for piece in pieces]
    for i in ids:
        found.push(i)
    assert found.text == decode(ids)


@given(
    st.lists(st.sampled_from(PIECES), max_size=10),
    st.lists(st.sampled_from(["aa", "ab", "bab", "ca"]), min_size=1, max_size=2),
    st.booleans(),
)
def test_the_first_stop_string_ends_the_text(
    pieces: list[str], stops: list[str], include: bool
) -> None:
    """Against a search in the whole text after every token."""
    found = Detokenizer(lambda ids: "".join(PIECES[i] for i in ids), stops, include_stop=include)
    shown, text = [], ""
    for piece in pieces:
        text += piece
        stopped = found.push(PIECES.index(piece))
        at = min(((text.index(s), s) for s in stops if s in text), default=None)
        assert stopped == (at is not None)
        shown.append(take(found, last=stopped))
        if at is not None:
            assert found.text == text[: at[0] + (len(at[1]) if include else 0)]
            break
    shown.append(take(found, last=True))
    assert "".join(shown) == found.text


def test_a_stop_string_before_min_tokens_does_not_count() -> None:
    found = Detokenizer(lambda ids: "".join("xab"[i] for i in ids), ["ab"])
    assert [found.push(i, may_stop=n > 2) for n, i in enumerate([1, 2, 0, 1, 2])] == [
        False,
        False,
        False,
        False,
        True,
    ]
    assert found.text == "abx"
