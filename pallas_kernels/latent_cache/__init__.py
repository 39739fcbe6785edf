"""Between the two stages of latent attention's projections: norms of both latents, rotation of the key, the write into the paged cache."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper
from pallas_kernels.latent_cache import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


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
    implementation: str = "reference",
) -> tuple[jax.Array | None, jax.Array]:
    """The normed query latents [rows, q_lora_rank], and the cache with these rows' normed latents and rotated keys in their slots.

    latents:         [rows, q_lora_rank + kv_lora_rank + rope_head_dim], the query's latent, the key's, and the key to rotate side by side
    cos, sin:        float32 [rows, rope_head_dim / 2]; halves are paired (Hugging Face's rotate_half layout)
    slot_mapping:    int32 [rows], block * block_size + offset; a slot outside the cache writes nothing (a masked row)
    cache:           [num_blocks, block_size, 1, kv_lora_rank + rope_head_dim]
    kv_norm, q_norm: the gains [kv_lora_rank] and [q_lora_rank] of two RMS norms with eps; no q_norm: there is no query latent

    Raises ValueError for shapes that do not fit together and for what the implementation does not support, with the reason.
    """
    rows, (width,) = latents.shape[0], cache.shape[3:]
    q_rank, kv_rank = 0 if q_norm is None else q_norm.shape[0], kv_norm.shape[0]
    if cache.ndim != 4 or cache.shape[2] != 1 or latents.shape != (rows, q_rank + width):
        raise ValueError(
            f"latents: expected [rows, {q_rank} + {width}] for a cache {cache.shape}, got {latents.shape}"
        )
    half = (rows, (width - kv_rank) // 2)
    for name, array, shape, dtype in (
        ("cos", cos, half, jnp.float32),
        ("sin", sin, half, jnp.float32),
        ("slot_mapping", slot_mapping, (rows,), jnp.int32),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name}: expected {jnp.dtype(dtype).name} {shape}, got {array.dtype} {array.shape}"
            )
    options: dict[str, Any] = {"kv_norm": kv_norm, "q_norm": q_norm, "eps": eps}
    if implementation == "reference":
        return reference.norm_and_write(latents, cos, sin, slot_mapping, cache, **options)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = hopper.missing() or unsupported(q_rank, kv_rank, width - kv_rank, latents.dtype)
    if reason:
        raise ValueError(f"latent_cache, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().norm_and_write(
        latents, cos, sin, slot_mapping, cache, pdl=not hopper.interpreting(), **options
    )


def unsupported(q_lora_rank: int, kv_lora_rank: int, rope_head_dim: int, dtype: Any) -> str | None:
    """Why the Mosaic kernel cannot run, None if it can; q_lora_rank is 0 where there is no query latent."""
    return hopper.too_old() or _mosaic_gpu().unsupported(
        q_lora_rank, kv_lora_rank, rope_head_dim, dtype
    )


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.latent_cache.mosaic_gpu")
