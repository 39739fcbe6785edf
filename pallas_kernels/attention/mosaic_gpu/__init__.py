"""Paged attention on Hopper: flash-decoding with TMA and wgmma, one warpgroup a CTA, one launch.

FlashAttention's tiles (Dao et al., 2022, arXiv:2205.14135) and Flash-Decoding's shares of the keys (Dao et al., 2023). A CTA holds the
query rows of one KV head (rows x group of them) and streams its tiles of 64 keys through a ring in shared memory. wgmma wants 64 rows on
its left side: there stand keys (K Q^T) and values (V^T P^T), and the few query rows are the narrow side, padded to 8 only.

Tile t belongs to class t mod 8. A class is folded from its first tile to its last, and the eight classes as a binary tree. CTAs of a
cluster share a row's keys as 1, 2, 4 or 8 equal subtrees, whatever the context's length, and the first CTA folds their results through
distributed shared memory. So the order of all sums depends on nothing but the keys' places: neither on the batch, nor on the block table,
nor on the number of CTAs. A tile that a row does not see leaves its state unchanged to the bit. (Prefill chunks have a kernel of their own,
prefill_mosaic_gpu.)
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, paging
from pallas_kernels.attention.bounds import KEYS, NARROW, key_bounds
from pallas_kernels.attention.mosaic_gpu.kernel import attend
from pallas_kernels.attention.mosaic_gpu.plan import Plan, Tuning
from pallas_kernels.packing import pack


def unsupported(
    *,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    q_dtype: Any,
    cache_dtype: Any,
) -> str | None:
    """Why the kernel cannot run these shapes and dtypes on this device; None if it can."""
    if device := hopper.missing():
        return f"device: {device}"
    if rows < 1:
        return f"rows: expected at least 1, got {rows}"
    if head_dim not in (64, 128):
        return f"head_dim: expected 64 or 128, got {head_dim}"
    if num_heads // num_kv_heads > NARROW:
        return (
            f"num_heads / num_kv_heads: expected at most {NARROW}, got {num_heads // num_kv_heads}"
        )
    if reason := paging.unsupported(block_size, KEYS):
        return reason
    if q_dtype != jnp.bfloat16 or cache_dtype != jnp.bfloat16:
        return f"dtypes of q and the caches: expected bfloat16, got {q_dtype} and {cache_dtype}"
    return None


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    window_start: jax.Array,
    sinks: jax.Array | None = None,
    bounds: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    packed_heads: int | None = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See pallas_kernels.attention.paged_attention; the output of a row that sees no key is 0."""
    batch, rows = positions.shape
    if packed_heads is not None and not packs(rows, packed_heads, k_cache.shape[2]):
        raise ValueError(
            f"packed queries: expected at most {NARROW} rows x heads a KV head, got {rows} x {packed_heads // k_cache.shape[2]}"
        )
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    plan = Plan(
        batch=batch,
        rows=rows,
        num_heads=packed_heads or q.shape[2],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        pages=block_table.shape[1],
        window=window,
        scale=scale,
        tuning=tuning or Tuning(),
        has_sinks=sinks is not None,
        interpreted=hopper.interpreting(),
    )
    packed = _pack(plan, q) if packed_heads is None else q[:, None]
    if bounds is None:
        max_keys = plan.pages * plan.block_size
        bounds = key_bounds(
            positions, seq_lens, window_start, queries_per_kv=plan.group, max_keys=max_keys
        )
    out, *_ = attend(plan)(
        packed, k_cache, v_cache, block_table, bounds, *(() if sinks is None else (sinks,))
    )
    return out


def packs(rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether the rows of a request are one row tile, so that whoever makes the queries can write them packed."""
    return rows * (num_heads // num_kv_heads) <= NARROW


def too_long(rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether a request has so many rows (more than four row tiles) that they are prefill_mosaic_gpu's."""
    return rows * (num_heads // num_kv_heads) > 4 * NARROW


def _pack(plan: Plan, q: jax.Array) -> jax.Array:
    """q [batch, rows, num_heads, head_dim] -> [batch, row_tiles, num_kv_heads, columns, head_dim]; XLA fuses it with what makes q."""
    q = jnp.pad(q, ((0, 0), (0, plan.row_tiles * plan.tile_rows - plan.rows), (0, 0), (0, 0)))
    q = q.reshape(plan.batch * plan.row_tiles, plan.tile_rows, plan.num_heads, plan.head_dim)
    packed = pack(q, plan.num_kv_heads)
    return packed.reshape(plan.batch, plan.row_tiles, *packed.shape[1:])
