"""Damaged input of all kinds, each case in a process of its own.

    python -m tests.fuzz --cases 20                     # 20 of each subject
    python -m tests.fuzz --seconds 3600 --seed 7        # an hour of other cases
    python -m tests.fuzz --subject gguf --seed 7 --first 12 --cases 1   # one again

A failure is any end but a result or one sentence. It is printed with the command that repeats it,
and the exit code is 1.
"""

from __future__ import annotations

import importlib.util
import itertools
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import typer

from jaxspec.tools.cli import one_of
from jaxspec.tools.flags import flag
from tests.fuzz.runner import FAILURE, Runner
from tests.fuzz.subjects import SUBJECTS, read_tokenizer, write_target

NEEDS = {"pickle": "torch", "state": "orbax"}  # optional modules


@dataclass(frozen=True)
class Options:
    """Which cases are run."""

    subject: list[str] | None = flag(None, f"{', '.join(sorted(SUBJECTS))}. [default: all]")
    seed: int = flag(0, "Of the damage.")
    first: int = flag(0, "Number of the first case.")
    cases: int = flag(20, "Of each subject; with --seconds: a turn.")
    seconds: float | None = flag(None, "Go on with further cases until then.")


def main(args: Options) -> None:
    """Damage input of all kinds; the exit code is 1 after a failure."""
    for name in args.subject or ():
        one_of("--subject", name, sorted(SUBJECTS))
    names = [name for name in args.subject or SUBJECTS if _can_run(name)]
    start, failures, kinds = time.monotonic(), 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="jaxspec-fuzz-") as temp:
        import_all(Path(temp))
        runners = [Runner(name, SUBJECTS[name], Path(temp)) for name in names]
        for turn in itertools.count() if args.seconds else range(1):
            first = args.first + turn * args.cases
            for runner, number in itertools.product(runners, range(first, first + args.cases)):
                if args.seconds and time.monotonic() - start > args.seconds:
                    break
                outcome = runner.case(args.seed, number)
                kinds[outcome.kind] += 1
                if outcome.kind == FAILURE:
                    failures += 1
                    again = f"--subject {runner.name} --seed {args.seed} --first {number} --cases 1"
                    print(f"python -m tests.fuzz {again}\n  {outcome.text.strip()}\n", flush=True)
            if args.seconds and time.monotonic() - start > args.seconds:
                break
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    print(f"fuzz: {len(names)} subjects, {counts}, {time.monotonic() - start:.0f} s")
    if failures:
        raise typer.Exit(1)


def import_all(folder: Path) -> None:
    """Import what the children need, so that each finds it in memory."""
    modules = ["jaxspec.training.loop", "jaxspec.tools.cli", "jaxspec.commands.plan"]
    modules += [f"{name}" for name in NEEDS.values() if importlib.util.find_spec(name)]
    if "orbax" in modules:
        modules.append("jaxspec.training.resume")
    for name in modules:
        importlib.import_module(name)
    write_target(folder)
    read_tokenizer(folder)  # transformers imports on demand


def _can_run(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None
