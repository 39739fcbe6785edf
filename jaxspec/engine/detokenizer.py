"""Tokens to text as they come, and the stop strings that are looked for in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

INCOMPLETE = "\ufffd"  # what tokenizers decode the first bytes of a character to


class Detokenizer:
    """The text of one request, grown token by token.

    decode: ids to text. A token's text is the difference of decoding a few tokens before it with and without it, since a tokenizer
    may write a token otherwise after others (a leading blank, the rest of a character); what ends inside a character waits for the rest.
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
        self._token_ids: list[int] = []
        self._prefix, self._read = (
            0,
            0,
        )  # decoded together: [prefix, read) is out already, [read, end) is new
        self._emitted = self._search_from = 0
        self.text = ""
        self.stopped = False

    def push(self, token: int, *, may_stop: bool = True) -> bool:
        """Add a token; True if a stop string is complete now: the text then ends before it (or with it). may_stop: False while a text is
        shorter than its min_tokens; what it holds by then completes no stop string later."""
        self._token_ids.append(token)
        whole = self._decode(self._token_ids[self._prefix :])
        if whole.endswith(INCOMPLETE):
            return False
        before = len(self.text)
        self.text += whole[len(self._decode(self._token_ids[self._prefix : self._read])) :]
        if (
            len(self.text) > before
        ):  # a special token has no text: what follows it is decoded after the tokens before it
            self._prefix = self._read
        self._read = len(self._token_ids)
        if not may_stop:
            self._search_from = len(self.text)
            return False
        return self._find_stop(max(self._search_from, before - self._longest_stop + 1))

    def _find_stop(self, begin: int) -> bool:
        """The first stop string in the text from begin on, where something new can have completed it."""
        found = [(at, stop) for stop in self._stop if (at := self.text.find(stop, begin)) >= 0]
        if found:
            at, stop = min(found)
            self.text = self.text[: at + len(stop) if self._include_stop else at]
            self.stopped = True
        return bool(found)

    def flush(self) -> None:
        """At the end of a request: a character that was never completed is written as the tokenizer writes it."""
        if not self.stopped and self._read < len(self._token_ids):
            whole = self._decode(self._token_ids[self._prefix :])
            self.text += whole[len(self._decode(self._token_ids[self._prefix : self._read])) :]
            self._read = len(self._token_ids)

    def take(self, *, last: bool) -> str:
        """The text since the last call. Until the request's last, what may turn out to be the start of a stop string is kept back."""
        kept_back = 0 if last or self._longest_stop == 0 else self._longest_stop - 1
        end = max(self._emitted, len(self.text) - kept_back)
        new, self._emitted = self.text[self._emitted : end], end
        return new
