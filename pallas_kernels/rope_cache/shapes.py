"""Real shapes of the rotation and cache write, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dtypes import narrowed
from pallas_kernels.rope_cache.inputs import Inputs

PAD_SLOT = np.iinfo(np.int32).max  # of a masked row: outside every cache


@dataclasses.dataclass(frozen=True)
class Shape:
    """A pass of `rows` rows for each of `batch` requests.

    The last `masked` requests have no cache slots. packed: the queries return packed. fp8: the
    caches are in e4m3, with a scale for each KV head.
    """

    batch: int
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool = False
    packed: bool = True
    masked: int = 0
    block_size: int = 64
    dtype: str = "bfloat16"
    fp8: bool = False

    @property
    def total_rows(self) -> int:
        return self.batch * self.rows


_LLAMA_8B = Shape(1, 4, num_heads=32, num_kv_heads=8, head_dim=128)
_QWEN3_8B = dataclasses.replace(_LLAMA_8B, qk_norm=True)
_QWEN3_0_6B = dataclasses.replace(_QWEN3_8B, num_heads=16)
_SMOLLM2 = Shape(1, 4, num_heads=9, num_kv_heads=3, head_dim=64)
_of = dataclasses.replace

SHAPES = {
    "8b, batch 1, Q 4": _LLAMA_8B,
    "8b, batch 1, Q 1": _of(_LLAMA_8B, rows=1),
    "8b, batch 16, Q 4": _of(_LLAMA_8B, batch=16, masked=2),
    "8b, batch 64, Q 4": _of(_LLAMA_8B, batch=64, masked=8),
    "8b, prefill of 2048 rows": _of(_LLAMA_8B, rows=2048, packed=False),
    "qwen3-8b, batch 16, Q 4": _of(_QWEN3_8B, batch=16, masked=2),
    "qwen3-0.6b, batch 16, Q 8": _of(_QWEN3_0_6B, batch=16, rows=8, masked=2),
    "qwen3-8b, batch 16, context of a block": _of(
        _QWEN3_8B, batch=16, rows=8, num_heads=0, packed=False, masked=2
    ),
    "smollm2, batch 1, Q 4": _SMOLLM2,
    "smollm2, batch 64, Q 3": _of(_SMOLLM2, batch=64, rows=3, masked=8),
    "8b, batch 16, Q 4, fp8": _of(_LLAMA_8B, batch=16, masked=2, fp8=True),
    "8b, prefill of 2048 rows, fp8": _of(_LLAMA_8B, rows=2048, packed=False, fp8=True),
    "qwen3-8b, batch 16, context of a block, fp8": _of(
        _QWEN3_8B, batch=16, rows=8, num_heads=0, packed=False, masked=2, fp8=True
    ),
    "smollm2, batch 1, Q 4, fp8": _of(_SMOLLM2, fp8=True),
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers; most requests' rows cross from one block into another.

    In fp8, large keys and values of the first head saturate.
    """
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(shape.dtype)
    keys = jax.random.split(jax.random.key(seed), 5)
    half = shape.head_dim // 2
    pages = -(-shape.rows // shape.block_size) + 1
    num_blocks = shape.batch * pages
    table = rng.permutation(num_blocks).reshape(shape.batch, pages)
    # The first row takes one of the last `rows` cache slots of its first block.
    first = shape.block_size - 1 - rng.integers(0, min(shape.rows, shape.block_size), shape.batch)
    place = first[:, None] + np.arange(shape.rows)
    blocks = table[np.arange(shape.batch)[:, None], place // shape.block_size]
    slots = blocks * shape.block_size + place % shape.block_size
    slots[shape.batch - shape.masked :] = PAD_SLOT
    angle = (100 + place).reshape(-1, 1) * 10000.0 ** (-np.arange(half) / half)
    cache = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    norms = 1.0 + 0.1 * jax.random.normal(keys[3], (2, shape.head_dim), dtype)
    k_cache, v_cache = (jax.random.normal(key, cache, dtype) for key in keys[1:3])
    k_scale = v_scale = None
    if shape.fp8:
        k_cache, v_cache = (narrowed(x, jnp.float8_e4m3fn) for x in (k_cache, v_cache))
        k_scale = jnp.asarray(rng.uniform(0.005, 0.02, shape.num_kv_heads), jnp.float32)
        k_scale = k_scale.at[0].set(0.003)
        v_scale = k_scale[::-1]
    return Inputs(
        qkv=jax.random.normal(keys[0], (shape.total_rows, width), dtype),
        cos=jnp.asarray(np.cos(angle), jnp.float32),
        sin=jnp.asarray(np.sin(angle), jnp.float32),
        slot_mapping=jnp.asarray(slots.reshape(-1), jnp.int32),
        k_cache=k_cache,
        v_cache=v_cache,
        q_norm=norms[0] if shape.qk_norm else None,
        k_norm=norms[1] if shape.qk_norm else None,
        k_scale=k_scale,
        v_scale=v_scale,
        num_heads=shape.num_heads,
        eps=1e-6 if shape.qk_norm else 0.0,
        pack=shape.rows if shape.packed else None,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    The projections are read once; the queries, and keys and values of rows with a cache slot, are
    written once.
    """
    itemsize = jnp.dtype(shape.dtype).itemsize
    written = (shape.batch - shape.masked) * shape.rows
    heads = shape.total_rows * (2 * shape.num_heads + 2 * shape.num_kv_heads) * itemsize
    heads += written * 2 * shape.num_kv_heads * (1 if shape.fp8 else itemsize)
    return heads * shape.head_dim + shape.total_rows * shape.head_dim * 4
