"""Beginnings of a user's turn, which the target continues before it answers.

They spread its chats over many kinds of task: left alone, a small model begins most turns alike.
All lines of openings.json are written for it, and none is taken from an evaluation set. What the
target makes of them passes the 13-gram check like any other prompt.
"""

from __future__ import annotations

import json
from pathlib import Path


def all_openings() -> list[str]:
    """Every opening, kind after kind."""
    kinds = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return [line for lines in kinds.values() for line in lines]
