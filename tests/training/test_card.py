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
