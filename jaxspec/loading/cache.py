"""The cache folder: compiled programs, and converted GGUF files, made once even when several processes ask."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import jax

from jaxspec.config import ConfigError
from jaxspec.loading import compilation_cache
from jaxspec.loading.gguf_file import convert_gguf

CONVERSION = (
    1  # raise it when the conversion's output changes: older results in caches are then made again
)
MARKER = "jaxspec_conversion.json"


def cache_dir() -> Path:
    """$JAXSPEC_CACHE, or ~/.cache/jaxspec; made when it is not there."""
    folder = Path(os.environ.get("JAXSPEC_CACHE") or "~/.cache/jaxspec").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(
            f"JAXSPEC_CACHE: expected a folder that can be written, got {folder} ({e.strerror})"
        ) from e
    return folder


def keep_compiled_programs() -> None:
    """Keep compiled programs in the cache folder from now on, unless the user has chosen another (JAX_COMPILATION_CACHE_DIR)."""
    if jax.config.jax_compilation_cache_dir is None:  # pyright: ignore[reportAttributeAccessIssue]
        compilation_cache.use(cache_dir() / "compiled", min_compile_seconds=1.0)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache entry; freed by the system when the process dies, however it dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def is_converted(folder: Path, sha256: str) -> bool:
    """Whether the folder holds this GGUF, converted by this version (a folder is renamed into place whole)."""
    try:
        return json.loads((folder / MARKER).read_text()) == {
            "conversion": CONVERSION,
            "sha256": sha256,
        }
    except (OSError, ValueError):
        return False


def convert_into(folder: Path, gguf_path: Path, sha256: str) -> Path:
    """Convert into a cache entry whose lock the caller holds, replacing what another version left there."""
    staging = folder.with_name(f"{folder.name}.new")
    left_over = folder.parent.glob(
        f".{staging.name}-*"
    )  # of a process that was killed: the lock is ours
    for stale in (folder, staging, *left_over):
        if stale.exists():
            shutil.rmtree(stale)
    convert_gguf(gguf_path, staging)
    (staging / MARKER).write_text(json.dumps({"conversion": CONVERSION, "sha256": sha256}) + "\n")
    return staging.rename(folder)


def cached_gguf(gguf_path: Path) -> Path:
    """The converted folder of a local GGUF file, keyed by its content."""
    with gguf_path.open("rb") as f:
        sha256 = hash_stream(f)
    folder = cache_dir() / "gguf" / f"{gguf_path.stem}-{sha256[:16]}"
    with locked(folder):
        return folder if is_converted(folder, sha256) else convert_into(folder, gguf_path, sha256)


def hash_stream(source: BinaryIO, copy_to: BinaryIO | None = None) -> str:
    """The sha256 of a stream, copied to a second one on the way if given."""
    digest = hashlib.sha256()
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
    return digest.hexdigest()
