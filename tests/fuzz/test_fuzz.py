"""Some 100 damaged inputs in one process that forks; `make test-fuzz` goes on for hours.

A case that fails prints the command that repeats it. The planted faults show that each way to fail
is seen.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from jaxspec.config import ConfigError
from tests.fuzz.mutations import mutate_bytes, mutate_json, mutate_value
from tests.support.slow import slow

ROOT = Path(__file__).resolve().parents[2]
CASES = [6, slow(18)]  # of each subject

pytestmark = [
    pytest.mark.once,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
]


def fuzz(*flags: str, timeout: float = 550) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize("cases", CASES)
def test_damaged_input_ends_in_a_result_or_one_sentence(cases: int) -> None:
    done = fuzz("--cases", str(cases), "--seed", os.environ.get("FUZZ_SEED", "0"))
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    counts = re.search(r"fuzz: (\d+) subjects, (\d+) result, (\d+) sentence", done.stdout)
    assert counts, done.stdout
    subjects, results, sentences = map(int, counts.groups())
    assert results + sentences == cases * subjects and subjects >= 15
    # Damage that nothing notices, or that everything refuses, would test little.
    assert results > 20 / 18 * cases and sentences > 100 / 18 * cases


class TwoLinesError(ConfigError):
    def __str__(self) -> str:
        return "one\ntwo"


def two_lines() -> bytes:
    raise TwoLinesError("")


def nothing_said() -> bytes:
    raise ConfigError("")


def a_traceback() -> bytes:
    return bytes([1][2])


def a_crash() -> bytes:
    os.abort()


def an_exit() -> bytes:
    raise SystemExit(0)


def a_loop() -> bytes:
    while True:
        pass


def a_sleep() -> bytes:
    time.sleep(60)
    return b""


def too_much_memory() -> bytes:
    return bytes(1 << 40)


FAULTS = {
    two_lines: "no sentence but 7 characters",
    nothing_said: "no sentence but 0 characters",
    a_traceback: "IndexError",
    a_crash: "died of SIGABRT",
    an_exit: "SystemExit",
    a_loop: "died of SIGXCPU",
    a_sleep: "no end within 2 s",
    too_much_memory: "MemoryError",
}
PLANTED = """
import sys
from pathlib import Path
from tests.fuzz import runner, test_fuzz

runner.CPU_SECONDS = 1
for fault in test_fuzz.FAULTS:
    runner.WALL_SECONDS = 2 if fault is test_fuzz.a_sleep else 100
    outcome = runner.run_in_child(fault, Path(sys.argv[1]))
    print(fault.__name__, repr(outcome), flush=True)
"""


def test_each_planted_fault_is_a_failure(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLANTED, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    said = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for fault, message in FAULTS.items():
        assert "kind='failure'" in said[fault.__name__] and message in said[fault.__name__], said


def test_another_result_of_an_exact_subject_is_a_failure(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from tests.fuzz.runner import Runner
from tests.fuzz.subjects import Subject, damage_bytes

def write(folder): (folder / "x").write_bytes(b"abc")
def load(folder): return (folder / "x").read_bytes()
for exact in (True, False):
    subject = Subject(write, damage_bytes("x"), load, exact)
    print(Runner("exact" if exact else "any", subject, Path(sys.argv[1])).case(0, 0))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    exact, other = done.stdout.splitlines()
    assert "another result than that of the undamaged input" in exact and "failure" in exact
    assert "kind='result'" in other


@pytest.mark.parametrize(
    "mutate",
    [
        lambda rng: mutate_bytes(rng, bytes(range(200)), 100),
        lambda rng: mutate_json(rng, '{"a": {"b": [1, 2]}, "c": "d"}'),
        lambda rng: repr(mutate_value(rng, {"a": {"b": [1, 2]}, "c": "d"})),
    ],
    ids=["bytes", "json", "value"],
)
def test_damage_follows_its_seed_and_differs(mutate: Callable[[Random], object]) -> None:
    once, again = ([mutate(Random(i)) for i in range(60)] for _ in range(2))
    assert once == again and len(set(once)) > 40
