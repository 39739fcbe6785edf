"""Static sizes of one launch of an attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from pallas_kernels import hopper
from pallas_kernels.attention.inputs import FP8, Inputs
from pallas_kernels.types import Index, Ref


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the inputs; the kernels' plans add how the work is divided.

    rows: query rows of each request. pages: columns of the block table. has_sinks: see Inputs.
    is_fp8: whether keys and values are cached in e4m3. interpreted: whether the interpreter runs
    the kernel.
    """

    batch: int
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    pages: int
    scale: float
    has_sinks: bool
    is_fp8: bool
    interpreted: bool

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads


def sizes_of(inputs: Inputs) -> Sizes:
    """Return the sizes of these inputs on this process's device."""
    heads = inputs.heads
    return Sizes(
        batch=inputs.positions.shape[0],
        rows=heads.rows,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        block_size=heads.block_size,
        pages=inputs.block_table.shape[1],
        scale=inputs.scale,
        has_sinks=inputs.sinks is not None,
        is_fp8=heads.cache_dtype == FP8,
        interpreted=hopper.interpreting(),
    )


def of_head(scales: Ref, kv_head: Index) -> jax.Array:
    """Return a KV head's scale, in a kernel; scales: [num_kv_heads] or [1]."""
    return scales[0 if scales.shape[0] == 1 else kv_head]
