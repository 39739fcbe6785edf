"""The examples of docs/examples, run as they are on the tiny pair.

train_head.py is run by tests/training/test_checkpoint.py.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
PRINTED = {
    "chat": ("Name three primary colours.", "tokens a round: "),
    "stream": ("finished: length",),
    "own_head": ("aux layers (boundary ids) [1, 2, 3]", "accepted at each position: "),
    "benchmark": (" tokens/s with drafts, ", "tokens a round: "),
}
pytestmark = pytest.mark.once


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*PRINTED, "train_head"}


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(
    name: str,
    target: Path,
    draft: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", str(target), str(draft)])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    out = capsys.readouterr().out
    for text in PRINTED[name]:
        assert text in out, out
