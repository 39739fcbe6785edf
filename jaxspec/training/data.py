"""Training data: chats as flat token arrays, prompts, the overlap check, batches of one length."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import jax
import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from jaxspec.config import ConfigError
from jaxspec.training.files import replaced

NGRAM = 13
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
    return ConfigError(f"{path}: expected chats written by `train_draft.py generate`, got {got}")


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
    """Chats of one length, on the host (NumPy arrays) or on devices.

    tokens:       int32 [batch, rows], zeros behind each chat
    lengths:      int32 [batch], tokens of each chat
    answer_start: int32 [batch], index of the first token worth a loss
    """

    tokens: Array
    lengths: Array
    answer_start: Array


def batch_of(chats: Chats, indices: np.ndarray, rows: int) -> Batch[np.ndarray]:
    """The chats of indices, cut or padded to rows tokens."""
    lengths = np.minimum(chats.lengths[indices], rows).astype(np.int32)
    tokens = np.zeros((len(indices), rows), np.int32)
    for row, (i, length) in enumerate(zip(indices, lengths, strict=True)):
        tokens[row, :length] = chats.tokens[chats.offsets[i] : chats.offsets[i] + length]
    return Batch(tokens, lengths, chats.answer_start[indices].astype(np.int32))


def epoch(
    chats: Chats,
    buckets: Sequence[int],
    tokens_per_batch: int,
    rng: np.random.Generator,
    multiple: int = 1,
) -> Iterator[Batch[np.ndarray]]:
    """Yield every chat once in random order, in batches of about tokens_per_batch.

    Chats of a batch share the smallest bucket that holds them: one compiled train step a bucket,
    and little padding. A batch holds a multiple of `multiple` chats, so that it can be cut evenly.
    A bucket's last chats, too few for a batch, wait for another epoch.
    """
    ordered = sorted(buckets)
    place = np.minimum(np.searchsorted(ordered, chats.lengths), len(ordered) - 1)
    plan: list[tuple[int, np.ndarray]] = []
    for bucket, rows in enumerate(ordered):
        indices = rng.permutation(np.flatnonzero(place == bucket))
        size = max(tokens_per_batch // rows // multiple, 1) * multiple
        plan += [(rows, indices[i : i + size]) for i in range(0, len(indices) - size + 1, size)]
    if not plan:
        raise ConfigError(
            f"training data: expected enough chats for one batch of {tokens_per_batch} tokens, "
            f"got {len(chats)} chats"
        )
    for which in rng.permutation(len(plan)):
        rows, indices = plan[which]
        yield batch_of(chats, indices, rows)


def batches(
    chats: Chats, buckets: Sequence[int], tokens_per_batch: int, seed: int, multiple: int = 1
) -> Iterator[tuple[int, Batch[np.ndarray]]]:
    """(epoch, batch) without end."""
    number = 0
    while True:
        for batch in epoch(
            chats, buckets, tokens_per_batch, np.random.default_rng((seed, number)), multiple
        ):
            yield number, batch
        number += 1


def ngrams(text: str, n: int = NGRAM) -> set[tuple[str, ...]]:
    """The n-word sequences of a text, case and punctuation dropped."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


class OverlapFilter:
    """Refuses prompts that share an n-gram with an evaluation set, and counts them."""

    def __init__(self, evaluation_prompts: Iterable[str], n: int = NGRAM) -> None:
        self.n, self.removed = n, 0
        self.known: set[tuple[str, ...]] = set().union(*(ngrams(p, n) for p in evaluation_prompts))

    def admits(self, prompt: str) -> bool:
        overlaps = not self.known.isdisjoint(ngrams(prompt, self.n))
        self.removed += overlaps
        return not overlaps
