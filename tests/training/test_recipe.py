"""The recipe of the committed heads, with a tiny random target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_stage_of_the_recipe_runs(tmp_path: Path) -> None:
    settings = {"DRY": "--dry-run", "MINUTES": "6", "WRITE_MINUTES": "1", "EAGLE": ""}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "train_heads.sh"), str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **settings, "PYTHON": sys.executable, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert "failed" not in done.stdout and done.stderr == "", done.stdout + done.stderr
    for name in ("dspark", "eagle3"):
        head = tmp_path / name / "head"
        record = json.loads((head / "training.json").read_text())
        assert record["head"]["method"] == name and record["chats"]["files"] == 3
        assert "scripts/train_heads.sh" in (head / "README.md").read_text()
        assert (tmp_path / name / "pieces").is_dir()
    assert not (tmp_path / "eagle").exists()  # EAGLE="" trains no such head


def test_a_recipe_without_a_folder_says_what_it_needs() -> None:
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "train_heads.sh")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "expected a folder for the results" in done.stderr
