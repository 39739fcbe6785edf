"""Latent attention's cache: norms of both latents, rotation of the key, write into the cache."""

from __future__ import annotations

import jax
from jax.typing import DTypeLike

from pallas_kernels import hopper
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.latent_cache import reference
from pallas_kernels.latent_cache.inputs import Inputs

__all__ = ["IMPLEMENTATIONS", "Inputs", "norm_and_write", "unsupported"]


def norm_and_write(
    inputs: Inputs, *, implementation: str = "reference"
) -> tuple[jax.Array | None, jax.Array]:
    """Return the normed query latents and the cache with these rows written.

    The query latents are [rows, q_lora_rank], or None without q_norm. The cache has these rows'
    normed latents and rotated keys in their cache slots. Raises ValueError for shapes that do not
    fit together and for inputs that the implementation does not support.
    """
    inputs.check()

    def reason() -> str | None:
        dtypes = inputs.latents.dtype, inputs.cache.dtype
        return hopper.missing() or unsupported(*inputs.ranks, *dtypes)

    if not runs_kernel("latent_cache", implementation, reason):
        return reference.norm_and_write(inputs)
    from pallas_kernels.latent_cache import mosaic_gpu

    return mosaic_gpu.norm_and_write(inputs, pdl=not hopper.interpreting())


def unsupported(
    q_lora_rank: int,
    kv_lora_rank: int,
    rope_head_dim: int,
    dtype: DTypeLike,
    cache_dtype: DTypeLike,
) -> str | None:
    """Return why the Mosaic kernel cannot run, None if it can.

    q_lora_rank:        0 if there is no query latent
    dtype, cache_dtype: of the projections, and of the cache
    """
    if old := hopper.too_old():
        return old
    from pallas_kernels.latent_cache import mosaic_gpu

    return mosaic_gpu.unsupported(q_lora_rank, kv_lora_rank, rope_head_dim, dtype, cache_dtype)
