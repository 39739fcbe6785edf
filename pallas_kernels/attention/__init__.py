"""Attention over a paged KV cache: the public op. Plain arrays in, plain arrays out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import jax

from pallas_kernels import hopper
from pallas_kernels.attention import reference
from pallas_kernels.attention.inputs import Heads, Inputs
from pallas_kernels.implementations import IMPLEMENTATIONS, runs_kernel
from pallas_kernels.lowered_once import lowered_once

__all__ = ["IMPLEMENTATIONS", "Heads", "Inputs", "packs", "paged_attention", "unsupported"]


def paged_attention(inputs: Inputs, *, implementation: str = "reference") -> jax.Array:
    """Run grouped-query attention over cached keys and values, up to each row's last key.

    Returns [batch, rows, num_heads, head_dim] in q's dtype, with out_rows [num_out_rows, num_heads,
    head_dim], with any content in rows that nothing goes to. Raises ValueError for shapes that do
    not fit together and for inputs that the implementation does not support.
    """
    inputs.check()
    heads = inputs.heads
    if not runs_kernel("attention", implementation, lambda: unsupported(heads)):
        return reference.paged_attention(inputs)
    from pallas_kernels.attention import mosaic_gpu
    from pallas_kernels.attention.mosaic_gpu import prefill

    kernel = mosaic_gpu.paged_attention
    if inputs.packed_heads is None and mosaic_gpu.too_long(heads.rows, heads.queries_per_kv):
        kernel = prefill.paged_attention
    return (kernel if hopper.interpreting() else _compiled(kernel))(inputs)


def unsupported(heads: Heads) -> str | None:
    """Return why the Mosaic kernels cannot run on this process's device, None if they can."""
    if old := hopper.too_old():
        return old
    from pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu.unsupported(heads)


def packs(implementation: str, *, rows: int, queries_per_kv: int) -> bool:
    """Return whether `implementation` packs the queries of so many rows of each request.

    Queries that are packed already then save it a kernel.
    """
    if implementation != "mosaic_gpu" or hopper.too_old():
        return False
    from pallas_kernels.attention import mosaic_gpu

    return mosaic_gpu.packs(rows, queries_per_kv)


@cache
def _compiled(kernel: Callable[[Inputs], jax.Array]) -> Callable[[Inputs], jax.Array]:
    """Compile the kernel as a function of its own, so that layers and programs share one."""
    return lowered_once()(kernel)
