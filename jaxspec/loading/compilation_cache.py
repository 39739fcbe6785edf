"""Compiled programs kept on disk between runs: JAX's persistent compilation cache, within a limit of our own.

JAX's limit (jax_compilation_cache_max_size) stays off. With it each program that is written first lists and reads the whole folder, under a
lock (0.4 to 2 s with 7,000 programs in it), and before JAX 0.11 one entry that a killed process left incomplete made each later write fail.
"""

from __future__ import annotations

from pathlib import Path

import jax

MOST_BYTES = 2 << 30


def use(folder: Path, *, min_compile_seconds: float, most_bytes: int = MOST_BYTES) -> None:
    """Keep what takes at least min_compile_seconds to compile in folder, whose oldest programs make room first."""
    trim(folder, most_bytes)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_seconds)


def trim(folder: Path, most_bytes: int) -> None:
    """Remove the files written longest ago until folder holds at most most_bytes. Other processes may do the same."""
    files = []
    for path in folder.glob("*"):
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        files.append((stat.st_mtime_ns, stat.st_size, path))
    held = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if held <= most_bytes:
            return
        path.unlink(missing_ok=True)
        held -= size
