"""The command `jaxspec`: every sub-command has a module, a line of help and flags of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jaxspec.commands import program

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.once


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    """What `jaxspec ARGUMENTS` prints; its exit code is 0."""
    monkeypatch.setattr(sys, "argv", ["jaxspec", *arguments])
    result = CliRunner().invoke(program.program(), list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_help_lists_the_modules_of_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.stem for path in (ROOT / "jaxspec" / "commands").glob("*.py")}
    assert set(program.COMMANDS) == files - {"__init__", "program"}
    listed = re.findall(r"^  (\w+)  +\w", run(monkeypatch, "--help"), re.MULTILINE)
    assert listed == list(program.COMMANDS)


@pytest.mark.parametrize("name", program.COMMANDS)
def test_each_sub_command_prints_its_own_help(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    text = run(monkeypatch, name, "--help")
    assert text.startswith(f"Usage: jaxspec {name} ") and "--help" in text


def test_flags_reach_the_sub_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """In their order, with their values, and as sys.argv of a program of its own."""
    monkeypatch.setattr(sys, "argv", ["jaxspec"])
    arguments = ["plan", "--target", "openai/none", "--utilization", "0.5", "--dtype", "int8"]
    result = CliRunner().invoke(program.program(), arguments)
    assert result.exit_code == 2
    assert result.stderr == "error: dtype: expected bfloat16 or float32, got 'int8'\n"
    assert sys.argv == ["jaxspec plan", *arguments[1:]]


def test_version_is_the_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--version") == f"jaxspec {metadata.version('jaxspec')}\n"


def test_scripts_of_sub_commands_only_call_them() -> None:
    called = set()
    for path in sorted((ROOT / "scripts").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if found := re.search(r"The same as `jaxspec (\w+)`", text):
            assert f"from jaxspec.commands.{found[1]} import app\n" in text, path
            assert len(text.splitlines()) < 10, path
            called.add(found[1])
    assert called == {
        "generate",
        "bench",
        "throughput",
        "train",
        "acceptance",
        "plan",
        "convert",
    }


def test_a_script_runs_the_sub_command() -> None:
    command = [sys.executable, "scripts/plan.py", "--target", "/no/such/folder", "--gpu", "24"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: /no/such/folder: expected")
