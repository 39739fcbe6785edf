"""Limits of a chat template, which comes with a checkpoint and runs in this process.

jinja2's sandbox keeps a template from anything but computing. It may still loop for hours, or
double a text until the memory is full.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jinja2 import Environment, TemplateSyntaxError
from jinja2.nodes import Pow
from jinja2.utils import Namespace

MOST_SECONDS = 2.0  # of the processor's time, where a chat of a hundred messages takes 0.005
MOST_CHARACTERS = 1 << 24  # of the text and of each string; items of each list
MOST_BITS = 1 << 16  # of a number
LOOK_EVERY = 4  # lines, between which a value can grow
TEMPLATE_FILE = "<template>"  # the file of the code that jinja2 makes of a template


class TemplateLimitError(Exception):
    """A template that takes too long or makes too much."""


@contextlib.contextmanager
def limited_template(template: str) -> Iterator[None]:
    """Stop the template's rendering in this block, in this thread, by TemplateLimitError.

    It watches the lines of templates as a debugger does. The debugger's own watch is set aside.
    """
    if _has_powers(template):
        # One operation can take hours, and nothing can stop it.
        raise TemplateLimitError("the operator **")
    before = sys.gettrace()
    sys.settrace(_Watch().enter)
    try:
        yield
    finally:
        sys.settrace(before)


class _Watch:
    """A trace function, and what it has counted."""

    def __init__(self) -> None:
        self._end = time.thread_time() + MOST_SECONDS
        self._written = self._lines = 0

    def enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self.line if frame.f_code.co_filename == TEMPLATE_FILE else None

    def line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "return" and isinstance(arg, str):  # a piece of the text
            self._written += len(arg)
        self._lines += 1
        if self._lines % LOOK_EVERY:
            return self.line
        if self._written > MOST_CHARACTERS or any(map(_is_large, frame.f_locals.values())):
            raise TemplateLimitError(f"a text of more than {MOST_CHARACTERS} characters")
        if time.thread_time() > self._end:
            raise TemplateLimitError(f"more than {MOST_SECONDS:g} s of computing")
        return self.line


def _is_large(value: object) -> bool:
    if isinstance(value, int):
        return value.bit_length() > MOST_BITS
    if isinstance(value, Namespace):  # whose attributes are the template's
        return any(map(_is_large, getattr(value, "_Namespace__attrs").values()))  # noqa: B009
    return isinstance(value, str | list | dict | tuple) and len(value) > MOST_CHARACTERS


@functools.lru_cache(maxsize=16)
def _has_powers(template: str) -> bool:
    try:
        parsed = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(template)
    except (TemplateSyntaxError, RecursionError):  # transformers says so, or knows more tags
        return "**" in template
    return parsed.find(Pow) is not None
