"""Real shapes of step_metadata, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.bounds import bounds_size
from pallas_kernels.step_metadata.inputs import Inputs


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pass of `rows` rows for each of `batch` requests; the last `masked` are idle.

    one_window, causal: see Inputs
    """

    batch: int
    rows: int
    queries_per_kv: int
    head_dim: int
    window: int | None = None
    masked: int = 0
    pages: int = 32
    block_size: int = 64
    max_model_len: int = 2048
    one_window: bool = False
    causal: bool = True


_LLAMA_8B = Shape(1, 4, queries_per_kv=4, head_dim=128)
_SMOLLM2 = Shape(1, 4, queries_per_kv=3, head_dim=64)
_of = dataclasses.replace

SHAPES = {
    "8b, batch 1, Q 4": _LLAMA_8B,
    "8b, batch 1, Q 1": _of(_LLAMA_8B, rows=1),
    "8b, batch 16, Q 4, window": _of(_LLAMA_8B, batch=16, window=512, masked=2),
    "8b, batch 64, Q 8": _of(_LLAMA_8B, batch=64, rows=8, masked=8),
    "8b, batch 16, 131,072 tokens": _of(_LLAMA_8B, batch=16, pages=2048, max_model_len=131072),
    "8b, batch 16, a block of 7": _of(_LLAMA_8B, batch=16, rows=7, causal=False),
    "8b, batch 16, a block of 8, window": _of(
        _LLAMA_8B, batch=16, rows=8, window=2049, one_window=True
    ),
    "smollm2, batch 1, Q 4": _SMOLLM2,
    "smollm2, batch 64, Q 1": _of(_SMOLLM2, batch=64, rows=1, masked=8),
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return ragged starts, some at the ends of the block table and of the longest context."""
    rng = np.random.default_rng(seed)
    batch, limit = shape.batch, min(shape.max_model_len, shape.pages * shape.block_size)
    start = rng.integers(0, limit, batch)
    start[rng.random(batch) < 0.25] = limit - rng.integers(0, shape.rows + 1)
    num_rows = rng.integers(1, shape.rows + 1, batch)
    num_rows[batch - shape.masked :] = 0
    table = rng.permutation(batch * shape.pages).reshape(batch, shape.pages)
    exponents = -np.arange(0, shape.head_dim, 2) / shape.head_dim
    return Inputs(
        block_table=jnp.asarray(table, jnp.int32),
        start=jnp.asarray(start, jnp.int32),
        num_rows=jnp.asarray(num_rows, jnp.int32),
        step=jnp.asarray(rng.integers(0, 4), jnp.int32),
        rows=shape.rows,
        block_size=shape.block_size,
        max_model_len=shape.max_model_len,
        window=shape.window,
        one_window=shape.one_window,
        causal=shape.causal,
        queries_per_kv=shape.queries_per_kv,
        frequencies=tuple((500000.0**exponents).astype(np.float32).tolist()),
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    A page of each row, starts and counts are read; the results are written.
    """
    integers = shape.batch * (
        2 + shape.rows + 1 + 3 * shape.rows + bounds_size(shape.rows, shape.queries_per_kv)
    )
    return 4 * (integers + 1 + shape.batch * shape.rows * shape.head_dim + shape.head_dim // 2)
