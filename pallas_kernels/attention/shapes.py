"""Real shapes of the attention op, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Shape:
    """lengths: tokens in the cache, one a request. Query rows are the last `rows` positions, `past_end` of them beyond the last token.

    chunk: as many neighbours are tiles of one request's prefill chunk, so they have the same blocks.
    """

    lengths: tuple[int, ...]
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 64
    pages: int | None = (
        None  # columns of the block table; None: the power of two that the longest request needs
    )
    window: int | None = None
    sinks: bool = False
    past_end: int = 0
    chunk: int = 1
    dtype: str = "bfloat16"

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def num_blocks(self) -> int:
        """One more than the requests have."""
        return -(-self.batch // self.chunk) * self.table_pages + 1

    @property
    def table_pages(self) -> int:
        needed = -(-max(*self.lengths, 1) // self.block_size)
        return self.pages or 1 << (needed - 1).bit_length()

    def requests(self) -> np.ndarray:
        """int64 [batch], which request a row of the batch is of"""
        return np.arange(self.batch) // self.chunk

    def positions(self) -> np.ndarray:
        """int32 [batch, rows]"""
        first = np.maximum(np.array(self.lengths) - self.rows + self.past_end, 0)
        return (first[:, None] + np.arange(self.rows)).astype(np.int32)

    def window_start(self) -> np.ndarray:
        """int32 [batch, rows]"""
        positions = self.positions()
        return (
            np.zeros_like(positions)
            if self.window is None
            else np.maximum(positions - self.window + 1, 0)
        )


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    """Lengths from 7/8 of the longest up to it, no two neighbours alike."""
    return tuple(longest - i * 37 % max(longest // 8, 1) for i in range(batch))


def tiles(start: int, past: int, rows: int = 48) -> tuple[int, ...]:
    """Lengths of the tiles of a chunk of the rows start .. past."""
    return tuple(range(start + rows, past + 1, rows))


_LLAMA_8B: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_SMOLLM2: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
_GPT_OSS: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "sinks": True}

SHAPES = {
    "8b, batch 1, context 400, Q 4": Shape(ragged(1, 400), 4, **_LLAMA_8B),
    "8b, batch 1, context 400, Q 1": Shape(ragged(1, 400), 1, **_LLAMA_8B),
    "8b, batch 16, context 400, Q 4": Shape(ragged(16, 400), 4, **_LLAMA_8B),
    "8b, batch 64, context 400, Q 4": Shape(ragged(64, 400), 4, **_LLAMA_8B),
    "8b, batch 1, context 4k, Q 4": Shape(ragged(1, 4096), 4, **_LLAMA_8B),
    "8b, batch 16, context 4k, Q 4": Shape(ragged(16, 4096), 4, **_LLAMA_8B),
    "8b, batch 1, context 32k, Q 4": Shape(ragged(1, 32768), 4, **_LLAMA_8B),
    "8b, batch 16, context 32k, Q 4": Shape(ragged(16, 32768), 4, **_LLAMA_8B),
    "8b, prefill of 2048 rows after 2048": Shape((4096,), 2048, **_LLAMA_8B),
    "8b, prefill of 2 x 85 tiles of 48 rows": Shape(2 * tiles(0, 4080), 48, chunk=85, **_LLAMA_8B),
    "8b, prefill of 4 x 42 tiles of 48 rows after 2048": Shape(
        4 * tiles(2048, 4096), 48, chunk=42, **_LLAMA_8B
    ),
    "smollm2, prefill of 2 x 42 tiles of 48 rows": Shape(
        2 * tiles(0, 2048), 48, chunk=42, **_SMOLLM2
    ),
    "gpt-oss, prefill of 42 tiles of 48 rows after 2048": Shape(
        tiles(2048, 4096), 48, chunk=42, **_GPT_OSS
    ),
    "gpt-oss, prefill of 42 tiles of 48 rows after 2048, window 128": Shape(
        tiles(2048, 4096), 48, chunk=42, window=128, **_GPT_OSS
    ),
    "smollm2, batch 1, context 400, Q 4": Shape(ragged(1, 400), 4, **_SMOLLM2),
    "smollm2, batch 16, context 400, Q 4": Shape(ragged(16, 400), 4, **_SMOLLM2),
    "gpt-oss, batch 16, context 4k, Q 4": Shape(ragged(16, 4096), 4, **_GPT_OSS),
    "gpt-oss, batch 16, context 4k, Q 4, window 128": Shape(
        ragged(16, 4096), 4, window=128, **_GPT_OSS
    ),
}


def make_inputs(shape: Shape, seed: int) -> dict[str, Any]:
    """Arguments of the public op: normal random numbers, blocks in random order, NaN in every slot that nobody has written."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    pages = shape.table_pages
    num_blocks = shape.num_blocks
    table = rng.permutation(num_blocks)[:-1].reshape(-1, pages).astype(np.int32)[shape.requests()]
    written = np.zeros((num_blocks, shape.block_size), bool)
    for blocks, length in zip(table, shape.lengths, strict=True):
        slots = np.arange(pages * shape.block_size).reshape(pages, shape.block_size)
        written[blocks] |= slots < length

    keys = jax.random.split(jax.random.key(seed), 4)
    cache = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)

    def filled(key: jax.Array) -> jax.Array:
        return jnp.where(
            jnp.asarray(written)[..., None, None],
            jax.random.normal(key, cache, dtype),
            jnp.asarray(jnp.nan, dtype),
        )

    sinks = 2.0 * jax.random.normal(keys[3], (shape.num_heads,), jnp.float32)
    return {
        "q": jax.random.normal(
            keys[0], (shape.batch, shape.rows, shape.num_heads, shape.head_dim), dtype
        ),
        "k_cache": filled(keys[1]),
        "v_cache": filled(keys[2]),
        "block_table": jnp.asarray(table),
        "positions": jnp.asarray(shape.positions()),
        "seq_lens": jnp.asarray(shape.lengths, dtype=jnp.int32),
        "window_start": jnp.asarray(shape.window_start()),
        "sinks": sinks if shape.sinks else None,
        "scale": shape.head_dim**-0.5,
        "window": shape.window,
    }


def bytes_moved(shape: Shape) -> int:
    """The fewest bytes of device memory: every key and value that some row sees once, the query, the output."""
    itemsize = jnp.dtype(shape.dtype).itemsize
    last = np.minimum(shape.positions().max(axis=1) + 1, shape.lengths)
    first = shape.window_start().min(axis=1)
    of_each = [shape.requests() == request for request in range(shape.requests()[-1] + 1)]
    keys = sum(max(int(last[mine].max() - first[mine].min()), 0) for mine in of_each)
    rows = 2 * shape.batch * shape.rows * shape.num_heads
    return (2 * keys * shape.num_kv_heads + rows) * shape.head_dim * itemsize


def flops(shape: Shape) -> int:
    """Of queries times keys and weights times values, of the keys that each row sees."""
    seen = (
        np.minimum(shape.positions() + 1, np.array(shape.lengths)[:, None]) - shape.window_start()
    )
    return 4 * shape.head_dim * shape.num_heads * int(np.maximum(seen, 0).sum())
