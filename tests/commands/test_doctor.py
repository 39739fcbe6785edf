"""jaxspec doctor from end to end on the tiny pair: what it prints and writes, and its exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from jaxspec.commands import doctor
from jaxspec.doctor import diagnosis
from jaxspec.doctor.diagnosis import Diagnosis, Finding

pytestmark = pytest.mark.once
PROMPTS = ("Hello there", "How are you?", "What is it?", "Tell me more")
FLAGS = [*(x for prompt in PROMPTS for x in ("--prompt", prompt)), "--max-tokens", "24"]


@pytest.fixture(autouse=True)
def _formats_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny target has seen no chat, so that formats differ by chance."""
    monkeypatch.setattr(diagnosis, "LEAST_FORMAT_GAIN", 1.0)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(doctor.app, [str(a) for a in arguments])


def test_it_tries_everything_and_finds_nothing_in_a_good_head(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    result = run(target, draft, *FLAGS, "--output-json", tmp_path / "doctor.json")
    assert result.exit_code == 0, result.output
    assert "nothing found" in result.stdout and "decoding as it is" in result.stdout
    found = json.loads((tmp_path / "doctor.json").read_text())
    assert {t["kind"] for t in found["tried"]} == {
        "aux layer ids",
        "norm switch",
        "rope",
        "chat template",
    }
    assert found["findings"] == [] and found["decoded"][0] > 1.5 and found["decoded"][1] is None
    assert found["length"] > 1.5


def test_a_head_that_cannot_be_loaded_gets_its_remedy(target: Path, draft: Path, edited) -> None:
    wrong = edited(draft, {"norm_before_fc": True})
    result = run(target, wrong, *FLAGS)
    assert result.exit_code == 1, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("norm switch: ")]
    assert lines == [
        "norm switch: norm_before_fc True, and input_norm.weight is not there: set "
        "norm_before_fc=False in the speculative config"
    ]
    assert "decoding with these settings: mean acceptance length" in result.stdout


def test_a_gain_that_decoding_does_not_show_is_no_finding(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search says that another base of the rotation is better; the engine does not."""

    def run_search(self: diagnosis.Search):
        rope = next(a for a in self.head.alternatives(self.head.present, 64) if a.kind == "rope")
        self.measured(rope.reading)
        return rope.reading, [Finding("rope", rope.name, rope.remedy, 1.0, 2.0)]

    monkeypatch.setattr(diagnosis.Search, "run", run_search)
    lengths = iter([2.0, 2.0])
    monkeypatch.setattr(diagnosis, "_decode", lambda *args: next(lengths))
    result = run(target, draft, *FLAGS)
    assert result.exit_code == 0 and "nothing found" in result.stdout, result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompt", "alone"], "--prompt: expected at least 4 prompts"),
        (["--prompt", "", "--prompt", "b"], "--prompt 0"),
        (["--dtype", "int8"], "--dtype: expected one of auto"),
        (
            ["--num-speculative-tokens", "1" + "0" * 30],
            "--num-speculative-tokens: expected fewer than --max-tokens 64, got 1000",
        ),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], sentence: str, target: Path, draft: Path
) -> None:
    result = run(target, draft, *arguments)
    assert result.exit_code == 2 and sentence in result.stderr, result.output


def test_a_draft_without_a_head_is_refused(target: Path) -> None:
    result = run(target, target, *FLAGS)
    assert result.exit_code == 2
    assert "expected an EAGLE-1 or EAGLE-3 head, got 'draft_model'" in result.stderr


def test_findings_are_printed_with_their_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    finding = Finding("rope", "rope_theta 1", "rope_theta: 1", 1.5, 2.25)
    doctor.show(Diagnosis(1.5, 2, (), (finding,), (1.4, 2.1)), doctor.Console(width=100))
    out = capsys.readouterr().out
    assert "as LLM reads it (2 texts end with their first token)" in out
    assert "rope: rope_theta 1 (length 1.50 -> 2.25): rope_theta: 1" in out
    assert "decoding with these settings: mean acceptance length 2.10" in out
