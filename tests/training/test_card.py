"""A head's card: metadata as the hub reads it, before the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from jaxspec.training.card import card

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
    assert "Training-time test" not in made and "| prompts below 512 tokens |" in made
