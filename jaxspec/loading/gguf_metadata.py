"""The metadata of a GGUF file: values by key, each of a type that is checked when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.reading import MAX_INT32, is_number

# An array of strings is a list, an array of numbers or booleans is a view of the file.
Value = int | float | bool | str | list[str] | np.ndarray
Kind = TypeVar("Kind", int, float, bool, str, list[str], np.ndarray)
KINDS = {
    int: "an integer",
    float: "a number",
    bool: "a boolean",
    str: "a string",
    list: "an array of strings",
    np.ndarray: "an array of numbers",
}


@dataclass(frozen=True)
class Metadata:
    """Metadata of a GGUF file.

    values: by key, as the file's types say.
    source: the file, for messages.
    """

    values: Mapping[str, Value]
    source: str

    def read(self, key: str, kind: type[Kind]) -> Kind | None:
        """Return a value, or None if the key is absent; ConfigError if it has another type."""
        value = self.values.get(key)
        if value is None:
            return None
        name = getattr(kind, "__origin__", kind)  # list, of list[str]
        if name is float and isinstance(value, (int, float)) and is_number(value):
            with np.errstate(over="ignore"):  # of a float64: infinity, which `positive` refuses
                # A float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06.
                return float(str(np.float32(value)))  # pyright: ignore[reportReturnType]
        if type(value) is not name:
            raise self.wrong(key, KINDS[name])
        return value  # pyright: ignore[reportReturnType]

    def need(self, key: str, kind: type[Kind]) -> Kind:
        """Return a value as `read` does; ConfigError if the key is absent."""
        value = self.read(key, kind)
        if value is None:
            raise ConfigError(f"{self.source}: expected the metadata {key}, got none")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return a size of at least 1; the default where the key is absent."""
        value = self.read(key, int)
        if value is None:
            value = self.need(key, int) if default is None else default
        if not 1 <= value <= MAX_INT32:
            raise self.wrong(key, f"an integer from 1 to {MAX_INT32}")
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """Return a positive number; the default where the key is absent."""
        value = self.read(key, float)
        if value is None:
            value = self.need(key, float) if default is None else default
        if not 0 < value < float("inf"):
            raise self.wrong(key, "a positive number")
        return value

    def wrong(self, key: str, expected: str) -> ConfigError:
        """Return the error for a value that is not what is expected."""
        value = self.values[key]
        got = f"{len(value)} values" if isinstance(value, (list, np.ndarray)) else f"{value!r:.100}"
        return ConfigError(f"{self.source}: expected {key} to be {expected}, got {got}")
