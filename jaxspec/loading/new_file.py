"""A new file that appears whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from jaxspec.config import ConfigError
from jaxspec.config.reading import check_unicode


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end; an error leaves `path` as it is.

    ConfigError if there is no place for it.
    """
    if not path.name or path.is_dir():
        raise ConfigError(f"{path}: expected a place to write a file, got a folder")
    try:
        path = path.resolve()  # a link stays one
        fresh = path.with_name(f".{path.name}.new")
        opened = fresh.open("wb")
    except (OSError, RuntimeError) as e:  # a loop of links among them
        reason = (e.strerror if isinstance(e, OSError) else None) or e
        raise ConfigError(f"{path}: expected a place to write a file, got {reason}") from e
    try:
        with opened as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all; ConfigError for half a character."""
    check_unicode(text, str(path))
    with replaced(path) as f:
        f.write(text.encode("utf-8"))
