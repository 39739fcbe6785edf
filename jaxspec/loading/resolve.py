"""A folder, a file, a name or a hub id -> a local checkpoint folder."""

from __future__ import annotations

import os
import re
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from jaxspec.config import ConfigError, printable, shown
from jaxspec.loading.cache import cached_gguf
from jaxspec.loading.card import CARD
from jaxspec.loading.checkpoint import MODELOPT, read_model_config

_PACKAGE = Path(__file__).resolve().parents[1]
# The trained heads: a wheel has them inside the package, a checkout beside it.
_IN_WHEEL = _PACKAGE / "checkpoints"
CHECKPOINTS = _IN_WHEEL if _IN_WHEEL.is_dir() else _PACKAGE.parent / "checkpoints"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w./-]+)?")
# Weights, configs, the tokenizer's files.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")
CONNECT_SECONDS = 5.0
MODEL = "a folder, a .gguf file, a name or a hub id"  # what a name of a model may be
NO_ANSWER = "not in the local cache, and the hub's host does not answer"
# Of drafts only: EAGLE-1's pickles, and the card, which may name the target.
DRAFT_FILES = ["pytorch_model.bin", CARD]


Kind = Literal["target", "draft", "draft model", "tokenizer"]


def resolve(name_or_path: str | Path | None, *, kind: Kind) -> Path:
    """Return a folder to open.

    The name is tried as a local folder, a .gguf file, the default target, a name under
    checkpoints/ and a hub id, in this order. A target of None is the default one. ConfigError if
    nothing is found.
    """
    # Imported here: `python -m jaxspec.loading.default_target` must not import itself twice.
    from jaxspec.loading.default_target import default_target, is_default_target

    if kind == "target" and name_or_path is None:
        return default_target()
    if not name_or_path or not str(name_or_path).strip():
        raise ConfigError(f"{kind}: expected {MODEL}, got {name_or_path!r}")
    name, path = str(name_or_path), as_path(name_or_path, kind)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"{kind} {printable(name)}: expected a .gguf file, got no such file")
        return cached_gguf(path)
    if path.exists():
        raise ConfigError(
            f"{kind} {printable(name)}: expected a folder or a .gguf file, got another file"
        )
    if kind != "draft" and is_default_target(name):
        return default_target()
    known = own_drafts() if kind == "draft" else {}
    if name in known:
        return known[name]
    if isinstance(name_or_path, Path) or not HUB_ID.fullmatch(name):
        raise ConfigError(
            f"{kind} {printable(name)}: expected an existing folder, {_choices(known)}, "
            "or a hub id (owner/name), got no such folder"
        )
    return _from_hub(name, kind, known)


def as_path(name: str | Path, what: str, wanted: str = MODEL) -> Path:
    """Return a name as a path; ConfigError for one that this system cannot look for.

    Such are a name that is too long, ~user without such a user, and a folder that may not be read.
    what, wanted: name it in that error, and say what it may be
    """
    try:
        path = Path(name).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as e:
        reason = (isinstance(e, OSError) and e.strerror) or _first_line(e)
        raise ConfigError(f"{what}: expected {wanted}, got {shown(str(name))} ({reason})") from e
    return path


def read_config(name: str) -> dict[str, Any]:
    """Return the config.json of a folder, a file, a name under checkpoints/ or a hub id.

    No weights are downloaded. Empty for the default target and for a .gguf file, whose header is
    its config. ConfigError if there is none.
    """
    from jaxspec.loading.default_target import is_default_target

    path = as_path(name, "model")
    if path.suffix == ".gguf" or (is_default_target(name) and not path.exists()):
        return {}
    if path.is_file():
        return read_model_config(path)
    folder = own_drafts().get(name, path)
    if folder.is_dir():
        return read_model_config(folder)
    if not HUB_ID.fullmatch(name):
        raise ConfigError(
            f"{printable(name)}: expected a folder, a config.json or a hub id, got no such folder"
        )
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError

    repository, revision = split_revision(name)
    offline = not hub_is_reachable()
    download = partial(hf_hub_download, repository, revision=revision, local_files_only=offline)
    try:
        file = Path(download("config.json"))
        config = read_model_config(file)
        if not config.get("quantization_config"):
            with suppress(EntryNotFoundError):
                download(MODELOPT)  # to the same folder
                config = read_model_config(file)
        return config
    except (HfHubHTTPError, HFValidationError, OSError, RuntimeError) as e:
        raise ConfigError(
            f"{name}: expected a folder, a config.json or a hub id, got none that can be read "
            f"({NO_ANSWER if offline else _first_line(e)})"
        ) from e


def hub_is_reachable() -> bool:
    """Return whether the hub's host answers; what lies in the local cache needs no hub.

    huggingface_hub tries five times, over half a minute. A proxy may answer for the host, so with
    one the host is not tried.
    """
    from huggingface_hub.constants import ENDPOINT

    if any(os.environ.get(name) for name in PROXIES):
        return True
    url = urlsplit(ENDPOINT)
    try:
        address = (url.hostname or "", url.port or (80 if url.scheme == "http" else 443))
        socket.create_connection(address, timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def own_drafts() -> dict[str, Path]:
    """Return the trained heads that come with the repository, by name."""
    return {p.parent.name: p.parent for p in sorted(CHECKPOINTS.glob("*/config.json"))}


def split_revision(name: str) -> tuple[str, str | None]:
    """Split a hub id at its @ into repository and revision: a commit, a tag or a branch, or None.

    A commit pins what is downloaded; without a revision it is the newest of the main branch.
    """
    repository, _, revision = name.partition("@")
    return repository, revision or None


def _from_hub(name: str, kind: str, known: dict[str, Path]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    files = HUB_FILES + (DRAFT_FILES if kind == "draft" else [])
    repository, revision = split_revision(name)
    offline = not hub_is_reachable()
    try:
        return Path(
            snapshot_download(
                repository,
                revision=revision,
                allow_patterns=files,
                ignore_patterns=["*/*"],
                local_files_only=offline,
            )
        )
    except (RepositoryNotFoundError, HFValidationError) as e:
        reason = (
            "no such repository on the hub (or it is private or gated and no login may read it)"
        )
        error = e
    except HfHubHTTPError as e:
        reason, error = f"an error from the hub: {_first_line(e)}", e
    except (OSError, RuntimeError) as e:  # no network or offline mode, and not in the local cache
        why = NO_ANSWER if offline else _first_line(e)
        reason = f"no local folder of that name and no hub that can be reached ({why})"
        error = e
    raise ConfigError(
        f"{kind} {name}: expected a hub id, {_choices(known)}, got {reason}"
    ) from error


def _choices(known: dict[str, Path]) -> str:
    return f"a name under checkpoints/ ({', '.join(known)})" if known else "a .gguf file"


def _first_line(e: Exception) -> str:
    lines = [line for line in str(e).splitlines() if line.strip()]
    return lines[0] if lines else type(e).__name__
