"""The base model that a checkpoint's card names."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxspec.loading.card import base_model
from jaxspec.loading.resolve import CHECKPOINTS

pytestmark = pytest.mark.once


def test_the_cards_of_the_committed_heads_name_their_target() -> None:
    heads = [path.parent for path in CHECKPOINTS.glob("*/README.md")]
    assert {base_model(head) for head in heads} == {"HuggingFaceTB/SmolLM2-135M-Instruct"}


@pytest.mark.parametrize(
    ("page", "name"),
    [
        ("---\nbase_model:\n- owner/name\n---\ntext", "owner/name"),
        ("---\nbase_model: [a/b, c/d]\n---\n", None),  # of a merge
        ("---\nbase_model: ''\n---\n", None),
        ("---\nlicense: mit\n---\n", None),
        ("---\nbase_model: [\n---\n", None),  # no YAML
        ("---\n- a list\n---\n", None),
        ("no front matter", None),
        (b"\xff\xfe\x00", None),
        (None, None),
    ],
)
def test_a_card_names_one_model_or_nothing(
    page: str | bytes | None, name: str | None, tmp_path: Path
) -> None:
    if page is not None:
        (tmp_path / "README.md").write_bytes(page.encode() if isinstance(page, str) else page)
    assert base_model(tmp_path) == name
