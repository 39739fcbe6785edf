"""The record of a run: settings, counts and history, as far as they are known."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from jaxspec.config import ConfigError
from jaxspec.loading.checkpoint import read_json
from jaxspec.loading.new_file import write_text


@dataclass
class RunRecord:
    """A run's record on disk.

    path:    a JSON file
    command: the arguments that the run was started with
    begun:   when it was started (time.monotonic)
    entries: what is known so far, by name
    """

    path: Path
    command: Sequence[str]
    begun: float
    entries: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        """Write the entries, and what the run has run on so far."""
        about = {
            "device": jax.devices()[0].device_kind,
            "devices": jax.device_count(),
            "jax": jax.__version__,
            "date": time.strftime("%Y-%m-%d"),
            "command": self.command,
            "seconds": round(time.monotonic() - self.begun, 1),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_text(self.path, json.dumps(about | self.entries, indent=1, default=str) + "\n")


def earlier_history(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the history of an earlier run up to the step that this one starts from."""
    recorded = read_json(path).get("history", []) if path.is_file() else []
    try:
        return [entry for entry in recorded if entry["step"] <= step]
    except (TypeError, KeyError) as e:
        raise ConfigError(
            f"{path}: expected a history of entries with a step, got {type(e).__name__}: {e}; "
            "delete it to go on without"
        ) from e
