"""Norms, rotation and write in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.rms_norm.reference import rms_norm
from pallas_kernels.rope_cache.reference import rotate, write


def norm_and_write(
    latents: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    cache: jax.Array,
    *,
    kv_norm: jax.Array,
    q_norm: jax.Array | None = None,
    eps: float,
) -> tuple[jax.Array | None, jax.Array]:
    """See pallas_kernels.latent_cache.norm_and_write."""
    q_rank = 0 if q_norm is None else q_norm.shape[0]
    q, latent, key = jnp.split(latents, [q_rank, q_rank + kv_norm.shape[0]], axis=-1)
    entry = jnp.concatenate([rms_norm(latent, kv_norm, eps=eps), rotate(key, cos, sin)], axis=-1)
    return None if q_norm is None else rms_norm(q, q_norm, eps=eps), write(
        cache, entry[:, None], slot_mapping
    )
