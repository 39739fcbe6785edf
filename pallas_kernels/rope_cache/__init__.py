"""Between the projections and attention: rotary embedding of queries and keys, and the write of keys and values into the paged cache."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import hopper, packing
from pallas_kernels.rope_cache import reference

IMPLEMENTATIONS = ("reference", "mosaic_gpu")


def rope_and_write(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    *,
    num_heads: int,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 0.0,
    pack: int | None = None,
    implementation: str = "reference",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The queries, rotated [rows, num_heads, head_dim], and both caches with these rows' keys and values in their slots.

    qkv:              [rows, (num_heads + 2 num_kv_heads) * head_dim], heads of queries, keys and values side by side
    cos, sin:         float32 [rows, head_dim / 2]; halves of a head are paired (Hugging Face's rotate_half layout)
    slot_mapping:     int32 [rows], block * block_size + offset; a slot outside the cache writes nothing (a masked row)
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]
    q_norm, k_norm:   [head_dim] each: an RMS norm of every query and key head before the rotation, with eps (Qwen3)
    pack:             rows a request, if the queries shall come back packed for attention: [rows / pack, num_kv_heads, packed_size,
                      head_dim], see pallas_kernels.packing.pack; the padding then holds anything

    Raises ValueError for shapes that do not fit together and for what the implementation does not support, with the reason.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    total = num_heads + 2 * num_kv_heads
    if qkv.ndim != 2 or qkv.shape[1] != total * head_dim or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"qkv: expected [rows, {total} x {head_dim}] for these caches, got {qkv.shape}"
        )
    for name, array, shape, dtype in (
        ("cos", cos, (qkv.shape[0], head_dim // 2), jnp.float32),
        ("sin", sin, (qkv.shape[0], head_dim // 2), jnp.float32),
        ("slot_mapping", slot_mapping, (qkv.shape[0],), jnp.int32),
    ):
        if array.shape != shape or array.dtype != dtype:
            raise ValueError(
                f"{name}: expected {jnp.dtype(dtype).name} {shape}, got {array.dtype} {array.shape}"
            )
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: expected both or neither")
    if pack is not None and (pack < 1 or qkv.shape[0] % pack):
        raise ValueError(f"pack: expected a divisor of {qkv.shape[0]} rows, got {pack}")
    options: dict[str, Any] = {
        "num_heads": num_heads,
        "q_norm": q_norm,
        "k_norm": k_norm,
        "eps": eps,
    }
    if implementation == "reference":
        q, k_cache, v_cache = reference.rope_and_write(
            qkv, cos, sin, slot_mapping, k_cache, v_cache, **options
        )
        return (
            (
                q
                if pack is None
                else packing.pack(q.reshape(-1, pack, num_heads, head_dim), num_kv_heads)
            ),
            k_cache,
            v_cache,
        )
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    reason = unsupported(num_heads, num_kv_heads, head_dim, qkv.dtype)
    if reason:
        raise ValueError(f"rope_cache, implementation {implementation!r}: {reason}")
    return _mosaic_gpu().rope_and_write(
        qkv, cos, sin, slot_mapping, k_cache, v_cache, pack=pack, **options
    )


def unsupported(num_heads: int, num_kv_heads: int, head_dim: int, dtype: Any) -> str | None:
    """Why the Mosaic kernel cannot run, None if it can."""
    return hopper.too_old() or _mosaic_gpu().unsupported(num_heads, num_kv_heads, head_dim, dtype)


def _mosaic_gpu() -> ModuleType:
    # Imported on use: jax 0.10, the floor on CPU, has another Mosaic.
    return importlib.import_module("pallas_kernels.rope_cache.mosaic_gpu")
