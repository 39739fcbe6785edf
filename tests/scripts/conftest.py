"""The tiny models of tests/commands, for the scripts that have no sub-command."""

from __future__ import annotations

import pytest

from scripts import compare_compilation
from tests.commands.conftest import (
    Run,
    draft,
    edited,
    run_generate,
    run_tiny,
    runner,
    target,
    write_draft,
    write_target,
)

__all__ = [
    "draft",
    "edited",
    "run_generate",
    "run_tiny",
    "runner",
    "target",
    "write_draft",
    "write_target",
]


@pytest.fixture(scope="session")
def run_compare_compilation() -> Run:
    return runner(compare_compilation.main)
