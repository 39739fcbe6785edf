"""Tiles of keys and values in fp8 (e4m3), widened to float16 on their way to the products.

wgmma multiplies operands of one width, and 8-bit ones by rows alone, which values are not. Hopper
converts a pair of e4m3 to float16 in one instruction, which is exact; bfloat16 takes four. Keys go
through registers to the left side of their product, if there are enough. Values go through shared
memory, since their product reads them transposed. A softmax's weights fit float16. So do queries
over 16: those between 2^-10 and 2^20 are exact, smaller ones are off by 2^-21 at most, and larger
ones saturate.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.bounds import KEYS
from pallas_kernels.attention.inputs import FP8
from pallas_kernels.attention.mosaic_gpu.plan import Plan
from pallas_kernels.mosaic import load
from pallas_kernels.online_softmax import where
from pallas_kernels.types import Index, Ref

T = TypeVar("T")  # a ref, or its type
CODES = plgpu.Layout.WGMMA_UPCAST_2X  # four codes of a row, a word, lie in one thread
QUERY_SCALE = 1 / 16
LARGEST = float(jnp.finfo(jnp.float16).max)


class Wide(NamedTuple, Generic[T]):
    """The queries and the tile that are multiplied, in float16.

    q: [KV heads, columns, head_dim], the queries over 16
    v: [KEYS, head_dim]
    k: [KEYS, head_dim]; None where keys are registers
    """

    q: T
    v: T
    k: T | None


def ring(plan: Plan) -> pl.MemoryRef:
    """Return the slots for codes of keys, or of values."""
    head_dim = plan.head_dim
    transforms = plgpu.TilingTransform((8, head_dim)), plgpu.SwizzleTransform(head_dim)
    return plgpu.SMEM((plan.slots, KEYS, head_dim), FP8, transforms=transforms)


def wide_tiles(plan: Plan) -> Wide[pl.MemoryRef]:
    """Return the memory of the queries and of one tile."""
    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    q = plgpu.SMEM((plan.heads, plan.columns, plan.head_dim), jnp.float16, transforms=tiling)
    tile = plgpu.SMEM((KEYS, plan.head_dim), jnp.float16, transforms=tiling)
    return Wide(q, tile, None if plan.keys_in_registers else tile)


def convert_queries(queries: Ref, converted: Ref) -> None:
    """Store queries [KV heads, columns, head_dim] as Wide.q has them."""
    for head in range(queries.shape[0]):
        q = load(queries.at[head].transpose((1, 0)), plgpu.Layout.WGMMA, optimized=False)
        q = jnp.clip(q.astype(jnp.float32) * QUERY_SCALE, -LARGEST, LARGEST)
        converted.at[head].transpose((1, 0))[...] = q.astype(jnp.float16)
    plgpu.commit_smem()


def widen_keys(codes: Ref, wide: Wide[Ref]) -> jax.Array | Ref:
    """Return the keys of a slot as the left side of wgmma.

    In shared memory they are committed: wgmma can read them at once.
    """
    keys = plgpu.layout_cast(load(codes, CODES), plgpu.Layout.WGMMA).astype(jnp.float16)
    if wide.k is None:
        return keys
    wide.k[...] = keys
    plgpu.commit_smem()
    return wide.k


def widen_values(codes: Ref, wide: Wide[Ref], written: Index) -> None:
    """Store the values of a slot, with zeros for keys past the first `written`.

    The caller commits them. Unwritten cache slots may hold NaN, and 0 * NaN is NaN.
    """

    def widened() -> jax.Array:
        return load(codes, CODES).astype(jnp.float16)

    @pl.when(written >= KEYS)
    def _all() -> None:
        wide.v[...] = widened()

    @pl.when(written < KEYS)
    def _some() -> None:
        numbers = widened()
        row = plgpu.broadcasted_iota(jnp.int32, numbers.shape, 0, layout=CODES)
        wide.v[...] = where(row < written, numbers, 0.0)
