"""A head's card: metadata as the hub reads it, before the page."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import ModelCard

from jaxspec.config import ConfigError
from jaxspec.tools.acceptance.rounds import Counts
from jaxspec.tools.acceptance.summary import Case, Result
from jaxspec.training.card import card, write_card

HEADS = sorted((Path(__file__).resolve().parents[2] / "checkpoints").glob("*/training.json"))
pytestmark = pytest.mark.once


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.parent.name)
def test_a_card_begins_with_the_hubs_metadata(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    made = ModelCard(card(path.parent.name, record))
    committed = ModelCard.load(path.parent / "README.md")
    assert made.data.to_dict() == committed.data.to_dict()
    assert made.data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert made.data.license == "apache-2.0" and made.data.tags[0] == record["head"]["method"]
    assert made.text.lstrip().startswith("# EAGLE")
    assert f"jaxspec generate --draft {path.parent.name}\n" in made.text
    head, _, body = str(made).partition("\n---\n")
    assert head.startswith("---\n") and body.strip() == made.text.strip()


def test_a_card_of_a_block_head_names_its_block_and_its_loss() -> None:
    record = json.loads(HEADS[0].read_text(encoding="utf-8"))
    draft, counts = record["draft_config"], record["evaluation"]
    record["head"]["method"] = "dspark"
    blocks = {"windows": [None, None], "draft_block_size": 7, "sample_from_anchor": True}
    record["draft_config"] = {**draft, **blocks}
    record["train_config"] |= {"overlap_weight": 0.9, "tokens_per_block": 16}
    record["evaluation"] = {**counts, "by_prompt_length": {"below 512": counts}}
    made = card("smollm2-135m-instruct-dspark", record)
    assert "# DSpark head" in made and "2 Qwen3 layers that draft 7 tokens a pass" in made
    assert "0.1 cross entropy + 0.9 total variation" in made
    assert "Training-time test" not in made and "| prompt tokens: below 512 |" in made


def acceptance_record(path: Path, temperature: float) -> Path:
    """Write a record of two data sets: 2.5 tokens a round on short prompts, 1.25 on long ones."""

    def result(name: str, prompt_tokens: int, accepted: list[int]) -> dict[str, Any]:
        none = np.zeros(1)
        rounds = np.array([20])
        counts = Counts(
            rounds, rounds, np.array([prompt_tokens]), np.array([accepted]), {}, none, none, none
        )
        return Result(Case(name, temperature, "probabilistic", "greedy", 2), counts).to_dict()

    record = {
        "date": "2026-11-23",
        "devices": [{"kind": "cpu"}],
        "settings": {"dtype": "float32", "max_tokens": 96},
        "num_speculative_tokens": 2,
        "results": [result("short", 90, [18, 12]), result("long", 1500, [5, 0])],
    }
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_a_card_shows_acceptance_by_prompt_length(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    shutil.copy(HEADS[0], head / "training.json")
    write_card(head, acceptance=acceptance_record(tmp_path / "greedy.json", 0.0))
    page = (head / "README.md").read_text(encoding="utf-8")
    assert "| below 512 | 1 | 2.500 ± 0.000 | 1.00 | .900 / .600 |" in page
    assert "| 1024 to 2047 | 1 | 1.250 ± 0.000 | 0.50 | .250 / .000 |" in page
    assert "K = 2, at most 96 tokens, float32, cpu, 2026-11-23" in page
    write_card(head)  # the record keeps them
    assert (head / "README.md").read_text(encoding="utf-8") == page
    with pytest.raises(ConfigError, match="expected acceptance at temperature 0 with K = 2"):
        write_card(head, acceptance=acceptance_record(tmp_path / "sampled.json", 1.0))
