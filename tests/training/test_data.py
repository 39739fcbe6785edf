"""Chats, batches, prompts, the overlap check, and the draft's vocabulary."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from jaxspec.config import ConfigError
from jaxspec.training.data import (
    Chats,
    OverlapFilter,
    batch_of,
    batches,
    epoch,
    fill_rows,
    merge,
    ngrams,
    pack,
    token_dtype,
)
from jaxspec.training.vocabulary import choose_vocabulary, coverage, vocabulary_maps


def some_chats(lengths: list[int]):
    """Chat i is i, i, ... with its answer in the last two tokens."""
    sequences = [np.full(n, i) for i, n in enumerate(lengths)]
    return pack(sequences, [n - 2 for n in lengths], np.zeros(len(lengths)), np.uint16)


def test_chats_come_back_from_disk_and_split(tmp_path: Path) -> None:
    chats = some_chats([5, 3, 9])
    chats.save(tmp_path / "chats.npz")
    loaded = type(chats).load(tmp_path / "chats.npz", 8)
    assert loaded.tokens.dtype == np.uint16
    training, held_out = loaded.split(1)
    assert [training.sequence(i).tolist() for i in range(2)] == [
        [0] * 5,
        [1] * 3,
    ] and held_out.sequence(0).tolist() == [2] * 9
    assert training.num_answer_tokens == 4 and held_out.answer_start.tolist() == [7]


def test_merged_files_hold_each_chat_once_and_are_shuffled() -> None:
    first, second = some_chats(list(range(3, 40))), some_chats([3, 4, 9])
    merged = merge([first, second])
    sequences = [merged.sequence(i).tolist() for i in range(len(merged))]
    assert len(merged) == 38 and sorted(sequences) == sorted(
        [[i] * (i + 3) for i in range(37)] + [[2] * 9]
    )
    assert sequences != sorted(sequences) and all(
        len(s) - a == 2 for s, a in zip(sequences, merged.answer_start, strict=True)
    )


def test_batches_can_be_cut_evenly() -> None:
    sizes = {
        batch.tokens.shape
        for batch in epoch(
            some_chats([4] * 20 + [8] * 20), (4, 8), 26, np.random.default_rng(0), multiple=2
        )
    }
    assert sizes == {(6, 4), (2, 8)}


def test_only_answers_are_counted() -> None:
    chats = pack([np.asarray([1, 1, 2]), np.asarray([3, 2, 2, 1])], [2, 1], [0, 0], np.uint16)
    assert chats.answer_counts(5).tolist() == [0, 1, 3, 0, 0]


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, np.uint16), (65537, np.int32)])
def test_token_dtype_holds_every_id(vocab: int, dtype: type) -> None:
    assert token_dtype(vocab) is dtype and np.iinfo(dtype).max >= vocab - 1


def test_an_epoch_shows_each_chat_once_in_the_smallest_bucket_that_holds_it() -> None:
    lengths = [3, 4, 5, 8, 7, 2, 12, 4, 6, 8]
    chats = some_chats(lengths)
    seen = []
    for batch in epoch(chats, (8, 4), 8, np.random.default_rng(0)):
        rows = batch.tokens.shape[1]
        assert batch.tokens.size == 8
        for tokens, documents, answers in zip(
            batch.tokens, batch.documents, batch.answers, strict=True
        ):
            which, length = int(tokens[0]), int((documents == 0).sum())
            seen.append(which)
            assert length == min(lengths[which], rows) and not documents[:length].any()
            assert (documents[length:] == -1).all()
            assert np.flatnonzero(answers).tolist() == list(range(lengths[which] - 2, length))
            assert (tokens[:length] == which).all() and not tokens[length:].any()
            assert rows == (4 if lengths[which] <= 4 else 8)
    assert sorted(seen) == list(range(10))


def test_epochs_differ_and_a_seed_repeats_them() -> None:
    chats = some_chats([4] * 8)

    def order(seed: int) -> list[tuple[int, list[int]]]:
        stream = batches(chats, (4,), 8, seed)
        return [
            (number, batch.tokens[:, 0].tolist())
            for number, batch in (next(stream) for _ in range(8))
        ]

    first = order(0)
    assert first == order(0) and [n for n, _ in first] == [0] * 4 + [1] * 4
    assert [b for _, b in first[:4]] != [b for _, b in first[4:]]


def test_too_few_chats_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="expected enough chats for one batch of 64 tokens, got 2 chats"
    ):
        next(batches(some_chats([4, 4]), (8,), 64, 0))


def test_packed_rows_hold_each_chat_once_and_no_more_than_fits() -> None:
    lengths = [3, 4, 5, 8, 7, 2, 12, 4, 6, 8]
    chats = some_chats(lengths)
    seen, rows_used = [], 0
    for batch in epoch(chats, (8, 16), 8, np.random.default_rng(0), packed=True):
        for tokens, documents, answers in zip(
            batch.tokens, batch.documents, batch.answers, strict=True
        ):
            rows_used += 1
            end = 0
            for number in range(documents.max() + 1):  # one chat after the other
                inside = np.flatnonzero(documents == number)
                which, length = int(tokens[inside[0]]), len(inside)
                seen.append(which)
                assert inside.tolist() == list(range(end, end + length))
                assert length == lengths[which] and (tokens[inside] == which).all()
                assert np.flatnonzero(answers[inside]).tolist() == [length - 2, length - 1]
                end += length
            assert (documents[end:] == -1).all() and not answers[end:].any()
    assert sorted(seen) == list(range(10))
    assert rows_used < 10


def test_first_fit_leaves_less_padding_than_a_chat_a_row() -> None:
    lengths = np.random.default_rng(0).integers(100, 600, 500)
    members = fill_rows(lengths, np.arange(500), 2048)
    assert sorted(i for row in members for i in row) == list(range(500))
    assert max(lengths[row].sum() for row in members) <= 2048
    assert lengths.sum() / (2048 * len(members)) > 0.95


def test_batch_of_cuts_what_is_too_long() -> None:
    batch = batch_of(some_chats([3, 9]), np.asarray([1]), 6)
    assert (
        batch.documents.tolist() == [[0] * 6]
        and batch.tokens.tolist() == [[1] * 6]
        and not batch.answers.any()
    )


def test_chats_that_are_absent_or_damaged_are_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "chats.npz"
    said = "expected chats written by `jaxspec train generate`, got"
    with pytest.raises(ConfigError, match=f"{said} no such file$"):
        Chats.load(path, 8)
    with pytest.raises(ConfigError, match=f"{said} a folder$"):
        Chats.load(tmp_path, 8)
    path.write_bytes(b"PK not a zip")
    with pytest.raises(ConfigError, match=f"{said} a file that is no .npz$"):
        Chats.load(path, 8)
    np.savez(path, tokens=np.zeros(1))
    path.write_bytes(path.read_bytes().replace(b"NUMPY", b"NUMPZ"))
    with pytest.raises(ConfigError, match=f"{said} BadZipFile: ") as error:
        Chats.load(path, 8)
    assert "\n" not in str(error.value)


WRONG_CHATS = {  # name of an array: what is in its place, and the sentence's end
    "tokens": (np.asarray([0, 1, 8]), "token ids 0 to 8 for a vocabulary of 8"),
    "negative": (np.asarray([0, -1, 7]), "token ids -1 to 7 for a vocabulary of 8"),
    "float": (np.asarray([0.0, 1.0, 2.0]), r"tokens of float64 \[3\]"),
    "offsets": (np.asarray([0, 4]), "no ascending cut of 3 tokens"),
    "descending": (np.asarray([0, 5, 3]), "no ascending cut of 3 tokens"),
    "answer_start": (np.asarray([4]), "an answer that starts outside its chat"),
    "temperature": (np.asarray([np.nan]), "a temperature that is negative or no number"),
    "matrix": (np.zeros((1, 1)), r"temperature of float64 \[1, 1\]"),
    "two": (np.zeros(2), "2 offsets and 2 temperatures"),
}
NAMES = {
    "negative": "tokens",
    "float": "tokens",
    "descending": "offsets",
    "matrix": "temperature",
    "two": "temperature",
}


@pytest.mark.parametrize("case", WRONG_CHATS)
def test_chats_that_cannot_be_are_one_sentence(tmp_path: Path, case: str) -> None:
    array, message = WRONG_CHATS[case]
    path = tmp_path / "chats.npz"
    right = {
        "tokens": np.asarray([0, 1, 7]),
        "offsets": np.asarray([0, 3]),
        "answer_start": np.asarray([1]),
        "temperature": np.asarray([0.5]),
    }
    np.savez(path, **right)
    assert len(Chats.load(path, 8)) == 1
    np.savez(path, **right | {NAMES.get(case, case): array})
    if case == "descending":
        np.savez(
            path,
            **right
            | {"offsets": array, "answer_start": np.asarray([1, 0])}
            | {"temperature": np.zeros(2)},
        )
    with pytest.raises(ConfigError, match=f"{path}: expected chats written by .*{message}$"):
        Chats.load(path, 8)


def test_a_save_that_dies_leaves_the_earlier_chats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chats.npz"
    some_chats([5, 3]).save(path)
    before = path.read_bytes()

    def die(file, **arrays):
        file.write(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", die)
    with pytest.raises(KeyboardInterrupt):
        some_chats([5, 3, 4]).save(path)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["chats.npz"]


def test_overlap_is_a_shared_13_gram_whatever_case_and_punctuation() -> None:
    words = [f"word{i}" for i in range(20)]
    overlap = OverlapFilter([" ".join(words)])
    assert not overlap.admits("Before, " + ", ".join(words[3:16]).upper() + "!")
    assert overlap.admits("before " + " ".join(words[3:15]) + " after")
    assert overlap.admits(" ".join(reversed(words))) and overlap.admits("")
    assert overlap.removed == 1
    assert len(ngrams(" ".join(words))) == 8 and ngrams("?!") == set()


def test_a_short_prompt_overlaps_one_of_the_same_words() -> None:
    overlap = OverlapFilter(["Write a haiku about rain.", "?"])
    assert not overlap.admits("write a haiku, about rain")
    assert overlap.admits("write a haiku about rain and snow") and overlap.admits("!")
    assert overlap.removed == 1


def test_vocabulary_is_the_most_frequent_tokens_and_those_always_in() -> None:
    counts = np.asarray([0, 9, 1, 1, 0, 7, 0, 0])
    ids = choose_vocabulary(counts, 4, [7])
    assert ids.tolist() == [1, 2, 5, 7] and coverage(counts, ids) == 17 / 18
    d2t, t2d = vocabulary_maps(ids, 8)
    assert (np.arange(4) + d2t).tolist() == ids.tolist() and d2t.dtype == np.int64
    assert np.flatnonzero(t2d).tolist() == ids.tolist() and t2d.dtype == bool and t2d.shape == (8,)


@pytest.mark.parametrize(("size", "always"), [(1, [0, 1]), (9, []), (4, [8])])
def test_a_vocabulary_that_cannot_be_is_refused(size: int, always: list[int]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        choose_vocabulary(np.ones(8, np.int64), size, always)
