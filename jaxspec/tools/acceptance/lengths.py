"""The ranges of prompt lengths that acceptance is counted in.

A head drafts worse in contexts that are longer than those it was trained on, and a mean over short
prompts does not show it. An answer adds its own tokens to the context.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

ENDS = (512, 1024, 2048, 4096, 8192)  # tokens of a prompt; each begins the next range
RANGES = (
    f"below {ENDS[0]}",
    *(f"{low} to {high - 1}" for low, high in pairwise(ENDS)),
    f"from {ENDS[-1]}",
)


def length_range(num_tokens: int) -> str:
    """Return the name of the range, one of RANGES, that a prompt of num_tokens is in."""
    return RANGES[bisect_right(ENDS, num_tokens)]


def by_range(lengths: Iterable[int]) -> dict[str, np.ndarray]:
    """Return the indices of the prompts of each range that has some, shortest range first.

    lengths: tokens of each prompt
    """
    names = np.array([length_range(n) for n in lengths])
    return {name: found for name in RANGES if len(found := np.flatnonzero(names == name))}
