"""Real shapes of the attention op, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.inputs import FP8, Inputs
from pallas_kernels.dtypes import narrowed


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests with the last `rows` positions as query rows.

    lengths:  tokens in the cache of each request
    pages:    columns of the block table; None: the power of two that the longest request needs
    past_end: rows beyond the last token
    chunk:    as many neighbours are tiles of one request's prefill chunk, and share their blocks
    fp8:      keys and values are stored in e4m3, with a scale for each KV head
    """

    lengths: tuple[int, ...]
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 64
    pages: int | None = None
    window: int | None = None
    sinks: bool = False
    past_end: int = 0
    chunk: int = 1
    dtype: str = "bfloat16"
    fp8: bool = False

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache: one more than the requests have."""
        return -(-self.batch // self.chunk) * self.table_pages + 1

    @property
    def table_pages(self) -> int:
        needed = -(-max(*self.lengths, 1) // self.block_size)
        return self.pages or 1 << (needed - 1).bit_length()

    def requests(self) -> np.ndarray:
        """Return the request of each row of the batch, int64 [batch]."""
        return np.arange(self.batch) // self.chunk

    def positions(self) -> np.ndarray:
        """Return positions of the query rows, int32 [batch, rows]."""
        first = np.maximum(np.array(self.lengths) - self.rows + self.past_end, 0)
        return (first[:, None] + np.arange(self.rows)).astype(np.int32)

    def window_start(self) -> np.ndarray:
        """Return the first position that each row sees, int32 [batch, rows]."""
        positions = self.positions()
        return (
            np.zeros_like(positions)
            if self.window is None
            else np.maximum(positions - self.window + 1, 0)
        )


def ragged(batch: int, longest: int) -> tuple[int, ...]:
    """Return lengths from 7/8 of the longest up to it, with no two equal neighbours."""
    return tuple(longest - i * 37 % max(longest // 8, 1) for i in range(batch))


def tiles(start: int, past: int, rows: int = 48) -> tuple[int, ...]:
    """Return lengths of the tiles of a chunk of the rows start .. past."""
    return tuple(range(start + rows, past + 1, rows))


_LLAMA_8B = Shape((), 4, num_heads=32, num_kv_heads=8, head_dim=128)
_SMOLLM2 = Shape((), 4, num_heads=9, num_kv_heads=3, head_dim=64)
_GPT_OSS = Shape((), 4, num_heads=64, num_kv_heads=8, head_dim=64, sinks=True)


_QWEN3_0_6B = dataclasses.replace(_LLAMA_8B, num_heads=16)
_QWEN3_14B = dataclasses.replace(_LLAMA_8B, num_heads=40)


def _of(model: Shape, lengths: tuple[int, ...], rows: int, **changes: int) -> Shape:
    return dataclasses.replace(model, lengths=lengths, rows=rows, **changes)


SHAPES = {
    "8b, batch 1, context 400, Q 4": _of(_LLAMA_8B, ragged(1, 400), 4),
    "8b, batch 1, context 400, Q 8": _of(_LLAMA_8B, ragged(1, 400), 8),
    "8b, batch 1, context 400, Q 6": _of(_LLAMA_8B, ragged(1, 400), 6),
    "8b, batch 1, context 400, Q 1": _of(_LLAMA_8B, ragged(1, 400), 1),
    "8b, batch 16, context 400, Q 4": _of(_LLAMA_8B, ragged(16, 400), 4),
    "8b, batch 64, context 400, Q 4": _of(_LLAMA_8B, ragged(64, 400), 4),
    "8b, batch 16, context 400, Q 8": _of(_LLAMA_8B, ragged(16, 400), 8),
    "8b, batch 64, context 400, Q 8": _of(_LLAMA_8B, ragged(64, 400), 8),
    "8b, batch 1, context 4k, Q 4": _of(_LLAMA_8B, ragged(1, 4096), 4),
    "8b, batch 16, context 4k, Q 4": _of(_LLAMA_8B, ragged(16, 4096), 4),
    "8b, batch 1, context 32k, Q 4": _of(_LLAMA_8B, ragged(1, 32768), 4),
    "8b, batch 16, context 32k, Q 4": _of(_LLAMA_8B, ragged(16, 32768), 4),
    "8b, prefill of 2048 rows after 2048": _of(_LLAMA_8B, (4096,), 2048),
    "8b, prefill of 2 x 85 tiles of 48 rows": _of(_LLAMA_8B, 2 * tiles(0, 4080), 48, chunk=85),
    "8b, prefill of 4 x 42 tiles of 48 rows after 2048": _of(
        _LLAMA_8B, 4 * tiles(2048, 4096), 48, chunk=42
    ),
    "smollm2, prefill of 2 x 42 tiles of 48 rows": _of(_SMOLLM2, 2 * tiles(0, 2048), 48, chunk=42),
    "gpt-oss, prefill of 42 tiles of 48 rows after 2048": _of(
        _GPT_OSS, tiles(2048, 4096), 48, chunk=42
    ),
    "gpt-oss, prefill of 42 tiles of 48 rows after 2048, window 128": _of(
        _GPT_OSS, tiles(2048, 4096), 48, chunk=42, window=128
    ),
    "smollm2, batch 1, context 400, Q 4": _of(_SMOLLM2, ragged(1, 400), 4),
    "smollm2, batch 16, context 400, Q 4": _of(_SMOLLM2, ragged(16, 400), 4),
    "gpt-oss, batch 16, context 4k, Q 4": _of(_GPT_OSS, ragged(16, 4096), 4),
    "gpt-oss, batch 16, context 4k, Q 4, window 128": _of(
        _GPT_OSS, ragged(16, 4096), 4, window=128
    ),
    "8b, batch 1, context 400, Q 4, fp8": _of(_LLAMA_8B, ragged(1, 400), 4, fp8=True),
    "8b, batch 64, context 400, Q 4, fp8": _of(_LLAMA_8B, ragged(64, 400), 4, fp8=True),
    "8b, batch 16, context 32k, Q 4, fp8": _of(_LLAMA_8B, ragged(16, 32768), 4, fp8=True),
    "8b, batch 16, context 32k, Q 1, fp8": _of(_LLAMA_8B, ragged(16, 32768), 1, fp8=True),
    "8b, prefill of 2 x 85 tiles of 48 rows, fp8": _of(
        _LLAMA_8B, 2 * tiles(0, 4080), 48, chunk=85, fp8=True
    ),
    "qwen3-14b, prefill of 42 tiles of 48 rows, fp8": _of(  # in two warpgroups
        _QWEN3_14B, tiles(0, 2048), 48, chunk=42, fp8=True
    ),
    "qwen3-0.6b, batch 16, context 4k, Q 8, fp8": _of(_QWEN3_0_6B, ragged(16, 4096), 8, fp8=True),
    "smollm2, batch 1, context 400, Q 4, fp8": _of(_SMOLLM2, ragged(1, 400), 4, fp8=True),
    "gpt-oss, batch 16, context 4k, Q 4, fp8": _of(_GPT_OSS, ragged(16, 4096), 4, fp8=True),
    "gpt-oss, batch 16, context 4k, Q 4, window 128, fp8": _of(
        _GPT_OSS, ragged(16, 4096), 4, window=128, fp8=True
    ),
    "gpt-oss, prefill of 42 tiles of 48 rows after 2048, window 128, fp8": _of(
        _GPT_OSS, tiles(2048, 4096), 48, chunk=42, window=128, fp8=True
    ),
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers, blocks in random order, and NaN in unwritten cache slots.

    In fp8, one code of 200 is the largest number, as where values saturate.
    """
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

    def filled(key: jax.Array, scale: np.ndarray | None) -> jax.Array:
        values = jax.random.normal(key, cache, dtype)
        if scale is not None:
            numbers = values.astype(jnp.float32) / jnp.asarray(scale)[:, None]
            values = narrowed(jnp.where(jnp.abs(values) > 2.8, 1e4, numbers), FP8)
        unwritten = jnp.asarray(jnp.nan, values.dtype)
        return jnp.where(jnp.asarray(written)[..., None, None], values, unwritten)

    k_scale, v_scale = (
        rng.uniform(0.005, 0.02, (2, shape.num_kv_heads)).astype(np.float32)
        if shape.fp8
        else (None, None)
    )

    sinks = 2.0 * jax.random.normal(keys[3], (shape.num_heads,), jnp.float32)
    q = (shape.batch, shape.rows, shape.num_heads, shape.head_dim)
    return Inputs(
        q=jax.random.normal(keys[0], q, dtype),
        k_cache=filled(keys[1], k_scale),
        v_cache=filled(keys[2], v_scale),
        block_table=jnp.asarray(table),
        positions=jnp.asarray(shape.positions()),
        seq_lens=jnp.asarray(shape.lengths, dtype=jnp.int32),
        window_start=jnp.asarray(shape.window_start()),
        sinks=sinks if shape.sinks else None,
        k_scale=None if k_scale is None else jnp.asarray(k_scale),
        v_scale=None if v_scale is None else jnp.asarray(v_scale),
        scale=shape.head_dim**-0.5,
        window=shape.window,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    Every key and value that some row sees is read once; queries are read, the output is written.
    """
    itemsize = jnp.dtype(shape.dtype).itemsize
    of_cache = 1 if shape.fp8 else itemsize
    last = np.minimum(shape.positions().max(axis=1) + 1, shape.lengths)
    first = shape.window_start().min(axis=1)
    of_each = [shape.requests() == request for request in range(shape.requests()[-1] + 1)]
    keys = sum(max(int(last[mine].max() - first[mine].min()), 0) for mine in of_each)
    rows = 2 * shape.batch * shape.rows * shape.num_heads
    return (2 * keys * shape.num_kv_heads * of_cache + rows * itemsize) * shape.head_dim


def flops(shape: Shape) -> int:
    """Return the arithmetic of q . k and weights . v, of the keys that each row sees."""
    seen = (
        np.minimum(shape.positions() + 1, np.array(shape.lengths)[:, None]) - shape.window_start()
    )
    return 4 * shape.head_dim * shape.num_heads * int(np.maximum(seen, 0).sum())
