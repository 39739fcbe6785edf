"""Inputs of norm_and_write."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.types import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Projections of some rows, their rotation, and where they go in the paged cache.

    latents:      [rows, q_lora_rank + kv_lora_rank + rope_head_dim]: the query's latent, the
                  key's, and the key to rotate, side by side
    cos, sin:     float32 [rows, rope_head_dim / 2]; halves are paired (Hugging Face's rotate_half
                  layout)
    slot_mapping: int32 [rows], block * block_size + offset; a cache slot outside the cache writes
                  nothing (a masked row)
    cache:        [num_blocks, block_size, 1, kv_lora_rank + rope_head_dim]
    kv_norm:      [kv_lora_rank], the gain of the key latent's RMS norm
    q_norm:       [q_lora_rank], the gain of the query latent's; None if there is no such latent
    eps:          of both norms
    """

    latents: jax.Array
    cos: jax.Array
    sin: jax.Array
    slot_mapping: jax.Array
    cache: jax.Array
    kv_norm: jax.Array
    q_norm: jax.Array | None = None
    eps: float = field(metadata=STATIC)

    @property
    def ranks(self) -> tuple[int, int, int]:
        """(q_lora_rank, kv_lora_rank, rope_head_dim); q_lora_rank 0 without a query latent."""
        kv_rank = self.kv_norm.shape[0]
        q_rank = 0 if self.q_norm is None else self.q_norm.shape[0]
        return q_rank, kv_rank, self.cache.shape[3] - kv_rank

    def check(self) -> None:
        """Raise ValueError for shapes and dtypes that do not fit together."""
        (q_rank, _, rope), cache, got = self.ranks, self.cache.shape, self.latents.shape
        rows, width = got[0], cache[3]
        if len(cache) != 4 or cache[2] != 1 or got != (rows, q_rank + width):
            raise ValueError(
                f"latents: expected [rows, {q_rank} + {width}] for a cache {cache}, got {got}"
            )
        for name, dtype, shape in (
            ("cos", jnp.float32, (rows, rope // 2)),
            ("sin", jnp.float32, (rows, rope // 2)),
            ("slot_mapping", jnp.int32, (rows,)),
        ):
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                expected = f"{jnp.dtype(dtype).name} {shape}"
                raise ValueError(f"{name}: expected {expected}, got {array.dtype} {array.shape}")
