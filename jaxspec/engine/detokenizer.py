"""Tokens to text as they come, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what tokenizers decode the first bytes of a character to


class Detokenizer:
    """The text of one request, which grows token by token.

    A token's text is the difference of decoding a few tokens before it with and without it: a
    tokenizer may write a token differently after others (a leading blank, the rest of a character).
    Text that ends inside a character waits for the rest of it.

    tokenizers' DecodeStream is no replacement: it never gives the text of bytes that make no
    character, and needs a tokenizer of that library, where any object with `decode` does here.

    decode: ids to text
    stop: strings that end the text
    include_stop: whether the text keeps the stop string
    num_taken: characters of the text that were handed on
    stop_string: the one that ended the text
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        stop: Sequence[str] = (),
        *,
        include_stop: bool = False,
    ) -> None:
        self._decode, self._stop, self._include_stop = decode, tuple(stop), include_stop
        self._longest_stop = max(map(len, self._stop), default=0)
        self.num_taken = 0
        self.rewind(())

    def rewind(self, token_ids: Sequence[int], *, min_tokens: int = 0) -> None:
        """Make the text of these tokens anew; num_taken stays.

        min_tokens: no stop string is looked for in the text of so many tokens.
        """
        self._token_ids: list[int] = []
        # Decoded together: [prefix, read) is in the text already, [read, end) is new.
        self._prefix, self._read = 0, 0
        self._search_from = 0
        self.text = ""
        self.stop_string: str | None = None
        for count, token in enumerate(token_ids, start=1):
            self.push(token, may_stop=count > min_tokens)

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token, and return whether it completes a stop string.

        The text then ends before the stop string (or with it). may_stop: False while the text is
        shorter than its min_tokens; text of that time is never part of a stop string.
        """
        self._token_ids.append(token)
        whole = self._decode(self._token_ids[self._prefix :])
        if whole.endswith(INCOMPLETE):
            return False
        before = len(self.text)
        self.text += whole[len(self._decode(self._token_ids[self._prefix : self._read])) :]
        if len(self.text) > before:
            # A special token has no text: its successor is decoded after the tokens before it.
            self._prefix = self._read
        self._read = len(self._token_ids)
        if not may_stop:
            self._search_from = len(self.text)
            return False
        return self._find_stop(max(self._search_from, before - self._longest_stop + 1))

    def _find_stop(self, begin: int) -> bool:
        """Cut the text at its first stop string from `begin` on; return whether there is one.

        No new text can complete a stop string that starts before `begin`.
        """
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) if self._include_stop else at]
            self.stop_string = stop
        return bool(found)

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop_string is not None

    def flush(self) -> None:
        """Add the text that waits for the rest of a character, as the request ends."""
        if not self.stopped and self._read < len(self._token_ids):
            whole = self._decode(self._token_ids[self._prefix :])
            self.text += whole[len(self._decode(self._token_ids[self._prefix : self._read])) :]
            self._read = len(self._token_ids)

    def new_text(self, *, last: bool) -> str:
        """Return the text after the first num_taken characters.

        Until the request's end, text that may be the start of a stop string is kept back.
        """
        kept_back = 0 if last or self._longest_stop == 0 else self._longest_stop - 1
        return self.text[self.num_taken : max(self.num_taken, len(self.text) - kept_back)]
