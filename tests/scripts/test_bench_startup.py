"""scripts/bench_startup.py on a CPU with tiny dimensions: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import bench_startup
from tests.scripts.conftest import runner

run = runner(bench_startup.main)


@pytest.mark.slow
def test_the_second_start_takes_its_programs_from_disk(tmp_path: Path) -> None:
    output = tmp_path / "startup.json"
    flags = ["--model", "tiny", "--max-num-seqs", "1", "--requests", "2", "--output", "6"]
    result = run(*flags, "--stages", "single", "--output-json", output)
    assert result.exit_code == 0, result.output
    starts = json.loads(output.read_text())["starts"]
    cold, cached = starts["cold"], starts["cached"]
    programs = [each["first_answer_programs"] for each in (cold, cached)]
    counted = [{part: number for part, (number, _) in each.items()} for each in programs]
    # A start may find a small program that it has made itself.
    assert counted[1]["from disk"] >= counted[0].get("from disk", 0)
    # A prefill and the rounds.
    assert counted[0]["traced"] == counted[0]["lowered"] == counted[0]["compiled"] == 2
    assert "loaded" not in counted[0]
    assert counted[1]["loaded"] == 2 and not {"traced", "lowered", "compiled"} & {*counted[1]}
    for start in (cold, cached):
        assert start["import_seconds"] > 0 and start["weights_seconds"] > 0
        assert start["first_token_seconds"] <= start["first_answer_seconds"]
        assert 0 < start["single"]["first_token"]["median"] <= start["single"]["first_token"]["p99"]
    assert cached["first_token_seconds"] < cold["first_token_seconds"]
    assert "first token seconds" in result.output and "p99" in result.output


@pytest.mark.slow
def test_without_executables_the_second_start_traces(tmp_path: Path) -> None:
    output = tmp_path / "startup.json"
    flags = ["--model", "tiny", "--max-num-seqs", "1", "--output", "2", "--requests", "1"]
    result = run(*flags, "--stages", "single", "--no-executables", "--output-json", output)
    assert result.exit_code == 0, result.output
    for start in json.loads(output.read_text())["starts"].values():
        found = start["first_answer_programs"]
        assert found["traced"][0] == found["lowered"][0] == 2 and "loaded" not in found


def test_a_start_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_startup, "measure", lambda *_, **__: {"failed": 1})
    options: Any = bench_startup.StartOptions("tiny", stages=("single",))
    with pytest.raises(SystemExit, match="expected starts that succeed, got one that failed: cold"):
        bench_startup.main(options, dtype="float32")
