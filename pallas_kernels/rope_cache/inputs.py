"""Inputs of rope_and_write."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.types import STATIC


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Projections of some rows, their norms and rotation, and their places in the paged cache.

    qkv:              [rows, (num_heads + 2 num_kv_heads) * head_dim], heads of queries, keys and
                      values side by side
    cos, sin:         float32 [rows, head_dim / 2]; halves of a head are paired (Hugging Face's
                      rotate_half layout)
    slot_mapping:     int32 [rows], block * block_size + offset; a cache slot outside the cache
                      writes nothing (a masked row)
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim]
    q_norm, k_norm:   [head_dim], the gains of RMS norms of every query and key head before the
                      rotation (Qwen3); both or neither
    k_scale, v_scale: float32 [num_kv_heads] or [1], by which keys and values are divided before
                      they are stored; None: 1
    num_heads:        query heads; 0 for rows that only write keys and values
    eps:              of the norms
    pack:             query rows of each request, to return the queries packed for attention; None
                      to return them by row
    places:           int32 [rows], with pack: the row of num_requests x pack that each row's
                      queries go to, all different; None: the rows are in order, and all there
    num_requests:     requests of the packed queries, with places
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    slot_mapping: jax.Array
    k_cache: jax.Array
    v_cache: jax.Array
    q_norm: jax.Array | None = None
    k_norm: jax.Array | None = None
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None
    places: jax.Array | None = None
    num_heads: int = field(metadata=STATIC)
    eps: float = field(default=0.0, metadata=STATIC)
    pack: int | None = field(default=None, metadata=STATIC)
    num_requests: int | None = field(default=None, metadata=STATIC)

    @property
    def packed_requests(self) -> int:
        """Requests of the packed queries."""
        assert self.pack is not None
        return self.num_requests or self.qkv.shape[0] // self.pack

    def check(self) -> None:
        """Raise ValueError for shapes and dtypes that do not fit together."""
        num_kv_heads, head_dim = self.k_cache.shape[2:]
        total = self.num_heads + 2 * num_kv_heads
        fits = len(self.qkv.shape) == 2 and self.qkv.shape[1] == total * head_dim
        if not fits or self.v_cache.shape != self.k_cache.shape:
            expected = f"[rows, {total} x {head_dim}] for these caches"
            raise ValueError(f"qkv: expected {expected}, got {self.qkv.shape}")
        rows = self.qkv.shape[0]
        for name, dtype, shape in (
            ("cos", jnp.float32, (rows, head_dim // 2)),
            ("sin", jnp.float32, (rows, head_dim // 2)),
            ("slot_mapping", jnp.int32, (rows,)),
        ):
            array = getattr(self, name)
            if array.shape != shape or array.dtype != dtype:
                expected = f"{jnp.dtype(dtype).name} {shape}"
                raise ValueError(f"{name}: expected {expected}, got {array.dtype} {array.shape}")
        for name in ("k_scale", "v_scale"):
            scale, heads_of = getattr(self, name), (1, num_kv_heads)
            if scale is not None and (
                scale.ndim != 1 or scale.shape[0] not in heads_of or scale.dtype != jnp.float32
            ):
                expected = f"float32 (1,) or ({num_kv_heads},)"
                raise ValueError(f"{name}: expected {expected}, got {scale.dtype} {scale.shape}")
        if (self.k_scale is None) != (self.v_scale is None):
            raise ValueError("k_scale and v_scale: expected both or neither")
        if (self.q_norm is None) != (self.k_norm is None):
            raise ValueError("q_norm and k_norm: expected both or neither")
        if self.pack is not None and not self.num_heads:
            raise ValueError(f"pack: expected None without query heads, got {self.pack}")
        if self.places is None:
            if self.pack is not None and (self.pack < 1 or rows % self.pack):
                raise ValueError(f"pack: expected a divisor of {rows} rows, got {self.pack}")
            return
        if self.places.shape != (rows,) or self.places.dtype != jnp.int32:
            got = f"{self.places.dtype} {self.places.shape}"
            raise ValueError(f"places: expected int32 {(rows,)}, got {got}")
        if not self.pack or not self.num_requests or rows > self.pack * self.num_requests:
            raise ValueError(
                f"pack and num_requests: expected a product of at least {rows} rows with places, "
                f"got {self.pack} and {self.num_requests}"
            )
