"""Compiled programs kept on disk: JAX's persistent compilation cache, within our own limit.

JAX's limit (jax_compilation_cache_max_size) stays off. With it, each write first lists and reads
the whole folder under a lock: 0.4 to 2 s with 7,000 programs. Up to JAX 0.10, an entry that a
killed process left incomplete makes each later write fail.
"""

from __future__ import annotations

import contextlib
import stat
import time
from pathlib import Path

import jax

MOST_BYTES = 2 << 30


def use(folder: Path, *, most_bytes: int = MOST_BYTES) -> None:
    """Keep compiled programs in the folder, those that compile fast too: reading is faster.

    The oldest programs are removed first, down to most_bytes.
    """
    trim(folder, most_bytes)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def trim(folder: Path, most_bytes: int) -> None:
    """Remove the oldest files until the folder holds at most most_bytes.

    Other processes may do the same at the same time.
    """
    files = []
    for path in folder.glob("*"):
        try:
            found = path.stat()
        except OSError:
            continue
        is_being_written = path.name.startswith(".") and time.time() - found.st_mtime < 3600
        if stat.S_ISREG(found.st_mode) and not is_being_written:
            files.append((found.st_mtime_ns, found.st_size, path))
    held = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if held <= most_bytes:
            return
        with contextlib.suppress(OSError):  # of a folder that only others may write
            path.unlink(missing_ok=True)
            held -= size
