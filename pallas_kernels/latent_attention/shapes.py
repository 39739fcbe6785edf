"""Real shapes of the latent-attention op, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.shapes import ragged
from pallas_kernels.latent_attention.inputs import Inputs
from pallas_kernels.packing import padded_heads


@dataclasses.dataclass(frozen=True)
class Shape:
    """Requests with the last `rows` positions as query rows.

    lengths: tokens in the cache of each request. past_end: rows beyond the last token.
    """

    lengths: tuple[int, ...]
    rows: int
    num_heads: int
    kv_lora_rank: int = 512
    rope_head_dim: int = 64
    block_size: int = 64
    scale: float = 256**-0.5
    past_end: int = 0
    dtype: str = "bfloat16"

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def width(self) -> int:
        return self.kv_lora_rank + self.rope_head_dim

    @property
    def heads(self) -> int:
        """Heads, with those that pad a row for the kernel."""
        return padded_heads(self.rows, self.num_heads)

    @property
    def table_pages(self) -> int:
        """Columns of the block table: the power of two that the longest request needs."""
        needed = -(-max(*self.lengths, 1) // self.block_size)
        return 1 << (needed - 1).bit_length()

    def positions(self) -> np.ndarray:
        """Return positions of the query rows, int32 [batch, rows]."""
        first = np.maximum(np.array(self.lengths) - self.rows + self.past_end, 0)
        return (first[:, None] + np.arange(self.rows)).astype(np.int32)


_GLM = Shape((), 4, num_heads=20)  # GLM-4.7-Flash
_DEEPSEEK_V3 = Shape((), 4, num_heads=128, scale=192**-0.5)


def _of(model: Shape, lengths: tuple[int, ...], rows: int) -> Shape:
    return dataclasses.replace(model, lengths=lengths, rows=rows)


SHAPES = {
    "glm, batch 1, context 400, Q 4": _of(_GLM, ragged(1, 400), 4),
    "glm, batch 1, context 400, Q 6": _of(_GLM, ragged(1, 400), 6),
    "glm, batch 1, context 400, Q 1": _of(_GLM, ragged(1, 400), 1),
    "glm, batch 16, context 400, Q 4": _of(_GLM, ragged(16, 400), 4),
    "glm, batch 16, context 400, Q 6": _of(_GLM, ragged(16, 400), 6),
    "glm, batch 16, context 400, Q 1": _of(_GLM, ragged(16, 400), 1),
    "glm, batch 1, context 4k, Q 4": _of(_GLM, ragged(1, 4096), 4),
    "glm, batch 16, context 4k, Q 4": _of(_GLM, ragged(16, 4096), 4),
    "glm, batch 16, context 4k, Q 6": _of(_GLM, ragged(16, 4096), 6),
    "glm, batch 64, context 4k, Q 4": _of(_GLM, ragged(64, 4096), 4),
    "glm, prefill of 512 rows after 512": _of(_GLM, (1024,), 512),
    "deepseek-v3, batch 1, context 400, Q 4": _of(_DEEPSEEK_V3, ragged(1, 400), 4),
    "deepseek-v3, batch 4, context 4k, Q 4": _of(_DEEPSEEK_V3, ragged(4, 4096), 4),
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers, blocks in random order, and NaN in unwritten cache slots."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    pages = shape.table_pages
    num_blocks = shape.batch * pages + 1
    table = (
        rng.permutation(num_blocks)[: shape.batch * pages]
        .reshape(shape.batch, pages)
        .astype(np.int32)
    )
    written = np.zeros((num_blocks, shape.block_size), bool)
    for blocks, length in zip(table, shape.lengths, strict=True):
        written[blocks] = (
            np.arange(pages * shape.block_size).reshape(pages, shape.block_size) < length
        )
    keys = jax.random.split(jax.random.key(seed), 2)
    cache = jax.random.normal(keys[0], (num_blocks, shape.block_size, 1, shape.width), dtype)
    q = (shape.batch, shape.rows, shape.heads, shape.width)
    unwritten = jnp.asarray(jnp.nan, dtype)
    return Inputs(
        q=jax.random.normal(keys[1], q, dtype),
        cache=jnp.where(jnp.asarray(written)[..., None, None], cache, unwritten),
        block_table=jnp.asarray(table),
        positions=jnp.asarray(shape.positions()),
        seq_lens=jnp.asarray(shape.lengths, dtype=jnp.int32),
        kv_lora_rank=shape.kv_lora_rank,
        scale=shape.scale,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    Every latent that some row sees is read once; queries are read, the output is written.
    """
    seen = np.minimum(shape.positions().max(axis=1) + 1, np.array(shape.lengths)).sum()
    rows = shape.batch * shape.rows * shape.heads
    return (int(seen) * shape.width + rows * (shape.width + shape.kv_lora_rank)) * jnp.dtype(
        shape.dtype
    ).itemsize
