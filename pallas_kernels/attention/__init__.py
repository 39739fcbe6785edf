"""Attention over a paged KV cache: the public op. Plain arrays in, plain arrays out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, packing
from pallas_kernels.attention import reference
from pallas_kernels.attention.bounds import bounds_size

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


@cache
def _compiled(function: Callable[..., jax.Array], *static: str) -> Callable[..., jax.Array]:
    return jax.jit(function, static_argnames=static)


def unsupported(
    implementation: str,
    *,
    rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    q_dtype: Any,
    cache_dtype: Any,
) -> str | None:
    """Why `implementation` cannot run these shapes and dtypes on this process's device; None if it can."""
    if implementation == "reference":
        return None
    if old := hopper.too_old():
        return f"implementation {implementation!r}: {old}"
    from pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu.unsupported(
        rows=rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        q_dtype=q_dtype,
        cache_dtype=cache_dtype,
    )


def packs(implementation: str, *, rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether `implementation` would pack the queries of so many rows a request by itself, so that packed ones save it a kernel."""
    if implementation != "mosaic_gpu" or hopper.too_old():
        return False
    from pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu.packs(rows, num_heads, num_kv_heads)


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
    implementation: str = "reference",
) -> jax.Array:
    """Causal grouped-query attention of a few query rows a request over its cached keys and values.

    q:                [batch, rows, num_heads, head_dim], or packed (see packed_heads)
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], the query's own rows already written
    block_table:      int32 [batch, pages], the blocks that hold a request's tokens in order
    positions:        int32 [batch, rows]; a row sees the keys window_start .. position, below seq_lens
    seq_lens:         int32 [batch], tokens in the cache; 0 for an idle request, whose output is finite and meaningless
    window_start:     int32 [batch, rows]
    sinks:            float32 [num_heads], a logit per head that joins the softmax's denominator only (gpt-oss), or None
    bounds:           what pallas_kernels.attention.bounds.key_bounds makes of the four above, if the caller has it: kernels that they save
    scale:            factor on q . k, usually head_dim ** -0.5
    window:           a promise that no row sees more than this many keys (positions - window_start < window): the kernel then
                      starts for those pages only. It hides nothing by itself.
    packed_heads:     num_heads if q is packed, [batch, num_kv_heads, packed_size(rows * num_heads / num_kv_heads), head_dim] as
                      pallas_kernels.packing.pack makes it, but with anything in the padding; rows is then that of `positions`

    Returns [batch, rows, num_heads, head_dim] in q's dtype. Raises ValueError for shapes that do not fit together, for
    an implementation that does not exist, and for one that does not support the shapes, the dtypes or the device.
    """
    batch, rows = positions.shape
    num_heads, head_dim = packed_heads or q.shape[2], q.shape[3]
    if k_cache.shape != v_cache.shape or k_cache.ndim != 4 or k_cache.shape[3] != head_dim:
        raise ValueError(
            f"k_cache and v_cache: expected [blocks, block_size, kv_heads, {head_dim}] both, got {k_cache.shape} and {v_cache.shape}"
        )
    if num_heads % k_cache.shape[2]:
        raise ValueError(
            f"num_heads: expected a multiple of the cache's {k_cache.shape[2]} KV heads, got {num_heads}"
        )
    expected = (batch, rows, num_heads, head_dim)
    if packed_heads is not None:
        num_kv_heads = k_cache.shape[2]
        expected = (
            batch,
            num_kv_heads,
            packing.packed_size(rows * num_heads // num_kv_heads),
            head_dim,
        )
    if q.shape != expected:
        raise ValueError(f"q: expected {expected}, got {q.shape}")
    for name, array, shape in (
        ("positions", positions, (batch, rows)),
        ("window_start", window_start, (batch, rows)),
        ("seq_lens", seq_lens, (batch,)),
        ("block_table", block_table, (batch, block_table.shape[-1])),
    ):
        if array.shape != shape or array.dtype != jnp.int32:
            raise ValueError(f"{name}: expected int32 {shape}, got {array.dtype} {array.shape}")
    if sinks is not None and (sinks.shape != (num_heads,) or sinks.dtype != jnp.float32):
        raise ValueError(f"sinks: expected float32 ({num_heads},), got {sinks.dtype} {sinks.shape}")
    tile = bounds_size(rows, num_heads // k_cache.shape[2])
    if bounds is not None and (
        bounds.ndim != 3 or bounds.shape[::2] != (batch, tile) or bounds.dtype != jnp.int32
    ):
        raise ValueError(
            f"bounds: expected int32 ({batch}, row tiles, {tile}), got {bounds.dtype} {bounds.shape}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1 key or None, got {window}")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = unsupported(
        implementation,
        rows=rows,
        num_heads=num_heads,
        num_kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        block_size=k_cache.shape[1],
        q_dtype=q.dtype,
        cache_dtype=k_cache.dtype,
    )
    if reason is not None:
        raise ValueError(reason)
    if implementation == "mosaic_gpu":
        from pallas_kernels.attention import mosaic_gpu, prefill_mosaic_gpu

        kernel: Callable[..., jax.Array] = mosaic_gpu.paged_attention
        options: dict[str, Any] = {"scale": scale, "window": window, "packed_heads": packed_heads}
        arrays = (
            q,
            k_cache,
            v_cache,
            block_table,
            positions,
            seq_lens,
            window_start,
            sinks,
            bounds,
        )
        if packed_heads is None and mosaic_gpu.too_long(rows, num_heads, k_cache.shape[2]):
            kernel, options, arrays = (
                prefill_mosaic_gpu.paged_attention,
                {"scale": scale},
                arrays[:-1],
            )
        # As a function of its own, so that a model's layers share one kernel instead of lowering one each.
        call = kernel if hopper.interpreting() else _compiled(kernel, *options)
        return call(*arrays, **options)
    if packed_heads is not None:
        q = packing.unpack(q, rows, num_heads)
    return reference.paged_attention(
        q, k_cache, v_cache, block_table, positions, seq_lens, window_start, sinks, scale=scale
    )
