"""scripts/compare_compilation.py: the three modes agree on the tiny models, and a difference is
found."""

from __future__ import annotations

import json

import pytest

from jaxspec import LLM


@pytest.fixture
def arguments(target, draft, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"turns": ["Hello there"]}\n{"turns": ["Why?"]}\n')
    tiny = ["--target", target, "--draft", draft, "--dataset", path, "--max-model-len", 512]
    return [
        *tiny,
        "--max-tokens",
        8,
        "--num-speculative-tokens",
        2,
        "--output-json",
        tmp_path / "modes.json",
    ]


# eager compiles every primitive for every shape: most of two minutes where cores are shared
@pytest.mark.parametrize(
    "modes", [("round", "step"), pytest.param(("round", "step", "eager"), marks=pytest.mark.slow)]
)
def test_the_modes_agree(run_compare_compilation, arguments, tmp_path, monkeypatch, modes):
    monkeypatch.setattr("scripts.compare_compilation.MODES", modes)
    result = run_compare_compilation(*arguments)
    assert result.exit_code == 0, result.output
    assert "the modes agree in every token and count of 2 prompts" in result.stdout
    record = json.loads((tmp_path / "modes.json").read_text())
    assert record["identical"] is True and tuple(record["modes"]) == modes
    assert record["modes"]["round"]["num_accepted_tokens"] > 0


def test_a_difference_is_found(run_compare_compilation, arguments, tmp_path, monkeypatch):
    """One mode's outputs and counts changed after the run."""
    monkeypatch.setattr("scripts.compare_compilation.MODES", ("round", "step"))
    decode = LLM.generate

    def wrong(self, *args, **kwargs):
        outputs = decode(self, *args, **kwargs)
        if self.config.compilation == "step":
            outputs[1].token_ids[5] += 1
            self.metrics.acceptance_histogram[0] += 1
            self.metrics.acceptance_histogram[1] -= 1
        return outputs

    monkeypatch.setattr(LLM, "generate", wrong)
    result = run_compare_compilation(*arguments)
    assert result.exit_code == 1
    differences = json.loads((tmp_path / "modes.json").read_text())["differences"]
    assert len(differences) == 2 and differences[0].startswith("accepted_per_position: round [")
    assert differences[1].startswith("prompt 1, token 5: round ")


def test_bad_input_is_one_sentence(run_compare_compilation):
    result = run_compare_compilation("--dataset", "nowhere.jsonl")
    assert result.exit_code == 2 and result.stderr.startswith(
        "error: --dataset nowhere.jsonl: expected"
    )
