"""Files of a run, written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Open a file that takes the place of `path` at the end; an error leaves `path` as it is."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with fresh.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(fresh, path)
    finally:
        fresh.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file, whole or not at all."""
    with replaced(path) as f:
        f.write(text.encode("utf-8"))
