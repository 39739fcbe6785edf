"""A program that is told to end leaves no temporary files."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from jaxspec.tools.cli import TERMINATED

PROGRAM = """
import sys, tempfile, time
from jaxspec.tools.cli import run_program

def main() -> None:
    with tempfile.TemporaryDirectory(dir=FOLDER):
        print("ready", flush=True)
        time.sleep(60)

FOLDER = sys.argv.pop()
run_program(main)
"""


def test_sigterm_removes_temporary_files(tmp_path: Path) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    assert len(list(tmp_path.iterdir())) == 1
    run.send_signal(signal.SIGTERM)
    assert run.wait(timeout=60) == TERMINATED
    run.stdout.close()
    assert list(tmp_path.iterdir()) == []
