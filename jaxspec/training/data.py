"""Training data: chats as flat token arrays, prompts, the overlap check, batches of one length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar
from zipfile import is_zipfile

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from jaxspec.config import ConfigError
from jaxspec.loading.new_file import replaced

NGRAM = 13
OPEN_ROWS = 16  # rows that packing still looks at: a few per cent of padding
Array = TypeVar("Array", np.ndarray, jax.Array)


@dataclass(frozen=True)
class Chats:
    """Token sequences, each a rendered prompt and the target's answer.

    tokens:       uint16 or int32 [total], all sequences end to end
    offsets:      int64 [chats + 1], where each begins
    answer_start: int32 [chats], index within the sequence of the answer's first token
    temperature:  float32 [chats], what the answer was sampled at; 0 is greedy
    """

    tokens: np.ndarray
    offsets: np.ndarray
    answer_start: np.ndarray
    temperature: np.ndarray

    def __len__(self) -> int:
        return len(self.answer_start)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [chats]"""
        return np.diff(self.offsets)

    @property
    def num_answer_tokens(self) -> int:
        return int((self.lengths - self.answer_start).sum())

    def sequence(self, i: int) -> np.ndarray:
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def select(self, indices: np.ndarray) -> Chats:
        """Some of the chats, in the order of indices."""
        return pack(
            [self.sequence(i) for i in indices],
            self.answer_start[indices],
            self.temperature[indices],
            self.tokens.dtype,
        )

    def split(self, held_out: int) -> tuple[Chats, Chats]:
        """(all but the last held_out chats, those)."""
        indices = np.arange(len(self))
        return self.select(indices[: len(self) - held_out]), self.select(
            indices[len(self) - held_out :]
        )

    def answer_counts(self, vocab: int) -> np.ndarray:
        """How often each token occurs in the answers, int64 [vocab]."""
        position = np.arange(len(self.tokens)) - np.repeat(self.offsets[:-1], self.lengths)
        answers = self.tokens[position >= np.repeat(self.answer_start, self.lengths)]
        return np.bincount(answers, minlength=vocab)

    def save(self, path: Path) -> None:
        """Write a .npz, whole or not at all."""
        with replaced(path) as f:
            np.savez_compressed(f, **{f.name: getattr(self, f.name) for f in fields(self)})

    @classmethod
    def load(cls, path: Path, vocab: int) -> Chats:
        """Read what `save` wrote; ConfigError if it is damaged, or of another vocabulary.

        vocab: size of the target's vocabulary, which every token id is below
        """
        if not path.is_file():
            raise _wrong_chats(path, "a folder" if path.exists() else "no such file")
        if not is_zipfile(path):
            raise _wrong_chats(path, "a file that is no .npz")
        try:
            with np.load(path, allow_pickle=False) as arrays:
                chats = cls(**{f.name: arrays[f.name] for f in fields(cls)})
        except Exception as e:  # zipfile, zlib and NumPy raise anything for damaged bytes
            reason = (str(e) or "no message").splitlines()[0]
            raise _wrong_chats(path, f"{type(e).__name__}: {reason}") from e
        if problem := chats.problem(vocab):
            raise _wrong_chats(path, problem)
        return chats

    def problem(self, vocab: int) -> str | None:
        """Return why these cannot be chats in a vocabulary of this size, or None."""
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        kinds = {name: np.integer for name in arrays} | {"temperature": np.floating}
        for name, array in arrays.items():
            if array.ndim != 1 or not np.issubdtype(array.dtype, kinds[name]):
                return f"{name} of {array.dtype} {list(array.shape)}"
        count, total = len(self.answer_start), len(self.tokens)
        if len(self.offsets) != count + 1 or len(self.temperature) != count:
            return f"{len(self.offsets)} offsets and {len(self.temperature)} temperatures"
        ends = self.offsets[0], self.offsets[-1]
        if ends != (0, total) or (self.offsets[1:] < self.offsets[:-1]).any():
            return f"offsets that are no ascending cut of {total} tokens"
        if ((self.answer_start < 0) | (self.answer_start > self.lengths)).any():
            return "an answer that starts outside its chat"
        if not (np.isfinite(self.temperature) & (self.temperature >= 0)).all():
            return "a temperature that is negative or no number"
        if total and not 0 <= self.tokens.min() <= self.tokens.max() < vocab:
            low, high = self.tokens.min(), self.tokens.max()
            return f"token ids {low} to {high} for a vocabulary of {vocab}"
        return None


