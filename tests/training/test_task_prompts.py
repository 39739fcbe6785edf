"""Task prompts fill every blank of every task with the words that are meant for it."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from jaxspec.commands.train import app
from jaxspec.config import ConfigError
from jaxspec.training.task_prompts import (
    BLANK,
    TaskPromptConfig,
    Tasks,
    fill,
    read_tasks,
    task_prompts,
)


def test_blanks_of_one_list_get_different_words_and_the_same_name_the_same() -> None:
    words = {"topic": ["tea", "bees", "ice"]}
    rng = np.random.default_rng(0)
    for _ in range(50):
        said = fill("{topic} {topic2} {topic} {topic3}", words, rng).split()
        assert said[0] == said[2] and {said[0], said[1], said[3]} == set(words["topic"])


def test_numbers_are_drawn_anew_and_reach_both_ends() -> None:
    rng = np.random.default_rng(0)
    pairs = {fill("{n:3-5} {n:3-5}", {}, rng) for _ in range(200)}
    assert pairs == {f"{a} {b}" for a in (3, 4, 5) for b in (3, 4, 5)}


def test_a_style_is_left_out_half_of_the_time_with_the_space_before_it() -> None:
    rng = np.random.default_rng(0)
    said = Counter(fill("Go. {style}", {"style": ["Be brief."]}, rng) for _ in range(400))
    assert set(said) == {"Go.", "Go. Be brief."} and 150 < said["Go."] < 250


def test_an_article_fits_the_word_behind_it() -> None:
    rng = np.random.default_rng(0)
    assert fill("A {job} met a {job}.", {"job": ["actor"]}, rng) == "An actor met an actor."
    assert fill("A {job} met a {job}.", {"job": ["judge"]}, rng) == "A judge met a judge."
    assert fill("Gina {job}", {"job": ["eats"]}, rng) == "Gina eats"


def test_every_task_of_the_package_can_be_filled() -> None:
    tasks = read_tasks()
    assert len(tasks.tasks) == 14
    used = set()
    for kind in tasks.tasks.values():
        assert len(set(kind)) == len(kind) >= 7
        for task in kind:
            rest = BLANK.sub("", task)
            assert not re.search(r"[{}]", rest), task
            blanks = [blank.groups() for blank in BLANK.finditer(task)]
            for low, high, name, index in blanks:
                if low:
                    assert 0 < int(low) < int(high), task
                else:
                    used.add(name)
                    assert 1 <= int(index or 1) <= len(tasks.words[name]), task
            for seed in range(20):
                said = fill(task, tasks.words, np.random.default_rng(seed))
                assert not re.search(r"  |[{}]|\b[Aa] [aeiou]|\b1 [a-z]+s\b| [.,?]", said), said
    assert used == set(tasks.words)
    assert all(len(set(words)) == len(words) for words in _but(tasks.words, "language"))


def _but(words: dict[str, list[str]], name: str) -> list[list[str]]:
    """The lists but one: languages repeat, so that Python is asked for most."""
    return [of for key, of in words.items() if key != name]


def test_kinds_come_in_turn_and_a_seed_gives_the_same_prompts() -> None:
    tasks = Tasks({"a": ["a {n:1-9999}"], "b": ["b {n:1-9999}", "c {n:1-9999}"]}, {})
    said = list(task_prompts(TaskPromptConfig(count=400), tasks))
    assert len(said) == 400 == len(set(said))
    counts = Counter(prompt[0] for prompt in said)
    assert 190 < counts["a"] < 210 and 60 < counts["b"] < 140
    assert said == list(task_prompts(TaskPromptConfig(count=400), tasks))
    assert said != list(task_prompts(TaskPromptConfig(count=400, seed=1), tasks))


def test_a_run_has_as_many_prompts_as_it_asks_for() -> None:
    said = list(task_prompts(TaskPromptConfig(count=20_000), read_tasks()))
    assert len(set(said)) == len(said) == 20_000


def test_more_prompts_than_the_tasks_allow_are_one_sentence() -> None:
    tasks = Tasks({"a": ["{n:1-3}"], "b": ["x {n:1-2}"]}, {})
    assert len(set(task_prompts(TaskPromptConfig(count=5), tasks))) == 5
    with pytest.raises(ConfigError, match="that the tasks allow, at most about 5, got 6"):
        list(task_prompts(TaskPromptConfig(count=6), tasks))


def test_the_command_writes_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "tasks.jsonl"
    with pytest.raises(SystemExit) as stopped:
        app(["task-prompts", str(output), "--count", "30"])
    assert stopped.value.code == 0 and "30 prompts" in capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 30 and all(len(row["prompt"]) > 15 for row in rows)


def test_a_wrong_count_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match="expected a count from 1, got 0"):
        TaskPromptConfig(count=0)
