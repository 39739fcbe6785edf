"""Real shapes of the norms and cache write of latent attention, shared by tests and benchmarks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latent_cache.inputs import Inputs
from pallas_kernels.rope_cache.shapes import PAD_SLOT


@dataclasses.dataclass(frozen=True)
class Shape:
    """The last `masked` rows have no cache slot. q_lora_rank 0: no query latent."""

    rows: int
    q_lora_rank: int = 768
    kv_lora_rank: int = 512
    rope_head_dim: int = 64
    masked: int = 0
    block_size: int = 64
    dtype: str = "bfloat16"


SHAPES = {
    "glm, batch 1, Q 4": Shape(4),
    "glm, batch 1, Q 1": Shape(1),
    "glm, batch 16, Q 4": Shape(64, masked=8),
    "glm, batch 16, Q 6": Shape(96, masked=6),
    "glm, prefill of 2048 rows": Shape(2048),
    "deepseek-v3, batch 16, Q 4": Shape(64, q_lora_rank=1536),
}


def make_inputs(shape: Shape, seed: int) -> Inputs:
    """Return normal random numbers, with cache slots in random order."""
    rng = np.random.default_rng(seed)
    dtype, half = jnp.dtype(shape.dtype), shape.rope_head_dim // 2
    width = shape.kv_lora_rank + shape.rope_head_dim
    keys = jax.random.split(jax.random.key(seed), 4)
    num_blocks = -(-shape.rows // shape.block_size) + 2
    slots = rng.permutation(num_blocks * shape.block_size)[: shape.rows]
    slots[shape.rows - shape.masked :] = PAD_SLOT
    angle = (100 + np.arange(shape.rows))[:, None] * 10000.0 ** (-np.arange(half) / half)

    def gain(key: jax.Array, size: int) -> jax.Array:
        return (1.0 + 0.1 * jax.random.normal(key, (size,))).astype(dtype)

    return Inputs(
        latents=jax.random.normal(keys[0], (shape.rows, shape.q_lora_rank + width), dtype),
        cos=jnp.asarray(np.cos(angle), jnp.float32),
        sin=jnp.asarray(np.sin(angle), jnp.float32),
        slot_mapping=jnp.asarray(slots, jnp.int32),
        cache=jax.random.normal(keys[1], (num_blocks, shape.block_size, 1, width), dtype),
        kv_norm=gain(keys[2], shape.kv_lora_rank),
        q_norm=gain(keys[3], shape.q_lora_rank) if shape.q_lora_rank else None,
        eps=1e-6,
    )


def bytes_moved(shape: Shape) -> int:
    """Return the fewest bytes of device memory.

    The projections are read once; the query latents, and the entries of rows with a cache slot,
    are written once.
    """
    width, written = shape.kv_lora_rank + shape.rope_head_dim, shape.rows - shape.masked
    numbers = shape.rows * (2 * shape.q_lora_rank + width) + written * width
    return numbers * jnp.dtype(shape.dtype).itemsize + shape.rows * shape.rope_head_dim * 4
