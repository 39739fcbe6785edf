"""Paged attention on Hopper: flash-decoding with TMA and wgmma, one warpgroup a CTA, one launch.

FlashAttention's tiles (Dao et al., 2022, arXiv:2205.14135) and Flash-Decoding's shares of the keys
(Dao et al., 2023). A CTA holds the query rows of one KV head (rows x queries_per_kv of them), or a
part of them. It streams its tiles of 64 keys through a ring in shared memory. wgmma has 64 rows on
its left side: these are keys (K Q^T) and values (V^T P^T). The few query rows are the narrow side,
padded to 8.
mma.sync multiplies tiles in fp8 instead (fp8_tiles.py).

Tile t belongs to class t mod 8. A class is folded from its first tile to its last, and the eight
classes as a binary tree. CTAs of a cluster share a row's keys as 1, 2, 4 or 8 equal subtrees,
whatever the context's length, and the first CTA folds their results through distributed shared
memory. So the order of all sums depends on the keys' places alone: neither on the batch, nor on
the block table, nor on the number of CTAs. A tile that a row does not see leaves its state
unchanged to the bit. (Prefill chunks have their own kernel, prefill.py.)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, paging
from pallas_kernels.attention.bounds import KEYS, NARROW, key_bounds
from pallas_kernels.attention.inputs import CACHE_DTYPES, Heads, Inputs
from pallas_kernels.attention.mosaic_gpu.kernel import attend
from pallas_kernels.attention.mosaic_gpu.plan import Plan, Tuning
from pallas_kernels.packing import pack

__all__ = ["Plan", "Tuning", "packs", "paged_attention", "too_long", "unsupported"]


def unsupported(heads: Heads) -> str | None:
    """Return why the kernels cannot run on this process's device, None if they can."""
    if device := hopper.missing():
        return f"device: {device}"
    if heads.rows < 1:
        return f"rows: expected at least 1, got {heads.rows}"
    if heads.head_dim not in (64, 128):
        return f"head_dim: expected 64 or 128, got {heads.head_dim}"
    if heads.queries_per_kv > NARROW:
        return f"num_heads / num_kv_heads: expected at most {NARROW}, got {heads.queries_per_kv}"
    if reason := paging.unsupported(heads.block_size, KEYS):
        return reason
    if heads.q_dtype != jnp.bfloat16 or heads.cache_dtype not in CACHE_DTYPES:
        got = f"{jnp.dtype(heads.q_dtype).name} and {jnp.dtype(heads.cache_dtype).name}"
        return f"dtypes of q and the caches: expected bfloat16, and it or float8_e4m3fn, got {got}"
    return None


def paged_attention(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.attention.paged_attention.

    The output of a row that sees no key is 0.
    """
    plan, bounds = Plan.of(inputs, tuning or Tuning()), inputs.bounds
    if inputs.packed_heads is not None and not packs(plan.rows, plan.queries_per_kv):
        raise ValueError(
            f"packed queries: expected at most {NARROW} rows x heads a KV head, "
            f"got {plan.rows} x {plan.queries_per_kv}"
        )
    packed = _pack(plan, inputs.q) if inputs.packed_heads is None else inputs.q[:, None]
    if bounds is None:
        bounds = key_bounds(
            inputs.positions,
            inputs.seq_lens,
            inputs.window_start,
            queries_per_kv=plan.queries_per_kv,
            max_keys=plan.pages * plan.block_size,
        )
    scales = inputs.k_scale, inputs.v_scale
    out, *_ = attend(plan)(
        packed,
        inputs.k_cache,
        inputs.v_cache,
        inputs.block_table,
        bounds,
        inputs.sinks,
        inputs.out_rows,
        *scales,
    )
    return out


def packs(rows: int, queries_per_kv: int) -> bool:
    """Return whether the rows of a request are one row tile.

    Then the kernel that makes the queries can write them packed.
    """
    return rows * queries_per_kv <= NARROW


def too_long(rows: int, queries_per_kv: int) -> bool:
    """Return whether prefill.py takes requests of so many rows: more than 4 row tiles."""
    return rows * queries_per_kv > 4 * NARROW


def _pack(plan: Plan, q: jax.Array) -> jax.Array:
    """Return q [batch, rows, num_heads, head_dim] in row tiles, packed.

    The result is [batch, row_tiles, num_kv_heads, packed_columns, head_dim]. XLA fuses the packing
    with what makes q.
    """
    q = jnp.pad(q, ((0, 0), (0, plan.row_tiles * plan.tile_rows - plan.rows), (0, 0), (0, 0)))
    q = q.reshape(plan.batch * plan.row_tiles, plan.tile_rows, plan.num_heads, plan.head_dim)
    packed = pack(q, plan.num_kv_heads)
    return packed.reshape(plan.batch, plan.row_tiles, *packed.shape[1:])
