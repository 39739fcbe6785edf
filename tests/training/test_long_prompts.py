"""Long prompts are of the lengths and kinds that their settings name, from texts of a folder."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxspec.commands.train import app
from jaxspec.config import ConfigError
from jaxspec.training.long_prompts import (
    CHARACTERS_PER_TOKEN,
    JITTER,
    LongPromptConfig,
    long_prompts,
    read_texts,
)

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three manuals, two modules, and files that are none."""
    folder = tmp_path_factory.mktemp("texts")
    words = np.random.default_rng(0).permutation([f"number{i}word" for i in range(4000)])
    for i in range(3):
        lines = [" ".join(words[j : j + 12]) for j in range(i * 900, i * 900 + 900, 12)]
        (folder / f"manual{i}.md").write_text("\n".join(lines))
    for i in range(2):
        code = [f"def made_{i}_{j}(x):\n    return x + {j} * {i}\n" for j in range(300)]
        (folder / f"module{i}.py").write_text("\n".join(code))
    (folder / "short.md").write_text("short")
    (folder / "latin1.txt").write_bytes(b"\xe9" * 3000)
    (folder / "picture.png").write_bytes(b"x" * 3000)
    return folder


def test_texts_are_the_code_and_prose_that_can_be_read(folder: Path) -> None:
    texts = read_texts([folder])
    assert [text.language for text in texts] == [None] * 3 + ["Python"] * 2


def test_prompts_have_their_lengths_and_kinds_and_differ(folder: Path) -> None:
    cfg = LongPromptConfig(count=60, lengths=(500, 2000))
    prompts = list(long_prompts(cfg, read_texts([folder])))
    assert len(set(prompts)) == 60 and prompts == list(long_prompts(cfg, read_texts([folder])))
    per_token = CHARACTERS_PER_TOKEN
    near = [0, 0]
    for i, prompt in enumerate(prompts):
        kind = ("prose", "code", "mixed")[i % 3]
        assert ("```" in prompt and "made_" in prompt) == (kind == "code")
        assert ("Passage 1:" in prompt) == (kind == "mixed")
        least = len(prompt) / per_token["prose"] * (0.9 if kind != "code" else 1.0)
        most = len(prompt) / per_token["code"]
        for which, length in enumerate(cfg.lengths):
            low, high = length * (1 - JITTER), length * (1 + JITTER)
            near[which] += least < high + 250 and most > low
    assert min(near) >= 15 and sum(near) >= 60


def test_a_retrieval_prompt_holds_what_it_asks_for(folder: Path) -> None:
    prompts = list(long_prompts(LongPromptConfig(90, (600,)), read_texts([folder])))[2::3]
    facts = [p for p in prompts if "Answer from the passages" in p]
    assert 5 < len(facts) < 25
    for prompt in facts:
        what = prompt.rsplit("what is ", 1)[1].split("?")[0]
        assert f"\nNote: {what} is " in prompt
    for prompt in set(prompts) - set(facts):
        asked = re.search(r"Repeat passage (\d+) word for word", prompt)
        assert asked and f"Passage {asked[1]}:\n" in prompt


def test_the_command_writes_prompts_of_the_projects_own_docs(tmp_path: Path) -> None:
    output = tmp_path / "long.jsonl"
    arguments = ("long-prompts", str(output), str(ROOT / "docs"), "--count", "6")
    with pytest.raises(SystemExit) as stopped:
        app([*arguments, "--lengths", "400,900"])
    assert stopped.value.code == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(rows) == 6 and all(len(row["prompt"]) > 1000 for row in rows)


def test_a_folder_without_texts_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected texts .* 1500 characters, got none"):
        read_texts([tmp_path])
    with pytest.raises(ConfigError, match="expected a folder of texts, got none"):
        read_texts([tmp_path / "absent"])
    with pytest.raises(ConfigError, match="expected a count from 1 and lengths from 100 tokens"):
        LongPromptConfig(lengths=(5,))
