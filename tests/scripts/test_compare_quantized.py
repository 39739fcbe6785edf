"""scripts/compare_quantized.py: figures of each form beside those of plain weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts import compare_quantized
from tests.scripts.conftest import runner

run = runner(compare_quantized.main)


def test_each_form_has_its_figures(
    target: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "Hello, how are you?"}\n')
    monkeypatch.setattr(compare_quantized, "TEXTS", texts)
    flags = (
        "--forms",
        "plain,fp8,fp8-kv",
        "--num-prompts",
        1,
        "--num-texts",
        1,
        "--max-tokens",
        8,
        "--dtype",
        "float32",
    )
    file = tmp_path / "run.json"
    result = run("--target", target, "--draft", draft, *flags, "--output-json", file)
    assert result.exit_code == 0, result.output
    plain, *others = json.loads(file.read_text())["forms"]
    assert (plain["agreement"], plain["same_text"]) == (1.0, True)
    assert [each["form"] for each in others] == ["fp8", "fp8-kv"]
    assert len({each["loss"] for each in (plain, *others)}) == 3
    for each in others:
        assert each["same_text"] and 0 < abs(plain["loss"] - each["loss"]) < 1
        assert 0 <= each["agreement"] <= 1 <= each["acceptance"]


@pytest.mark.parametrize(("flag", "most"), [("--num-prompts", 5), ("--num-texts", 20)])
def test_no_more_prompts_are_taken_than_there_are(flag: str, most: int, target: Path) -> None:
    result = run("--target", target, flag, 1000)
    assert result.exit_code == 2
    expected = f"{flag}: expected at most the {most} that there are, got 1000"
    assert result.stderr == f"error: {expected}\n"


def test_plain_weights_come_first(target: Path) -> None:
    result = run("--target", target, "--forms", "fp8")
    assert result.exit_code == 2
    assert result.stderr == "error: --forms (the first): expected one of plain, got 'fp8'\n"
