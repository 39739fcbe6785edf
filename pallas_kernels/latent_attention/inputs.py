"""Inputs of latent_attention, and the sizes that decide whether the kernel can run."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.types import STATIC


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Queries of each request, and storage of an attention layer's latents.

    query_rows:           rows x heads of each request
    block_size:           tokens of a cache block
    q_dtype, cache_dtype: of the queries, and of the cached latents
    """

    query_rows: int
    kv_lora_rank: int
    rope_head_dim: int
    block_size: int
    q_dtype: DTypeLike
    cache_dtype: DTypeLike


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A few query rows of each request, and the cached latents that they see.

    q:            [batch, rows, num_heads, width], already in the space of the latents; see
                  pallas_kernels.packing.padded_heads
    cache:        [num_blocks, block_size, 1, width], a key whose first kv_lora_rank numbers are
                  the value; the query's own rows are already written
    block_table:  int32 [batch, pages], the blocks that hold a request's tokens in order
    positions:    int32 [batch, rows]; a row sees the keys 0 .. position, below seq_lens
    seq_lens:     int32 [batch], tokens in the cache; 0 for an idle request, whose output is finite
                  and meaningless
    kv_lora_rank: numbers of a value
    scale:        factor on q . key
    """

    q: jax.Array
    cache: jax.Array
    block_table: jax.Array
    positions: jax.Array
    seq_lens: jax.Array
    kv_lora_rank: int = field(metadata=STATIC)
    scale: float = field(metadata=STATIC)

    @property
    def latents(self) -> Latents:
        _, rows, num_heads, width = self.q.shape
        return Latents(
            query_rows=rows * num_heads,
            kv_lora_rank=self.kv_lora_rank,
            rope_head_dim=width - self.kv_lora_rank,
            block_size=self.cache.shape[1],
            q_dtype=self.q.dtype,
            cache_dtype=self.cache.dtype,
        )

    def check(self) -> None:
        """Raise ValueError for shapes and dtypes that do not fit together."""
        batch, rows = self.positions.shape
        (num_heads, width), cache = self.q.shape[2:], self.cache.shape
        if len(cache) != 4 or cache[2:] != (1, width) or not 0 < self.kv_lora_rank <= width:
            expected = f"[blocks, block_size, 1, {width}] with kv_lora_rank {self.kv_lora_rank}"
            raise ValueError(f"cache: expected {expected} of it, got {cache}")
        for name, dtype, shape in (
            ("q", self.q.dtype, (batch, rows, num_heads, width)),
            ("positions", jnp.int32, (batch, rows)),
            ("seq_lens", jnp.int32, (batch,)),
            ("block_table", jnp.int32, (batch, self.block_table.shape[-1])),
        ):
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                expected = f"{jnp.dtype(dtype).name} {shape}"
                raise ValueError(f"{name}: expected {expected}, got {array.dtype} {array.shape}")
