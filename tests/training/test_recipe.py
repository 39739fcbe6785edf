"""The recipe of the committed heads, with a tiny random target."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def recipe(*arguments: str, cwd: Path = ROOT, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "train_heads.sh"), *arguments],
        cwd=cwd,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


@pytest.mark.slow
def test_every_stage_of_the_recipe_runs(tmp_path: Path) -> None:
    settings = {"DRY": "--dry-run", "MINUTES": "6", "WRITE_MINUTES": "1", "EAGLE": ""}
    done = recipe(str(tmp_path), PYTHON=sys.executable, **settings)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for name in ("dspark", "eagle3"):
        head = tmp_path / name / "head"
        record = json.loads((head / "training.json").read_text())
        assert record["head"]["method"] == name and record["chats"]["files"] == 3
        assert "scripts/train_heads.sh" in (head / "README.md").read_text()
        assert (tmp_path / name / "pieces").is_dir()
    assert not (tmp_path / "eagle").exists()  # EAGLE="" trains no such head


def without_writers(tmp_path: Path) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """The recipe with writers that write nothing, and the arguments of each."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ "$2" != generate ] && exec {sys.executable} "$@"\n'
        f'echo "$@" >> {tmp_path / "writers"}\n'
    )
    python.chmod(0o755)
    done = recipe(str(tmp_path / "out"), DRY="--dry-run", PYTHON=str(python), TASKS="4")
    return done, (tmp_path / "writers").read_text().splitlines()


def test_the_recipe_ends_where_no_writer_finished_a_chat(tmp_path: Path) -> None:
    done, _ = without_writers(tmp_path)
    assert done.returncode == 1 and done.stderr.endswith("no chats were written\n"), done.stderr
    assert len((tmp_path / "out" / "tasks.jsonl").read_text().splitlines()) == 4


def test_each_writer_keeps_out_the_prompts_that_heads_are_chosen_by(tmp_path: Path) -> None:
    _, writers = without_writers(tmp_path)
    kept_out = (
        "--keep-out scripts/prompts/validation.jsonl --keep-out scripts/prompts/selection.jsonl"
    )
    assert len(writers) == 4 and all(kept_out in arguments for arguments in writers)


@pytest.mark.parametrize("held", ["chats3", "dspark", "eagle"])
def test_the_recipe_refuses_the_folder_of_another_run(held: str, tmp_path: Path) -> None:
    """Its chats would join those of this run, by whatever settings they were written."""
    (tmp_path / "out" / held).mkdir(parents=True)
    (tmp_path / "out" / "log").mkdir()
    done = recipe(str(tmp_path / "out"), DRY="--dry-run", PYTHON="false", TASKS="4")
    said = f"expected a folder without chats or heads of another run, got one with {tmp_path}"
    assert done.returncode == 1 and said in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and f"/out/{held}/" in done.stderr
    assert not any((tmp_path / "out" / "log").iterdir())


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        ([], {}, "expected a folder for the results"),
        (["OUT"], {}, "expected a file of prompts that chats begin with"),
        (
            ["OUT"],
            {"PROMPTS": "none.jsonl"},
            "expected the file of prompts that heads are measured",
        ),
        (
            ["OUT"],
            {"DRY": "--dry-run", "PYTHON": "false"},
            "failed: scripts/train_draft.py task-prompts",
        ),
    ],
)
def test_the_recipe_says_what_it_lacks_and_fails(
    arguments: list[str], settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    done = recipe(*arguments, cwd=tmp_path, **settings)
    assert done.returncode == 1 and message in done.stderr, done.stderr
