"""Inputs of paged_attention, and the sizes that its kernels are chosen and divided by."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import packing
from pallas_kernels.attention.bounds import bounds_size
from pallas_kernels.types import STATIC

FP8 = jnp.float8_e4m3fn  # of cached keys and values that are not in bfloat16
CACHE_DTYPES = (jnp.bfloat16, FP8)  # that the kernels read


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Query rows of each request, heads, and storage of an attention layer.

    rows:                 query rows of each request
    block_size:           tokens of a cache block
    q_dtype, cache_dtype: of the queries, and of the cached keys and values
    """

    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    q_dtype: DTypeLike
    cache_dtype: DTypeLike

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A few query rows of each request, and the cached keys and values that they see.

    q:                [batch, rows, num_heads, head_dim], or packed (see packed_heads)
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the query's own rows
                      already written
    block_table:      int32 [batch, pages], the blocks that hold a request's tokens in order
    positions:        int32 [batch, rows]; a row sees the keys window_start .. position, below
                      seq_lens. It is the row's own position, or a later one of the same pass where
                      rows see each other (a block of drafts)
    seq_lens:         int32 [batch], tokens in the cache; 0 for an idle request, whose output is
                      finite and meaningless
    window_start:     int32 [batch, rows]
    sinks:            float32 [num_heads], one more logit for each head, which joins the softmax's
                      denominator only (gpt-oss); or None
    bounds:           the result of pallas_kernels.attention.bounds.key_bounds for the four above,
                      if the caller has it; saves the kernels that make it
    k_scale, v_scale: float32 [num_kv_heads] or [1], factors of the cached keys and values,
                      above 0; None: 1
    scale:            factor on q . k, usually head_dim ** -0.5
    window:           a promise that no row sees more than this many keys (positions - window_start
                      < window): the kernel then starts for those pages only. It hides nothing
    packed_heads:     num_heads if q is packed: [batch, num_kv_heads, packed_size(rows *
                      queries_per_kv), head_dim] as pallas_kernels.packing.pack makes it, with any
                      content in the padding; rows is then that of `positions`
    out_rows:         int32 [batch, rows], of packed queries: the row of the output that each row's
                      result goes to, all different; a row from num_out_rows on is not kept. None:
                      the output is by request
    num_out_rows:     rows of the output, with out_rows
    """

    q: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    block_table: jax.Array
    positions: jax.Array
    seq_lens: jax.Array
    window_start: jax.Array
    sinks: jax.Array | None = None
    bounds: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    out_rows: jax.Array | None = None
    scale: float = field(metadata=STATIC)
    window: int | None = field(default=None, metadata=STATIC)
    packed_heads: int | None = field(default=None, metadata=STATIC)
    num_out_rows: int | None = field(default=None, metadata=STATIC)

    @property
    def heads(self) -> Heads:
        _, block_size, num_kv_heads, head_dim = self.k_cache.shape
        return Heads(
            rows=self.positions.shape[1],
            num_heads=self.packed_heads or self.q.shape[2],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            q_dtype=self.q.dtype,
            cache_dtype=self.k_cache.dtype,
        )

    def check(self) -> None:
        """Raise ValueError for shapes and dtypes that do not fit together."""
        k, v, head_dim = self.k_cache.shape, self.v_cache.shape, self.q.shape[3]
        if k != v or len(k) != 4 or k[3] != head_dim:
            expected = f"[blocks, block_size, kv_heads, {head_dim}] both"
            raise ValueError(f"k_cache and v_cache: expected {expected}, got {k} and {v}")
        heads, batch = self.heads, self.positions.shape[0]
        if heads.num_heads % heads.num_kv_heads:
            expected = f"a multiple of the cache's {heads.num_kv_heads} KV heads"
            raise ValueError(f"num_heads: expected {expected}, got {heads.num_heads}")
        rows = (batch, heads.rows)
        expected = (*rows, heads.num_heads, head_dim)
        if self.packed_heads is not None:
            columns = packing.packed_size(heads.rows * heads.queries_per_kv)
            expected = (batch, heads.num_kv_heads, columns, head_dim)
        if self.q.shape != expected:
            raise ValueError(f"q: expected {expected}, got {self.q.shape}")
        for name, dtype, shape in (
            ("positions", jnp.int32, rows),
            ("window_start", jnp.int32, rows),
            ("seq_lens", jnp.int32, (batch,)),
            ("block_table", jnp.int32, (batch, self.block_table.shape[-1])),
            ("out_rows", jnp.int32, rows),
            ("sinks", jnp.float32, (heads.num_heads,)),
        ):
            array = getattr(self, name)
            if array is not None and (array.shape != shape or array.dtype != dtype):
                expected = f"{jnp.dtype(dtype).name} {shape}"
                raise ValueError(f"{name}: expected {expected}, got {array.dtype} {array.shape}")
        if self.out_rows is not None and not (self.packed_heads and self.num_out_rows):
            raise ValueError("out_rows: expected it with packed_heads and num_out_rows, got none")
        for name in ("k_scale", "v_scale"):
            scale, heads_of = getattr(self, name), (1, heads.num_kv_heads)
            if scale is not None and (
                scale.ndim != 1 or scale.shape[0] not in heads_of or scale.dtype != jnp.float32
            ):
                expected = f"float32 (1,) or ({heads.num_kv_heads},)"
                raise ValueError(f"{name}: expected {expected}, got {scale.dtype} {scale.shape}")
        size, bounds = bounds_size(heads.rows, heads.queries_per_kv), self.bounds
        if bounds is not None and (
            bounds.ndim != 3 or bounds.shape[::2] != (batch, size) or bounds.dtype != jnp.int32
        ):
            expected = f"int32 ({batch}, row tiles, {size})"
            raise ValueError(f"bounds: expected {expected}, got {bounds.dtype} {bounds.shape}")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window: expected at least 1 key or None, got {self.window}")
