"""Named shapes of truncation, shared by tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Shape:
    batch: int
    rows: int
    vocab: int


SHAPES = {
    "llama3-8b-b1": Shape(1, 4, 128_256),
    "llama3-8b-b64": Shape(64, 4, 128_256),
    "qwen3-8b-b16": Shape(16, 4, 151_936),
    "smollm2-b1": Shape(1, 4, 49_152),
}


def make_inputs(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """Return the op's arguments by name: top-k of 20 to 100 and top-p of 0.8 to 1."""
    rng = np.random.default_rng(seed)
    return {
        "logits": 2.5 * rng.standard_normal((shape.batch, shape.rows, shape.vocab), np.float32),
        "top_k": rng.integers(20, 100, shape.batch).astype(np.int32),
        "top_p": rng.uniform(0.8, 1.0, shape.batch).astype(np.float32),
    }


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes: the logits read once and written once."""
    return 8 * shape.batch * shape.rows * shape.vocab
