"""scripts/reproduce.py on the tiny pair: what it prints and writes, and its mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from scripts import reproduce

pytestmark = pytest.mark.once


def run(*arguments: object) -> Result:
    return CliRunner().invoke(reproduce.app, [str(a) for a in arguments])


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "mt_bench.jsonl"
    path.write_text("\n".join(json.dumps({"turns": [f"Question {i}?"]}) for i in range(3)))
    return path


def test_it_prints_figures_beside_the_published_ones(
    target: Path, draft: Path, dataset: Path, tmp_path: Path
) -> None:
    output = tmp_path / "reproduced.json"
    result = run(
        *("--pairs", "qwen3-8b-redhat", "--dataset", dataset, "--num-prompts", 2),
        *("--target", target, "--head", draft, "--max-tokens", 24, "--output-json", output),
    )
    assert result.exit_code == 0, (result.output, result.exception)
    [pair] = json.loads(output.read_text())["pairs"]
    assert pair["published"]["head"] == "RedHatAI/Qwen3-8B-speculator.eagle3"
    assert (pair["num_texts"], pair["texts_that_differ"]) == (2, 0)
    assert pair["metrics"]["num_accepted_tokens"] > 0
    assert min(pair["tokens_per_second"].values()) > 0
    here = f"{pair['metrics']['mean_acceptance_length']:.2f}"
    lines = [line for line in result.stdout.splitlines() if "│" in line]
    assert any("here" in line and here in line and "2 of 2" in line for line in lines), lines
    assert any("published" in line and "2.26" in line and "0.65" in line for line in lines), lines


def test_the_published_figures_agree_with_themselves() -> None:
    """A length is 1 plus the sum of its positions."""
    for pair in reproduce.PAIRS.values():
        if pair.positions:
            assert pair.length == pytest.approx(1 + sum(pair.positions), abs=0.006)
    assert {p.target for p in reproduce.PAIRS.values()} == {reproduce.LLAMA, reproduce.QWEN}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--pairs", "gpt-5"], "--pairs: expected among llama-3.1-8b-redhat"),
        (["--dataset", "nowhere.jsonl"], "--dataset nowhere.jsonl: expected a .jsonl file"),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and sentence in result.stderr, result.output
