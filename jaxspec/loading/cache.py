"""The cache folder: compiled programs, lowered kernels, and GGUF files converted once for all."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import jax
from filelock import FileLock

from jaxspec.config import ConfigError
from jaxspec.loading import compilation_cache, executables
from pallas_kernels import lowered_once

CONVERSION = 1  # raise it when the conversion's output changes: older results are made again
MARKER = "jaxspec_conversion.json"
MOST_KERNEL_BYTES = 256 << 20  # a target and its draft have about 3 MB
MOST_EXECUTABLE_BYTES = 2 << 30


def cache_dir() -> Path:
    """Return $JAXSPEC_CACHE, or ~/.cache/jaxspec; make the folder if it is missing."""
    given = os.environ.get("JAXSPEC_CACHE") or "~/.cache/jaxspec"
    try:
        folder = Path(given).expanduser().absolute()
    except RuntimeError as e:  # ~ of a user without a home
        raise ConfigError(
            f"JAXSPEC_CACHE: expected a folder that can be written, got {given} ({e})"
        ) from e
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ConfigError(
            f"JAXSPEC_CACHE: expected a folder that can be written, got {folder} ({e.strerror})"
        ) from e
    return folder


_kept: Path | None = None  # where keep_compiled_programs keeps them


def keep_compiled_programs() -> None:
    """Keep compiled programs, and the kernels that are lowered for them, in the cache folder.

    Rounds, prefills and what belongs to them are found without a trace (executables); JAX's
    compilation cache has the other programs.

    A folder that the user has chosen (JAX_COMPILATION_CACHE_DIR) takes precedence. Nothing is kept
    if it is empty, or if jax_enable_compilation_cache is off.
    """
    global _kept
    chosen = jax.config.values["jax_compilation_cache_dir"]
    kernels: Path | None = None
    programs: Path | None = None
    if chosen is None:
        _kept = cache_dir()
        compilation_cache.use(_kept / "compiled")
        kernels, programs = _kept / "kernels", _kept / "executables"
    elif _kept is not None and chosen == str(_kept / "compiled"):
        kernels, programs = _kept / "kernels", _kept / "executables"
    elif chosen and "://" not in chosen:  # only JAX can write to a store
        kernels = Path(chosen).absolute() / "jaxspec-kernels"
        programs = Path(chosen).absolute() / "jaxspec-executables"
    if not jax.config.values["jax_enable_compilation_cache"]:
        kernels = programs = None
    if kernels is not None and programs is not None:
        compilation_cache.trim(kernels, MOST_KERNEL_BYTES)
        compilation_cache.trim(programs, MOST_EXECUTABLE_BYTES)
    lowered_once.keep_in(kernels)
    executables.keep_in(programs)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a cache entry; the system frees it if the process dies."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        yield


def is_converted(folder: Path, sha256: str) -> bool:
    """Whether the folder holds this GGUF, converted by this version.

    A folder is renamed into place whole.
    """
    try:
        return json.loads((folder / MARKER).read_text()) == {
            "conversion": CONVERSION,
            "sha256": sha256,
        }
    except (OSError, ValueError):
        return False


def convert_into(folder: Path, gguf_path: Path, sha256: str) -> Path:
    """Convert into a cache entry whose lock the caller holds; replace another version's result."""
    # Imports the gguf library, which other checkpoints do not need.
    from jaxspec.loading.gguf_file import convert_gguf

    staging = folder.with_name(f"{folder.name}.new")
    # Left by a process that was killed: this one holds the lock.
    left_over = folder.parent.glob(f".{staging.name}-*")
    for stale in (folder, staging, *left_over):
        if stale.exists():
            shutil.rmtree(stale)
    convert_gguf(gguf_path, staging)
    (staging / MARKER).write_text(json.dumps({"conversion": CONVERSION, "sha256": sha256}) + "\n")
    return staging.rename(folder)


def cached_gguf(gguf_path: Path) -> Path:
    """Return the converted folder of a local GGUF file, keyed by its content."""
    with gguf_path.open("rb") as f:
        sha256 = hash_stream(f)
    folder = cache_dir() / "gguf" / f"{gguf_path.stem}-{sha256[:16]}"
    with locked(folder):
        return folder if is_converted(folder, sha256) else convert_into(folder, gguf_path, sha256)


def hash_stream(source: BinaryIO, copy_to: BinaryIO | None = None) -> str:
    """Return the sha256 of a stream, and copy it to a second one if given."""
    digest = hashlib.sha256()
    while chunk := source.read(1 << 20):
        digest.update(chunk)
        if copy_to is not None:
            copy_to.write(chunk)
    return digest.hexdigest()
