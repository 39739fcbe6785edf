"""Runs of one case each in a child process with limits of its own.

The parent imports jaxspec once and forks. It never starts JAX's backend, whose threads a fork would
lose: each child starts its own where it needs one.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import select
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from jaxspec.config import ConfigError
from tests.fuzz.subjects import Subject

CPU_SECONDS, WALL_SECONDS = 10, 60
MEMORY = 3 << 30  # beyond what the parent has mapped
LONGEST = 2000  # characters of a sentence
RESULT, SENTENCE, FAILURE = "result", "sentence", "failure"


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    kind: RESULT, SENTENCE or FAILURE.
    text: the digest of a result in hex, the sentence, or what went wrong.
    """

    kind: str
    text: str


class Runner:
    """The cases of one subject, whose undamaged form is written and read once."""

    def __init__(self, name: str, subject: Subject, folder: Path) -> None:
        self.name, self.subject = name, subject
        self.pristine, self.work = folder / name / "pristine", folder / name / "work"
        self.pristine.mkdir(parents=True)
        written = run_in_child(lambda: subject.write(self.pristine) or b"", self.pristine.parent)
        self.expected = written if written.kind == FAILURE else self._run(lambda _: None)
        if self.expected.kind != RESULT:
            raise RuntimeError(f"{name}: the undamaged input ends in {self.expected}")

    def case(self, seed: int, number: int) -> Outcome:
        """Damage a copy by seed and number, and read it."""
        # Python's hash of strings differs from process to process.
        key = hashlib.sha256(f"{seed} {self.name} {number}".encode()).digest()
        outcome = self._run(lambda folder: self.subject.mutate(Random(key), folder))
        if self.subject.exact and outcome.kind == RESULT and outcome != self.expected:
            return Outcome(FAILURE, "another result than that of the undamaged input")
        return outcome

    def _run(self, damage: Callable[[Path], None]) -> Outcome:
        shutil.rmtree(self.work, ignore_errors=True)
        shutil.copytree(self.pristine, self.work)

        def run() -> bytes:
            damage(self.work)
            return self.subject.load(self.work)

        return run_in_child(run, self.work.parent)


def run_in_child(function: Callable[[], bytes], folder: Path) -> Outcome:
    """Call a function in a fork of this process, within the limits; folder: for its output."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(reading)
            _settle_child(folder / "output")
            _answer(writing, _outcome(function))
        finally:
            os._exit(0)
    os.close(writing)
    answer = _read(reading, time.monotonic() + WALL_SECONDS)
    if answer is None:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    os.close(reading)
    if answer is None:
        return Outcome(FAILURE, f"no end within {WALL_SECONDS} s")
    if not answer:
        name = signal.Signals(status & 127).name if status & 127 else f"status {status}"
        output = (folder / "output").read_text(errors="replace")[-500:]
        return Outcome(FAILURE, f"the process died of {name} {output}")
    return Outcome(**json.loads(answer))


def _outcome(function: Callable[[], bytes]) -> Outcome:
    try:
        return Outcome(RESULT, function().hex())
    except ConfigError as e:
        text = str(e)
        if "\n" in text or not 0 < len(text) <= LONGEST:
            return Outcome(FAILURE, f"no sentence but {len(text)} characters: {text!r:.300}")
        return Outcome(SENTENCE, text)
    except BaseException as e:
        where = traceback.format_exception(e)
        return Outcome(FAILURE, "".join(where)[-3000:])


def _settle_child(output: Path) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    memory = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))


def _answer(descriptor: int, outcome: Outcome) -> None:
    text = json.dumps({"kind": outcome.kind, "text": outcome.text})
    os.write(descriptor, text.encode())


def _read(descriptor: int, deadline: float) -> bytes | None:
    """Read to the end; None if the deadline passes first."""
    content = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            return None
        piece = os.read(descriptor, 1 << 16)
        if not piece:
            return content
        content += piece
