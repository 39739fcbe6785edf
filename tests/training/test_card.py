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
from jaxspec.training.card import TITLES, card, weight_format, write_card

CHECKPOINTS = Path(__file__).resolve().parents[2] / "checkpoints"
HEADS = sorted(CHECKPOINTS.glob("*/training.json"))
METHOD, RECORD = "eagle", CHECKPOINTS / "smollm2-135m-instruct-eagle" / "training.json"
pytestmark = pytest.mark.once


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.parent.name)
def test_a_card_begins_with_the_hubs_metadata(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    made = ModelCard(card(path.parent.name, record))
    committed = ModelCard.load(path.parent / "README.md")
    assert made.data.to_dict() == committed.data.to_dict()
    data: Any = made.data
    assert data.base_model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert data.license == "apache-2.0" and data.tags[0] == record["head"]["method"]
    assert made.text.lstrip().startswith(f"# {TITLES[record['head']['method']]} head for ")
    assert f"jaxspec generate --draft {path.parent.name}\n" in made.text
    head, _, body = str(made).partition("\n---\n")
    assert head.startswith("---\n") and body.strip() == made.text.strip()


# Lines of a committed card that are written by hand, or that its record lacks the settings of.
BY_HAND = (
    "| target | ",
    "First turns in the chat template",
    "| prompts | mean",
    "    jaxspec train ",
    "11,498 user's turns were dropped",
)


@pytest.mark.parametrize("path", HEADS, ids=lambda path: path.parent.name)
def test_the_figures_of_a_committed_card_are_those_of_its_record(path: Path) -> None:
    record = json.loads(path.read_text(encoding="utf-8"))
    made = card(path.parent.name, record, weights=weight_format(path.parent))
    committed = (path.parent / "README.md").read_text(encoding="utf-8")
    runs = [line for line in made.splitlines() if line.startswith("| 80 prompts, ")]
    other = [line for line in made.splitlines() if line not in committed and line not in runs]
    assert [line for line in other if not line.startswith(BY_HAND)] == []
    assert len(runs) == (2 if record["head"]["method"] == "eagle" else 0)
    assert all(line.partition("K = 3 | ")[2] in committed for line in runs)
    removed = sum(run["removed_by_overlap"] for run in record["generation"])
    says = {1: "1 prompt was removed because it shares"}.get(
        removed, f"{removed} prompts were removed because they share"
    )
    assert f" {says} 13 consecutive words with " in made


def test_a_card_says_how_much_context_a_head_sees() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert "| context |" not in card("head", record)
    record["draft_config"]["sliding_window"] = 1024
    assert "| context | the last 1,024 tokens |" in card("head", record)


@pytest.mark.parametrize(
    ("windows", "seen"),
    [
        ([320, 320], "| context | the last 320 tokens |"),
        ([None, 320], "| context | the last 320 tokens in 1 of 2 layers |"),
        ([None, None], None),
    ],
)
def test_a_card_says_how_much_context_a_block_head_sees(
    windows: list[int | None], seen: str | None
) -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record["draft_config"] |= {
        "windows": windows,
        "draft_block_size": 7,
        "sample_from_anchor": True,
    }
    made = card("head", record)
    assert seen in made if seen else "| context |" not in made


def test_a_card_of_a_block_head_names_its_block_and_its_loss() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
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


def test_a_card_says_how_the_weights_are_stored(head: Path) -> None:
    write_card(head)
    assert "`model.safetensors`, bfloat16)" in (head / "README.md").read_text()
    stored = {"quant_method": "fp8", "weight_block_size": [128, 64]}
    (head / "config.json").write_text(json.dumps({"quantization_config": stored}))
    write_card(head)
    page = (head / "README.md").read_text()
    assert "matrices in float8 with a scale for each 128 x 64 block" in page
    assert "bfloat16)" not in page.partition("## Acceptance")[0]
    (head / "config.json").write_text(json.dumps({"quantization_config": {"bits": 8}}))
    with pytest.raises(ConfigError, match="config.json: expected a weight_block_size of two sizes"):
        write_card(head)


def acceptance_record(path: Path, temperature: float, **settings: str) -> Path:
    """Write a record of two data sets: 2.5 tokens a round on short prompts, 1.25 on long ones.

    The first has another K too.
    """

    def result(name: str, prompt_tokens: int, accepted: list[int]) -> dict[str, Any]:
        none = np.zeros(1)
        rounds = np.array([20])
        counts = Counts(
            rounds, rounds, np.array([prompt_tokens]), np.array([accepted]), {}, none, none, none
        )
        return Result(
            Case(name, temperature, "probabilistic", "greedy", len(accepted)), counts
        ).to_dict()

    record = {
        "date": "2026-11-23",
        "devices": [{"kind": "cpu"}],
        "settings": {
            "dtype": "float32",
            "max_tokens": 96,
            "draft": "elsewhere/head",
            "method": METHOD,
            **settings,
        },
        "num_speculative_tokens": 2,
        "results": [
            result("short", 90, [11]),
            result("short", 90, [18, 12]),
            result("long", 1500, [5, 0]),
        ],
    }
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def test_a_card_shows_acceptance_by_prompt_length(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    shutil.copy(RECORD, head / "training.json")
    write_card(head, acceptance=acceptance_record(tmp_path / "greedy.json", 0.0))
    page = (head / "README.md").read_text(encoding="utf-8")
    assert "| below 512 | 1 | 2.500 ± 0.000 | 1.00 | .900 / .600 |" in page
    assert "| 1024 to 2047 | 1 | 1.250 ± 0.000 | 0.50 | .250 / .000 |" in page
    assert "K = 2, at most 96 tokens, float32, cpu, 2026-11-23" in page
    write_card(head)  # the record keeps them
    assert (head / "README.md").read_text(encoding="utf-8") == page
    with pytest.raises(ConfigError, match="expected acceptance at temperature 0 with K = 2"):
        write_card(head, acceptance=acceptance_record(tmp_path / "sampled.json", 1.0))


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "head"
    folder.mkdir()
    shutil.copy(RECORD, folder / "training.json")
    return folder


def test_acceptance_of_another_head_is_refused(head: Path, tmp_path: Path) -> None:
    before = (head / "training.json").read_text(encoding="utf-8")
    (tmp_path / "other" / "head").mkdir(parents=True)
    of_others = (
        ({"method": "eagle3"}, "of this eagle head, got that of a draft with method 'eagle3'"),
        ({"draft": "checkpoints/another"}, "of the head .*, got that of 'checkpoints/another'"),
        ({"draft": str(tmp_path / "other" / "head")}, "of the head .*, got that of '.*other/head'"),
    )
    for settings, message in of_others:
        measured = acceptance_record(tmp_path / "other.json", 0.0, **settings)
        with pytest.raises(ConfigError, match=f"{measured}: expected acceptance {message}"):
            write_card(head, acceptance=measured)
    assert (head / "training.json").read_text(encoding="utf-8") == before
    write_card(head, acceptance=acceptance_record(tmp_path / "own.json", 0.0, draft=str(head)))


def test_an_acceptance_file_without_figures_is_one_sentence(head: Path, tmp_path: Path) -> None:
    measured = acceptance_record(tmp_path / "none.json", 0.0)
    record = json.loads(measured.read_text(encoding="utf-8"))
    for result in record["results"]:
        result["counts_per_prompt"]["rounds"] = [0]
    measured.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{measured}: expected rounds of prompts of known len"):
        write_card(head, acceptance=measured)
    measured.write_text(json.dumps({"results": []}), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{measured}: expected what `jaxspec acceptance"):
        write_card(head, acceptance=measured)
    assert not (head / "README.md").exists()


def test_a_record_without_ranges_is_one_sentence(head: Path) -> None:
    path = head / "training.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["acceptance_by_length"]["by_prompt_length"] = {}
    path.write_text(json.dumps(record), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{path}: expected the record of a training run"):
        write_card(head)


def test_a_card_says_of_an_evaluation_what_its_record_says() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    page = card("head", record)
    assert "| 80 prompts, bfloat16, K = 3 | 2.529 (10,294 of 20,202 drafts" in page
    assert "| 80 prompts, float32, K = 3 | " in page
    assert "MT-bench" not in page and "256 tokens" not in page
    record["evaluation"] |= {"prompts_from": "questions.jsonl", "max_tokens": 64}
    known = "| 80 prompts of questions.jsonl, bfloat16, K = 3, at most 64 tokens | 2.529 "
    assert known in card("head", record)
    del record["evaluation"], record["evaluations"]
    assert "Not evaluated." in card("head", record)


def test_a_card_names_the_longest_chat_of_all_runs() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record["generation"][1]["config"]["max_len"] = 700
    assert "No chat is longer than 700 tokens" in card("head", record)


def test_a_card_names_the_prompts_that_chats_keep_out() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    record["generation"][0]["kept_out"] = ["a.jsonl"]
    record["generation"][1]["kept_out"] = ["a.jsonl", "b.jsonl"]
    said = "13 consecutive words with prompts of a.jsonl and b.jsonl, or repeat a shorter one of"
    assert said in card("head", record)


def test_a_later_evaluation_joins_the_record(head: Path, tmp_path: Path) -> None:
    later = json.loads((head / "training.json").read_text(encoding="utf-8"))["evaluation"]
    later |= {"mean_acceptance_length": 1.875, "prompts": 7, "max_tokens": 9}
    (tmp_path / "later.json").write_text(json.dumps({"evaluation": later}), encoding="utf-8")
    write_card(head, [tmp_path / "later.json"])
    assert "| 7 prompts, bfloat16, K = 3, at most 9 tokens | 1.875 (" in (
        (head / "README.md").read_text(encoding="utf-8")
    )
    record = json.loads((head / "training.json").read_text(encoding="utf-8"))
    assert len(record["evaluations"]) == 2 and record["evaluations"][1] == later