def _wrong_chats(path: Path, got: str) -> ConfigError:
    return ConfigError(f"{path}: expected chats written by `jaxspec train generate`, got {got}")


def pack(
    sequences: Sequence[np.ndarray],
    answer_start: ArrayLike,
    temperature: ArrayLike,
    dtype: DTypeLike,
) -> Chats:
    """Chats from one token array each."""
    offsets = np.concatenate([[0], np.cumsum([len(s) for s in sequences])]).astype(np.int64)
    tokens = np.concatenate(sequences).astype(dtype) if sequences else np.zeros(0, dtype)
    return Chats(
        tokens, offsets, np.asarray(answer_start, np.int32), np.asarray(temperature, np.float32)
    )


def merge(parts: Sequence[Chats], seed: int = 0) -> Chats:
    """Return all chats of several files in random order, each once.

    Two processes may answer the same prompt with the same text.
    """
    seen: set[bytes] = set()
    sequences: list[np.ndarray] = []
    answer_start: list[int] = []
    temperature: list[float] = []
    for part in parts:
        for i in range(len(part)):
            sequence = part.sequence(i)
            if (key := sequence.tobytes()) not in seen:
                seen.add(key)
                sequences.append(sequence)
                answer_start.append(int(part.answer_start[i]))
                temperature.append(float(part.temperature[i]))
    dtype = np.result_type(*(part.tokens.dtype for part in parts))
    merged = pack(sequences, answer_start, temperature, dtype)
    return merged.select(np.random.default_rng(seed).permutation(len(merged)))


def token_dtype(vocab: int) -> type:
    """The smallest of uint16 and int32 that holds the ids."""
    return np.uint16 if vocab <= 1 << 16 else np.int32


class Batch(NamedTuple, Generic[Array]):
    """Rows of chats, all of one length, on the host (NumPy arrays) or on devices.

    tokens:    int32 [batch, rows], chat after chat, zeros behind the last one
    documents: int32 [batch, rows], the number of each token's chat in its row; -1 behind the last
    answers:   bool [batch, rows], tokens of answers, which are worth a loss
    anchors:   int32 [batch, anchors], rows that blocks of drafts begin at, -1 for no block;
               [batch, 0] for a draft of a token a pass
    """

    tokens: Array
    documents: Array
    answers: Array
    anchors: Array


def batch_of(chats: Chats, indices: np.ndarray, rows: int) -> Batch[np.ndarray]:
    """The chats of indices, one a row, cut or padded to rows tokens."""
    return packed_batch(chats, [[int(i)] for i in indices], rows)


def packed_batch(chats: Chats, members: Sequence[Sequence[int]], rows: int) -> Batch[np.ndarray]:
    """Return the chats of members[i] one after the other in row i, cut or padded to rows tokens."""
    shape = len(members), rows
    tokens, documents = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
    answers = np.zeros(shape, bool)
    for row, indices in enumerate(members):
        begin = 0
        for number, i in enumerate(indices):
            sequence = chats.sequence(i)[: rows - begin]
            end = begin + len(sequence)
            tokens[row, begin:end], documents[row, begin:end] = sequence, number
            answers[row, begin + chats.answer_start[i] : end] = True
            begin = end
    return Batch(tokens, documents, answers, np.zeros((len(members), 0), np.int32))


