"""Fields of settings that carry a line of help; the scripts make their flags from them."""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar

T = TypeVar("T")


def setting(default: T, help: str) -> T:
    """Return a dataclass field with this default and this line of help in its metadata."""
    return field(default=default, metadata={"help": help})
