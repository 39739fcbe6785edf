"""Data sets: the forms of a row, and the hub, which is imitated here."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types
from typing import Any

import huggingface_hub
import pytest

from jaxspec.commands.train import EvaluationOptions
from jaxspec.config import ConfigError
from jaxspec.tools import prompts
from jaxspec.training.chat_files import file_prompts
from jaxspec.training.data import OverlapFilter
from jaxspec.training.dry_run import dry_target
from jaxspec.training.generation import GenerationConfig


def test_rows_in_every_form_are_read(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["first", "second"]},
        {"prompt": "a prompt"},
        {"prompt": ["a turn", "another"]},
        {"question": "a question", "answer": "42"},
        {"prompt": "in UTF-8: ü 漢 \u2028 end"},
    ]
    path.write_text(
        "\ufeff" + "\r\n".join(json.dumps(r, ensure_ascii=False) for r in rows), encoding="utf-8"
    )
    assert prompts.read_prompts(str(path)) == [
        "first",
        "a prompt",
        "a turn",
        "a question",
        "in UTF-8: ü 漢 \u2028 end",
    ]


def test_num_prompts_takes_the_first(run_tiny, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"number {i}"}) for i in range(5))
    )
    result = run_tiny("--dataset", tmp_path / "data.jsonl", "--num-prompts", 2, "--max-tokens", 4)
    assert result.exit_code == 0, result.output
    assert "number 1" in result.stdout and "number 2" not in result.stdout


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """hub(files, revision): a hub whose repositories hold these files at this revision, all with
    the same two rows."""
    path = tmp_path / "downloaded.jsonl"
    path.write_text('{"turns": ["one", "two"]}\n{"turns": ["three"]}\n')

    def make(files, expected=None):
        def listed(name, repo_type, revision):
            assert (name, revision) == ("philschmid/mt-bench", expected)
            return files

        def download(name, file, repo_type, revision):
            assert (name, revision) == ("philschmid/mt-bench", expected)
            return str(path)

        monkeypatch.setattr(huggingface_hub, "list_repo_files", listed)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)

    return make


def test_a_hub_data_set_with_one_jsonl_file_is_read(hub):
    hub(["README.md", "question.jsonl"])
    assert prompts.read_prompts("philschmid/mt-bench") == ["one", "three"]
    hub(["README.md", "question.jsonl"], "0123abc")
    assert prompts.read_prompts("philschmid/mt-bench@0123abc") == ["one", "three"]


def test_training_takes_ids_of_data_sets(hub):
    hub(["README.md", "question.jsonl"])
    given = EvaluationOptions(eval_prompts="philschmid/mt-bench")
    assert given.read() == ["one", "three"] and given.name == "philschmid/mt-bench"
    target = dry_target("float32")
    words = [target.words.encode_chat(text).tolist() for text in ("one", "three")]
    found = file_prompts(
        GenerationConfig(), target, ["philschmid/mt-bench"], (0, 1), OverlapFilter([])
    )
    assert sorted(ids.tolist() for ids in found) == sorted(words)


def test_a_message_names_the_flag_of_the_data_set(tmp_path):
    with pytest.raises(ConfigError, match=r"--prompts none\.jsonl: expected a \.jsonl file"):
        file_prompts(
            GenerationConfig(), dry_target("float32"), ["none.jsonl"], (0, 1), OverlapFilter([])
        )
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}')
    assert EvaluationOptions(eval_prompts=str(tmp_path / "own.jsonl")).name == "own.jsonl"


def test_half_a_character_is_named_by_its_line(tmp_path):
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}\n{"turns": ["b\\ud800"]}\n')
    message = r"own\.jsonl, line 2, turns: expected Unicode, got half a character .* at 1$"
    with pytest.raises(ConfigError, match=message):
        prompts.read_prompts(str(tmp_path / "own.jsonl"))


def test_other_layouts_go_through_datasets(hub, monkeypatch):
    hub(["README.md", "data/train-00000.parquet"])
    fake: Any = types.ModuleType("datasets")
    fake.__spec__ = importlib.machinery.ModuleSpec("datasets", None)
    fake.load_dataset = lambda name, revision: {
        "train": [{"turns": ["one", "two"]}, {"prompt": "three"}]
    }
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert prompts.read_prompts("philschmid/mt-bench") == ["one", "three"]


def test_without_datasets_the_sentence_says_what_is_there(hub, monkeypatch):
    hub(["README.md", "data/train-00000.parquet"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ConfigError,
        match=(
            "expected one .jsonl file in it .or the datasets package "
            "installed., got .'README.md', 'data/train"
        ),
    ):
        prompts.read_prompts("philschmid/mt-bench")


def test_no_hub_is_one_sentence(monkeypatch, run_tiny):
    def unreachable(*_, **__):
        raise OSError("We couldn't connect\nto the hub")

    monkeypatch.setattr(huggingface_hub, "list_repo_files", unreachable)
    result = run_tiny("--dataset", "philschmid/mt-bench")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 1
    assert (
        "error: --dataset philschmid/mt-bench: expected a .jsonl file, or a data set on a hub "
        "that can be reached" in result.stderr
    )
