"""Short prompts: tasks of many kinds, whose blanks are filled at random.

User's turns that a small target samples are often incoherent, and a file of prompts has one kind of
task. These are whole sentences of many kinds. task_prompts.json holds the tasks and the words
for their blanks. All lines are written for it: an evaluation set may have the same kinds of task,
and no sentence of these.

    {topic}, {topic2}  different words of the list `topic`; {style} is left out half of the time
    {n:3-12}           a whole number from 3 to 12, drawn anew at each blank
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.config import ConfigError
from jaxspec.config.settings import setting
from jaxspec.training.config import check_seed

BLANK = re.compile(r"\{(?:n:(\d+)-(\d+)|([a-z]+)(\d?))\}")
MOST_IN_VAIN = 1000  # prompts drawn in a row that were there before
A_BEFORE_VOWEL = re.compile(r"\b([Aa]) (?=[aeiouAEIOU])")


@dataclass(frozen=True)
class TaskPromptConfig:
    """Settings of the short prompts."""

    count: int = setting(100_000, "Prompts to write.")
    seed: int = setting(0, "Seed of everything that is drawn.")

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.count < 1:
            raise ConfigError(f"task prompts: expected a count from 1, got {self.count}")


@dataclass(frozen=True)
class Tasks:
    """Tasks with blanks, and what fills them.

    tasks: by kind
    words: by the blank's name
    """

    tasks: dict[str, list[str]]
    words: dict[str, list[str]]


def read_tasks() -> Tasks:
    """Return the tasks of this package."""
    return Tasks(**json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8")))


def task_prompts(cfg: TaskPromptConfig, tasks: Tasks) -> Iterator[str]:
    """Yield cfg.count different prompts, of each kind in turn.

    ConfigError if the tasks do not allow so many.
    """
    rng = np.random.default_rng(cfg.seed)
    kinds = itertools.cycle(tasks.tasks.values())
    seen: set[str] = set()
    in_vain = 0
    while len(seen) < cfg.count:
        kind = next(kinds)
        prompt = fill(kind[int(rng.integers(len(kind)))], tasks.words, rng)
        if prompt not in seen:
            in_vain = 0
            seen.add(prompt)
            yield prompt
            continue
        in_vain += 1
        if in_vain == MOST_IN_VAIN:
            raise ConfigError(
                f"task prompts: expected a count that the tasks allow, at most about {len(seen)}, "
                f"got {cfg.count}"
            )


def fill(task: str, words: dict[str, list[str]], rng: np.random.Generator) -> str:
    """Return a task with its blanks filled."""
    orders: dict[str, np.ndarray] = {}

    def word(blank: re.Match[str]) -> str:
        low, high, name, index = blank.groups()
        if low:
            return str(rng.integers(int(low), int(high) + 1))
        if name == "style" and rng.random() < 0.5:
            return ""
        if name not in orders:
            orders[name] = rng.permutation(len(words[name]))
        return words[name][orders[name][int(index or 1) - 1]]

    return A_BEFORE_VOWEL.sub(r"\1n ", BLANK.sub(word, task)).strip()
