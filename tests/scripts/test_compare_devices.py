"""scripts/compare_devices.py: tokens on one device and on two."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxspec import LLM
from scripts import compare_devices
from tests.scripts.conftest import runner
from tests.support.devices import run_on_devices

run = runner(compare_devices.main)
MODULE = "scripts.compare_devices"
NAMES = [
    "2 devices, speculative / plain",
    "1 device, speculative / plain",
    "2 devices / 1, speculative",
    "2 devices / 1, plain",
]


def test_random_weights_give_the_same_tokens_on_two_devices(tmp_path: Path) -> None:
    """Other weights on the second number of devices would have other tokens."""
    path = tmp_path / "run.json"
    options = ("--model", "tiny", "--dtype", "float32", "--num-prompts", "3", "--max-tokens", "12")
    # One after the other: fewer programs.
    options += ("--max-num-seqs", "1", "--output-json", str(path))
    printed = run_on_devices(2, MODULE, *options)
    record = json.loads(path.read_text())
    assert [(pair["name"], pair["equal"]) for pair in record["pairs"]] == [
        (name, "3 of 3") for name in NAMES
    ]
    assert len(re.findall("3 of 3", printed)) == 4
    assert record["acceptance_lengths"].keys() == {"1", "2"}


def test_a_checkpoint_answers_the_prompts_of_a_data_set(
    target: Path, draft: Path, tmp_path: Path
) -> None:
    path, data = tmp_path / "run.json", tmp_path / "data.jsonl"
    data.write_text('{"turns": ["Hello there"]}\n{"prompt": "Why?"}\n{"prompt": "Who?"}\n')
    models = ("--target", target, "--draft", draft, "--dataset", data)
    options = ("--num-prompts", 2, "--max-tokens", 12, "--tensor-parallel-size", 1)
    result = run(*models, *options, "--output-json", path)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    (pair,) = record["pairs"]
    assert (pair["name"], pair["equal"], pair["positions"]) == (NAMES[1], "2 of 2", [])
    assert record["settings"]["dataset"] == str(data) and record["acceptance_lengths"]["1"] > 1.5


def test_a_difference_is_shown_with_its_position(
    target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = LLM.generate

    def wrong(self: LLM, *args: Any, **kwargs: Any) -> Any:
        outputs = decode(self, *args, **kwargs)
        if self.speculative is None:
            outputs[1].token_ids[5] ^= 1
            outputs[2].token_ids[3] ^= 1
        return outputs

    monkeypatch.setattr(LLM, "generate", wrong)
    options = ("--dtype", "float32", "--num-prompts", 3, "--max-tokens", 8)
    result = run("--target", target, "--draft", draft, *options, "--tensor-parallel-size", 1)
    assert result.exit_code == 1, result.output
    assert re.search(r"1 device, speculative / plain +│ 1 of 3 +│ 3, 5 ", result.stdout)


def test_many_positions_are_the_first_and_the_last() -> None:
    def output(tokens: list[int]) -> Any:
        return SimpleNamespace(prompt_token_ids=[], token_ids=tokens)

    one = [output([0] * 20) for _ in range(15)]
    other = [output([0] * i + [1] * (20 - i)) for i in reversed(range(15))]
    pair = compare_devices.Pair.of("a pair", one, other)
    assert pair.equal == "0 of 15" and pair.positions == [*range(15)]
    shown = compare_devices.shortened(pair.positions)
    assert shown == "0, 1, 2, 3, 4, 5, 6, 7, ..., 12, 13, 14"
    assert compare_devices.shortened([4, 9]) == "4, 9"
    assert compare_devices.Pair.of("a pair", one, one).equal == "15 of 15"


def test_random_prompts_are_the_same_in_each_run() -> None:
    options = compare_devices.Options(model="tiny", num_prompts=300)
    prompts: Any = compare_devices.make_prompts(options)
    lengths = {len(prompt) for prompt in prompts}
    assert prompts == compare_devices.make_prompts(options)
    assert (min(lengths), max(lengths), len(prompts)) == (16, 199, 300)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "gpt-5"], "--model: expected one of llama-3-8b"),
        (["--model", "tiny", "--target", "x"], "--target: expected it without --model, got x"),
        (
            ["--model", "tiny", "--dataset", "x.jsonl"],
            "--dataset: expected it without --model, got x.jsonl",
        ),
        (
            ["--tensor-parallel-size", "0,2"],
            "--tensor-parallel-size: expected integers of at least 1",
        ),
    ],
)
def test_bad_input_is_one_sentence(arguments: list[str], sentence: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {sentence}"), result.output
