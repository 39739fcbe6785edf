"""Prompts of files are cut into shards that lose none; what a folder of chats says of itself is
read with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxspec import models
from jaxspec.config import ConfigError
from jaxspec.training import chat_files
from jaxspec.training.chat_files import CHATS, REPORT, file_prompts, read_chats
from jaxspec.training.chat_target import ChatTarget
from jaxspec.training.data import Chats, OverlapFilter, pack
from jaxspec.training.dry_run import CHAT, HashedWords
from jaxspec.training.generation import GenerationConfig, GenerationReport
from tests.training.conftest import TARGET_ATTENTION, VOCAB


def test_each_prompt_is_in_one_shard(tmp_path: Path) -> None:
    cfg = models.llama.LlamaConfig(
        "llama", VOCAB, 32, 48, 5, TARGET_ATTENTION, 1e-5, 256, tie_word_embeddings=True
    )
    target = ChatTarget("tiny", cfg, {}, CHAT, HashedWords(VOCAB), ())
    texts = [
        f"{word} is a word" for word in ["one", "two", "three", "four", "five", "six", "seven"]
    ]
    known = "this one is in the evaluation set and has rather more words than thirteen"
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, part in zip(files, (texts[:3], [*texts[3:], known]), strict=True):
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in part))
    overlaps = [OverlapFilter([known]) for _ in range(3)]
    shards = [
        file_prompts(GenerationConfig(), target, [*map(str, files)], (i, 3), overlap)
        for i, overlap in enumerate(overlaps)
    ]
    assert [len(shard) for shard in shards] == [3, 2, 2] and [
        overlap.removed for overlap in overlaps
    ] == [1, 1, 1]
    expected = sorted(target.words.encode_chat(text).tolist() for text in texts)
    assert sorted(ids.tolist() for shard in shards for ids in shard) == expected


def test_chats_are_merged_with_their_reports(tmp_path: Path) -> None:
    for i, temperature in enumerate((0.0, 0.7)):
        folder = tmp_path / f"g{i}"
        folder.mkdir()
        pack([np.arange(4 + i), np.arange(9)], [2, 3], [temperature, 0.0], np.uint16).save(
            folder / CHATS
        )
    (tmp_path / "g1" / REPORT).write_text(json.dumps({"num_chats": 2}))
    chats, about = read_chats([tmp_path / "g0" / CHATS, tmp_path / "g1" / CHATS], VOCAB)
    assert sorted(chats.lengths.tolist()) == [4, 5, 9]  # the second chat of each is the same
    assert about["generation"] == [{"num_chats": 2}]
    counts = {"files": 2, "chats": 3, "tokens": 18, "answer_tokens": 11, "greedy_share": 2 / 3}
    assert about["chats"] == counts


def test_chats_that_were_finished_before_an_error_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = pack([np.arange(4), np.arange(9)], [2, 3], [0.0, 0.7], np.uint16)

    def failing(*_: Any, keep: Any, **__: Any) -> None:
        keep(chats, GenerationReport(num_chats=2))
        raise KeyboardInterrupt

    monkeypatch.setattr(chat_files, "generate_chats", failing)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out")
    found, about = read_chats([tmp_path / "out" / CHATS], VOCAB)
    assert sorted(found.lengths.tolist()) == [4, 9]
    assert about["generation"][0]["num_chats"] == 2
    assert about["generation"][0]["kept_out"] == ["a.jsonl"]


@pytest.mark.parametrize("num", [0, 1])
def test_a_run_that_ends_early_keeps_the_chats_of_an_earlier_one(
    num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short it writes beside them; without a finished chat it writes nothing."""
    whole = pack([np.arange(4), np.arange(9)], [2, 3], [0.0, 0.7], np.uint16)
    part = pack([np.arange(5)][:num], [2][:num], [0.0][:num], np.uint16)

    def ending(chats: Chats, error: type[BaseException] | None) -> Callable[..., Any]:
        def generate(*_: Any, keep: Any, **__: Any) -> tuple[Chats, GenerationReport]:
            report = GenerationReport(num_chats=len(chats))
            if error is not None:
                keep(chats, report)
                raise error
            return chats, report

        return generate

    monkeypatch.setattr(chat_files, "generate_chats", ending(whole, None))
    write(tmp_path)
    first = (tmp_path / CHATS).read_bytes()
    error = KeyboardInterrupt if num else None
    monkeypatch.setattr(chat_files, "generate_chats", ending(part, error))
    for _ in range(2):
        with pytest.raises(
            error or ConfigError, match=None if num else "^generate: expected a finished chat"
        ):
            write(tmp_path)
    assert (tmp_path / CHATS).read_bytes() == first
    cut = {path.name for path in tmp_path.glob("chats.cut*")}
    assert cut == ({"chats.cut1.npz", "chats.cut2.npz"} if num else set())


def write(folder: Path) -> None:
    cfg: Any = None
    chat_files.write_chats(
        GenerationConfig(),
        ChatTarget("tiny", cfg, {}, CHAT, HashedWords(VOCAB), ()),
        folder,
        prompt_sets=[],
        shard=(0, 1),
        overlap=OverlapFilter([], sources=["a.jsonl"]),
        minutes=1.0,
        max_chats=9,
        show=0,
        log=lambda line: None,
    )
