"""Attention over a paged cache of latents, each of which is key and value of all heads: the public op."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.latent_attention import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


@cache
def _compiled(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return jax.jit(function, static_argnames=("kv_lora_rank", "scale"))


def unsupported(
    implementation: str,
    *,
    query_rows: int,
    kv_lora_rank: int,
    rope_head_dim: int,
    block_size: int,
    q_dtype: Any,
    cache_dtype: Any,
) -> str | None:
    """Why `implementation` cannot run these shapes and dtypes on this process's device; None if it can. query_rows: rows x heads."""
    if implementation == "reference":
        return None
    if old := hopper.too_old():
        return f"implementation {implementation!r}: {old}"
    from pallas_kernels.latent_attention import mosaic_gpu

    return mosaic_gpu.unsupported(
        query_rows=query_rows,
        kv_lora_rank=kv_lora_rank,
        rope_head_dim=rope_head_dim,
        block_size=block_size,
        q_dtype=q_dtype,
        cache_dtype=cache_dtype,
    )


def latent_attention(
    q: jax.Array,
    cache: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    *,
    kv_lora_rank: int,
    scale: float,
    implementation: str = "reference",
) -> jax.Array:
    """Causal attention of a few query rows a request over its cached latents (DeepSeek-V2, 2405.04434, section 2.1, absorbed).

    q:           [batch, rows, num_heads, width], already in the space of the latents; see pallas_kernels.packing.padded_heads
    cache:       [num_blocks, block_size, 1, width]: a key; its first kv_lora_rank numbers are the value. The query's own rows are written
    block_table: int32 [batch, pages], the blocks that hold a request's tokens in order
    positions:   int32 [batch, rows]; a row sees the keys 0 .. position, below seq_lens
    seq_lens:    int32 [batch], tokens in the cache; 0 for an idle request, whose output is finite and meaningless
    scale:       factor on q . key

    Returns [batch, rows, num_heads, kv_lora_rank] in q's dtype. Raises ValueError for shapes that do not fit together, for
    an implementation that does not exist, and for one that does not support the shapes, the dtypes or the device.
    """
    batch, rows = positions.shape
    num_heads, width = q.shape[2:]
    if cache.ndim != 4 or cache.shape[2:] != (1, width) or not 0 < kv_lora_rank <= width:
        raise ValueError(
            f"cache: expected [blocks, block_size, 1, {width}] with kv_lora_rank {kv_lora_rank} of it, got {cache.shape}"
        )
    for name, array, shape, dtype in (
        ("q", q, (batch, rows, num_heads, width), q.dtype),
        ("positions", positions, (batch, rows), jnp.int32),
        ("seq_lens", seq_lens, (batch,), jnp.int32),
        ("block_table", block_table, (batch, block_table.shape[-1]), jnp.int32),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name}: expected {jnp.dtype(dtype).name} {shape}, got {array.dtype} {array.shape}"
            )
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = unsupported(
        implementation,
        query_rows=rows * num_heads,
        kv_lora_rank=kv_lora_rank,
        rope_head_dim=width - kv_lora_rank,
        block_size=cache.shape[1],
        q_dtype=q.dtype,
        cache_dtype=cache.dtype,
    )
    if reason is not None:
        raise ValueError(reason)
    options: dict[str, Any] = {"kv_lora_rank": kv_lora_rank, "scale": scale}
    if implementation == "reference":
        return reference.latent_attention(q, cache, block_table, positions, seq_lens, **options)
    from pallas_kernels.latent_attention import mosaic_gpu

    # As a function of its own, so that a model's layers share one kernel instead of lowering one each.
    call = (
        mosaic_gpu.latent_attention
        if hopper.interpreting()
        else _compiled(mosaic_gpu.latent_attention)
    )
    return call(q, cache, block_table, positions, seq_lens, **options)
