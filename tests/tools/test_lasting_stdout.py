"""A reader that goes, a full disk and an ASCII terminal end no run and lose no file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxspec.tools.lasting_stdout import NOT_WRITTEN, READER_GONE

ROOT = Path(__file__).parents[2]
# Prints more than a pipe holds, then writes the file, then fails or not.
PROGRAM = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("lasting", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with module.lasting_stdout():
    print("first \\u2026 \\ud800")
    sys.stdout.flush()
    sys.stdin.read()
    for _ in range(20000):
        print("line", flush=True)
    open(sys.argv[2], "w").write("whole")
    raise SystemExit(int(sys.argv[3]))
"""


def start(tmp_path: Path, stdout: Any, code: int = 0, **environment: str) -> subprocess.Popen[str]:
    module = ROOT / "jaxspec" / "tools" / "lasting_stdout.py"
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(module), str(tmp_path / "file"), str(code)],
        stdin=subprocess.PIPE,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.parametrize(("code", "expected"), [(0, READER_GONE), (1, 1)])
def test_a_reader_that_goes_after_a_line(tmp_path: Path, code: int, expected: int) -> None:
    """As `| head -1` does. An error of the program's own keeps its status."""
    run = start(tmp_path, subprocess.PIPE, code)
    assert run.stdout is not None
    assert run.stdout.readline() == "first … \\ud800\n"
    run.stdout.close()
    run.stdout = None
    _, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (expected, "")
    assert (tmp_path / "file").read_text() == "whole"


def test_a_full_disk_behind_standard_output(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        _, err = (run := start(tmp_path, full)).communicate(timeout=60)
    assert run.returncode == NOT_WRITTEN
    assert err == (
        "error: standard output: No space left on device; files that the run writes are whole\n"
    )
    assert (tmp_path / "file").read_text() == "whole"


def test_an_ascii_terminal_gets_escapes(tmp_path: Path) -> None:
    run = start(tmp_path, subprocess.PIPE, PYTHONIOENCODING="ascii")
    out, err = run.communicate(timeout=60)
    assert (run.returncode, err) == (0, "")
    assert out.startswith("first \\u2026 \\ud800\nline\n") and out.count("line") == 20000
    assert (tmp_path / "file").read_text() == "whole"
