"""Anchors: the rows of a batch that blocks of drafts begin at."""

from __future__ import annotations

import numpy as np

from jaxspec.training.data import Batch


def with_anchors(
    batch: Batch[np.ndarray], tokens_per_block: int, rng: np.random.Generator
) -> Batch[np.ndarray]:
    """Return the batch with an anchor for every tokens_per_block tokens of a row.

    An anchor is a token of an answer that another token of the same document follows, as the last
    known token of a round is. Rows that have fewer such tokens get -1 for the others.
    """
    is_anchor = np.zeros_like(batch.answers)
    is_anchor[:, :-1] = (
        batch.answers[:, :-1]
        & batch.answers[:, 1:]
        & (batch.documents[:, :-1] == batch.documents[:, 1:])
    )
    rows = is_anchor.shape[1]
    count = max(rows // tokens_per_block, 1)
    draw = np.where(is_anchor, rng.random(is_anchor.shape), 2.0)
    chosen = np.argsort(draw, axis=1, kind="stable")[:, :count].astype(np.int32)
    real = np.take_along_axis(is_anchor, chosen, axis=1)
    return batch._replace(anchors=np.where(real, chosen, np.int32(-1)))
