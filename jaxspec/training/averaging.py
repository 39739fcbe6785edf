"""Heads of several runs -> one whose weights are their means.

The mean of heads that were trained from each other may accept more than any of them (model soups,
arXiv 2203.05482).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
        _check_tensors(first, tensors, heads[0].path, head.path)
    for name, array in first.items():
        if _is_map(array):
            yield name, array
        else:
            values = [tensors[name].astype(np.float32) for tensors in by_head]
            yield name, np.mean(values, axis=0).astype(ml_dtypes.bfloat16)


def _check_tensors(
    first: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], path: Path, other_path: Path
) -> None:
    """Raise ConfigError unless both heads have tensors of the same shapes, and the same maps."""
    for name in sorted({*first, *other}):
        expected, got = (
            f"the shape {tensors[name].shape}" if name in tensors else "no such tensor"
            for tensors in (first, other)
        )
        if expected != got:
            raise ConfigError(f"{other_path}: {name}: expected {expected} as in {path}, got {got}")
        if _is_map(first[name]) and not np.array_equal(first[name], other[name]):
            raise ConfigError(
                f"{other_path}: {name}: expected the vocabulary of {path}, got another one"
            )


def _is_map(array: np.ndarray) -> bool:
    """Return whether a head's plain tensor is a map of its vocabulary."""
    return array.dtype != ml_dtypes.bfloat16
