"""The config.json of common models, by hub id: what a plan needs, without a hub."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "known_models.json"


@functools.cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return the configs by hub id in lower case, and by the name after its owner."""
    found: dict[str, dict[str, Any]] = {}
    for entry in json.loads(FILE.read_text(encoding="utf-8")).values():
        for hub_id in entry["hub_ids"]:
            found[hub_id.lower()] = found[hub_id.lower().partition("/")[2]] = entry["config"]
    return found


def known_config(name: str) -> dict[str, Any] | None:
    """Return the config of a common model, None for another name and for a pinned revision."""
    config = known_models().get(name.lower())
    return None if config is None else dict(config)
