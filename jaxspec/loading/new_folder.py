"""A folder of new files that appears whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from jaxspec.config import ConfigError


@contextmanager
def new_folder(out: Path, content: str) -> Iterator[Path]:
    """Make a folder beside `out` that gets this name at the end; an error leaves nothing behind.

    content: what the folder needs room for, in messages

    ConfigError if `out` exists, or cannot be made or written.
    """
    temp = _folder_beside(out)
    try:
        yield temp
        for path in (temp, *temp.iterdir()):  # mkdtemp and safetensors let the owner alone read
            path.chmod(0o755 if path.is_dir() else 0o644)
        temp.rename(out)
    except (OSError, SafetensorError) as e:
        shutil.rmtree(temp, ignore_errors=True)
        reason = e.strerror if isinstance(e, OSError) and e.strerror else str(e).splitlines()[0]
        raise ConfigError(f"{out}: expected room to write {content}, got {reason}") from e
    except BaseException:
        shutil.rmtree(temp, ignore_errors=True)
        raise


def _folder_beside(out: Path) -> Path:
    """Return a temporary folder beside `out`; ConfigError if that exists or cannot be made."""
    try:
        if os.path.lexists(out):  # a link that leads nowhere too
            raise ConfigError(
                f"{out}: expected a folder that does not exist yet, got one that does"
            )
        out.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as e:
        raise ConfigError(
            f"{out}: expected a folder that can be made, got {e.strerror or e}"
        ) from e