def fill_rows(lengths: np.ndarray, order: np.ndarray, rows: int) -> list[list[int]]:
    """Return the chats of each row: first fit, in this order, into the last OPEN_ROWS rows.

    lengths: of all chats, by index. A chat longer than rows has a row to itself.
    """
    members: list[list[int]] = []
    room: list[int] = []
    for i in order:
        length = min(int(lengths[i]), rows)
        first_open = max(len(room) - OPEN_ROWS, 0)
        row = next((r for r in range(first_open, len(room)) if room[r] >= length), None)
        if row is None:
            row = len(room)
            members.append([])
            room.append(rows)
        members[row].append(int(i))
        room[row] -= length
    return members


def rows_of(chats: Chats, indices: np.ndarray, rows: int, *, packed: bool) -> list[list[int]]:
    """Return the chats of each row of rows tokens: several to a row if packed, else one."""
    return fill_rows(chats.lengths, indices, rows) if packed else [[int(i)] for i in indices]


def epoch(
    chats: Chats,
    buckets: Sequence[int],
    tokens_per_batch: int,
    rng: np.random.Generator,
    multiple: int = 1,
    *,
    packed: bool = False,
) -> Iterator[Batch[np.ndarray]]:
    """Yield every chat once in random order, in batches of about tokens_per_batch.

    Chats of a batch share the smallest bucket that holds them: one compiled train step a bucket,
    and little padding. A batch holds a multiple of `multiple` rows, so that it can be cut evenly.
    A bucket's last rows, too few for a batch, wait for another epoch. packed: rows hold as many
    chats of their bucket as fit.
    """
    ordered = sorted(buckets)
    place = np.minimum(np.searchsorted(ordered, chats.lengths), len(ordered) - 1)
    plan: list[tuple[int, list[list[int]]]] = []
    for bucket, rows in enumerate(ordered):
        indices = rng.permutation(np.flatnonzero(place == bucket))
        members = rows_of(chats, indices, rows, packed=packed)
        size = max(tokens_per_batch // rows // multiple, 1) * multiple
        plan += [(rows, members[i : i + size]) for i in range(0, len(members) - size + 1, size)]
    if not plan:
        raise ConfigError(
            f"training data: expected enough chats for one batch of {tokens_per_batch} tokens, "
            f"got {len(chats)} chats"
        )
    for which in rng.permutation(len(plan)):
        rows, members = plan[which]
        yield packed_batch(chats, members, rows)


def batches(
    chats: Chats,
    buckets: Sequence[int],
    tokens_per_batch: int,
    seed: int,
    multiple: int = 1,
    *,
    packed: bool = False,
) -> Iterator[tuple[int, Batch[np.ndarray]]]:
    """(epoch, batch) without end."""
    number = 0
    while True:
        rng = np.random.default_rng((seed, number))
        for batch in epoch(chats, buckets, tokens_per_batch, rng, multiple, packed=packed):
            yield number, batch
        number += 1


def ngrams(text: str, n: int = NGRAM) -> set[tuple[str, ...]]:
    """The n-word sequences of a text, or all words of a shorter one; no case, no punctuation."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(max(len(words) - n, 0) + 1)} if words else set()


class OverlapFilter:
    """Refuses prompts that share an n-gram with one that is kept out, and counts them.

    A prompt of fewer words is refused if it has those of one that is kept out.

    sources: what records call the files of these prompts
    """

    def __init__(
        self, kept_out: Iterable[str], n: int = NGRAM, *, sources: Sequence[str] = ()
    ) -> None:
        self.n, self.removed, self.sources = n, 0, tuple(sources)
        self.known: set[tuple[str, ...]] = set().union(*(ngrams(p, n) for p in kept_out))

    def admits(self, prompt: str) -> bool:
        overlaps = not self.known.isdisjoint(ngrams(prompt, self.n))
        self.removed += overlaps
        return not overlaps
