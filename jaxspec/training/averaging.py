"""Heads of several runs -> one whose weights are their means.

The mean of heads that were trained from each other may accept more than any of them (model soups,
arXiv 2203.05482).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxspec.config import ConfigError
from jaxspec.drafts.head_layout import is_head
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.conversion import write_converted
from jaxspec.loading.head_conversion import plain_tensors

# Keys of config.json that say nothing of a head's shape.
ABOUT = {"quantization_config", "speculators_config", "speculators_version", "transformers_version"}


def average_heads(out: Path, heads: Sequence[Path]) -> None:
    """Write a head in bfloat16 with the means of the weights of two heads or more.

    out: the folder to write, which must not exist

    ConfigError unless all heads have the same config, tensors and vocabulary.
    """
    if len(heads) < 2:
        raise ConfigError(f"heads: expected two or more, got {len(heads)}")
    opened = [open_checkpoint(head) for head in heads]
    for head in opened:
        if not is_head(head.config, head.tensors):
            raise ConfigError(f"{head.path}: expected a draft head, got a whole model")
    first = opened[0]
    for other in opened[1:]:
        _check_alike(first, other)
    write_converted(first, out, None, _means(opened), copies=False)


def _check_alike(first: Checkpoint, other: Checkpoint) -> None:
    """Raise ConfigError for a head that differs from the first in more than its weights."""
    for name in sorted({*first.config, *other.config} - ABOUT):
        expected, got = first.config.get(name), other.config.get(name)
        if expected != got:
            raise ConfigError(
                f"{other.path}: {name}: expected {expected!r} as in {first.path}, got {got!r}"
            )


def _means(heads: Sequence[Checkpoint]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the mean of each tensor; maps of the vocabulary have to be equal."""
    by_head = [dict(plain_tensors(head)) for head in heads]
    first = by_head[0]
    for head, tensors in zip(heads[1:], by_head[1:], strict=True):
        for name in sorted({*first, *tensors}):
            expected, got = (
                f"the shape {a[name].shape}" if name in a else "no such tensor"
                for a in (first, tensors)
            )
            if expected != got:
                raise ConfigError(
                    f"{head.path}: {name}: expected {expected} as in {heads[0].path}, got {got}"
                )
    for name, array in first.items():
        same = [tensors[name] for tensors in by_head]
        if array.dtype != ml_dtypes.bfloat16:  # a map
            for head, other in zip(heads, same, strict=True):
                if not np.array_equal(array, other):
                    raise ConfigError(
                        f"{head.path}: {name}: expected the vocabulary of {heads[0].path}, got "
                        "another one"
                    )
            yield name, array
        else:
            mean = np.mean([one.astype(np.float32) for one in same], axis=0)
            yield name, mean.astype(ml_dtypes.bfloat16)
