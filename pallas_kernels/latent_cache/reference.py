"""Norms, rotation and write in plain jnp: the specification of the op, and the path on CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wider
from pallas_kernels.latent_cache.inputs import Inputs
from pallas_kernels.rms_norm.reference import rms_norm
from pallas_kernels.rope_cache.reference import rotate, write


def norm_and_write(inputs: Inputs) -> tuple[jax.Array | None, jax.Array]:
    """Run the op; see pallas_kernels.latent_cache.norm_and_write.

    A rotated key is rounded once, to the cache's dtype.
    """
    q_norm, eps = inputs.q_norm, inputs.eps
    q_rank, kv_rank, _ = inputs.ranks
    q, latent, key = jnp.split(inputs.latents, [q_rank, q_rank + kv_rank], axis=-1)
    dtype = wider(inputs.latents.dtype, inputs.cache.dtype)
    latent = rms_norm(latent, inputs.kv_norm, eps=eps).astype(dtype)
    key = key.astype(dtype)
    entry = jnp.concatenate([latent, rotate(key, inputs.cos, inputs.sin)], axis=-1)
    q = None if q_norm is None else rms_norm(q, q_norm, eps=eps)
    return q, write(inputs.cache, entry[:, None], inputs.slot_mapping)
