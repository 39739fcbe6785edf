"""Rotary embedding of queries and keys, and the write of keys and values into the paged cache."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.rope_cache import reference
from pallas_kernels.rope_cache.inputs import Inputs

__all__ = ["IMPLEMENTATIONS", "Inputs", "rope_and_write", "unsupported"]


def rope_and_write(
    inputs: Inputs, *, implementation: str = "reference"
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the rotated queries and both caches with these rows' keys and values written.

    The queries are [rows, num_heads, head_dim], or with `pack` [rows / pack, num_kv_heads,
    packed_size, head_dim] as pallas_kernels.packing.pack makes them, with any content in the
    padding; with `places` [num_requests, ...], and any content where no row goes. Raises ValueError
    for shapes that do not fit together and for inputs that the implementation does not support.
    """
    inputs.check()

    def reason() -> str | None:
        num_kv_heads, head_dim = inputs.k_cache.shape[2:]
        dtype, cache_dtype = inputs.qkv.dtype, inputs.k_cache.dtype
        return unsupported(inputs.num_heads, num_kv_heads, head_dim, dtype, cache_dtype)

    if not runs_kernel("rope_cache", implementation, reason):
        return reference.rope_and_write(inputs)
    from pallas_kernels.rope_cache import mosaic_gpu

    return mosaic_gpu.rope_and_write(inputs)


def unsupported(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: DTypeLike, cache_dtype: DTypeLike
) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can.

    dtype, cache_dtype: of the projections, and of the caches
    """
    if old := hopper.too_old():
        return old
    from pallas_kernels.rope_cache import mosaic_gpu

    return mosaic_gpu.unsupported(num_heads, num_kv_heads, head_dim, dtype, cache_dtype)
