"""The draft's vocabulary: the target tokens that the target writes most often."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from jaxspec.config import ConfigError


def choose_vocabulary(counts: np.ndarray, size: int, always: Iterable[int]) -> np.ndarray:
    """Return the target ids of the draft's vocabulary, int64 [size], ascending.

    counts [vocab]: how often each target token occurs in the text to be drafted
    always: ids that are in whatever their count (end of text, the chat template's tokens)

    Ties go to the smaller id.
    """
    vocab = len(counts)
    kept = sorted(set(always))
    if not len(kept) <= size <= vocab:
        raise ConfigError(
            f"draft_vocab_size: expected a size from {len(kept)} (the tokens that are always in) "
            f"to the target's {vocab}, got {size}"
        )
    if kept and not 0 <= kept[0] <= kept[-1] < vocab:
        raise ConfigError(f"draft vocabulary: expected token ids below {vocab}, got {kept}")
    order = np.argsort(-counts.astype(np.int64), kind="stable")
    rest = order[~np.isin(order, kept)][: size - len(kept)]
    return np.sort(np.concatenate([np.asarray(kept, np.int64), rest])).astype(np.int64)


def vocabulary_maps(ids: np.ndarray, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (d2t int64 [draft_vocab], t2d bool [vocab]) of ascending target ids.

    d2t is an offset: target id = draft id + d2t[draft id].
    """
    t2d = np.zeros(vocab, bool)
    t2d[ids] = True
    return ids.astype(np.int64) - np.arange(len(ids)), t2d


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    """Return the share of the counted tokens that the draft can propose.

    It is an upper bound on the draft's acceptance.
    """
    return float(counts[ids].sum() / max(counts.sum(), 1))
