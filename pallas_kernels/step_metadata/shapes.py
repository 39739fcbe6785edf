"""Real shapes of a pass's metadata, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.bounds import bounds_size


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pass of `rows` rows a request; group: query heads a KV head. masked: requests that are idle."""

    batch: int
    rows: int
    group: int
    head_dim: int
    window: int | None = None
    masked: int = 0
    pages: int = 32
    block_size: int = 64
    max_model_len: int = 2048


_LLAMA_8B: dict[str, Any] = {"group": 4, "head_dim": 128}
_SMOLLM2: dict[str, Any] = {"group": 3, "head_dim": 64}

SHAPES = {
    "8b, batch 1, Q 4": Shape(1, 4, **_LLAMA_8B),
    "8b, batch 1, Q 1": Shape(1, 1, **_LLAMA_8B),
    "8b, batch 16, Q 4, window": Shape(16, 4, window=512, masked=2, **_LLAMA_8B),
    "8b, batch 64, Q 8": Shape(64, 8, masked=8, **_LLAMA_8B),
    "8b, batch 16, 131,072 tokens": Shape(16, 4, pages=2048, max_model_len=131072, **_LLAMA_8B),
    "smollm2, batch 1, Q 4": Shape(1, 4, **_SMOLLM2),
    "smollm2, batch 64, Q 1": Shape(64, 1, masked=8, **_SMOLLM2),
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Arguments of the public op: ragged starts, some of them at the ends of the block table and of the longest context."""
    rng = np.random.default_rng(seed)
    batch, limit = shape.batch, min(shape.max_model_len, shape.pages * shape.block_size)
    start = rng.integers(0, limit, batch)
    start[rng.random(batch) < 0.25] = limit - rng.integers(0, shape.rows + 1)
    num_rows = rng.integers(1, shape.rows + 1, batch)
    num_rows[batch - shape.masked :] = 0
    return {
        "block_table": jnp.asarray(
            rng.permutation(batch * shape.pages).reshape(batch, shape.pages), jnp.int32
        ),
        "start": jnp.asarray(start, jnp.int32),
        "num_rows": jnp.asarray(num_rows, jnp.int32),
        "step": jnp.asarray(rng.integers(0, 4), jnp.int32),
        "rows": shape.rows,
        "block_size": shape.block_size,
        "max_model_len": shape.max_model_len,
        "window": shape.window,
        "group": shape.group,
        "frequencies": tuple(
            (500000.0 ** (-np.arange(0, shape.head_dim, 2) / shape.head_dim))
            .astype(np.float32)
            .tolist()
        ),
    }


def bytes_moved(shape: Shape) -> int:
    """The fewest bytes of device memory: a page of each row in, starts and counts in, what the op makes out."""
    integers = shape.batch * (
        2 + shape.rows + 1 + 3 * shape.rows + bounds_size(shape.rows, shape.group)
    )
    return 4 * (integers + 1 + shape.batch * shape.rows * shape.head_dim + shape.head_dim // 2)
