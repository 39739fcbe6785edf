"""The README.md of a checkpoint, as far as a program reads it."""

from __future__ import annotations

from pathlib import Path

CARD = "README.md"


def base_model(folder: Path) -> str | None:
    """Return the model that a checkpoint's card names as its base; None without a single one."""
    from huggingface_hub import metadata_load

    try:
        about = metadata_load(folder / CARD) or {}
    except Exception:  # of the YAML parser too: a card that cannot be read names nothing
        return None
    named = about.get("base_model")
    if isinstance(named, list) and len(named) == 1:
        [named] = named
    return named if isinstance(named, str) and named else None
