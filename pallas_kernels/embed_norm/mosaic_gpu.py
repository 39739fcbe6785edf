"""Embedding and RMS norm on Hopper: the gather, the norms and the concatenation in one launch.

A block takes one norm of one row: of the embedding, or of the hidden state beside it. The norm is the rms_norm kernel's, bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.rms_norm.mosaic_gpu import CHUNK, normed_row, tile_of


def embed_norm(
    tokens: jax.Array, table: jax.Array, weight: jax.Array, **options: Any
) -> tuple[jax.Array, jax.Array]:
    """See pallas_kernels.embed_norm.embed_norm."""
    return _embed_norm(tokens, table, weight, pdl=not interpreting(), **options)


# Compiled as a function of its own, so that the programs of one process share the kernel.
@partial(jax.jit, static_argnames=("eps", "norm_residual", "pdl"))
def _embed_norm(
    tokens: jax.Array,
    table: jax.Array,
    weight: jax.Array,
    *,
    eps: float,
    hidden: jax.Array | None,
    hidden_weight: jax.Array | None,
    norm_residual: bool,
    pdl: bool,
) -> tuple[jax.Array, jax.Array]:
    (rows,), (vocab, width) = tokens.shape, table.shape
    chunks = width // CHUNK
    arrays = (
        [(table, weight)]
        if hidden is None or hidden_weight is None
        else [(table, weight), (hidden, hidden_weight)]
    )
    keeps_embedding = len(arrays) == 1  # raw, for a target's residual

    def body(tokens_gmem: Any, *refs: Any) -> None:
        inputs = [refs[2 * i : 2 * i + 2] for i in range(len(arrays))]
        normed_gmem, *kept, x_smem, weight_smem, barrier = refs[2 * len(arrays) :]
        part, row = lax.axis_index("part"), lax.axis_index("row")
        in_smem = pl.ds(0, chunks)

        for i, (_, weight_gmem) in enumerate(inputs):

            @pl.when(part == i)
            def _fetch_gain(weight_gmem: Any = weight_gmem) -> None:  # no kernel writes it
                plgpu.copy_gmem_to_smem(weight_gmem, weight_smem.at[in_smem], barrier.at[0])

        if pdl:
            plgpu.griddepcontrol_wait()
        token = jnp.clip(tokens_gmem[row], 0, vocab - 1)
        for i, (source, _) in enumerate(inputs):

            @pl.when(part == i)
            def _fetch_row(source: Any = source, index: Any = (token, row)[i]) -> None:
                plgpu.copy_gmem_to_smem(source.at[index], x_smem.at[in_smem], barrier.at[1])

        plgpu.barrier_wait(barrier.at[1])
        if keeps_embedding:
            plgpu.copy_smem_to_gmem(x_smem.at[in_smem], kept[0].at[row])
        normed = normed_row(x_smem, weight_smem, barrier.at[0], width, eps)
        if keeps_embedding:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x_smem[...] = normed
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem.at[in_smem], normed_gmem.at[row, part])
        if norm_residual:

            @pl.when(part == 1)
            def _keep() -> None:
                plgpu.copy_smem_to_gmem(x_smem.at[in_smem], kept[0].at[row])

        plgpu.wait_smem_to_gmem(0)

    dtype = arrays[-1][0].dtype
    keeps = keeps_embedding or norm_residual
    outputs = [jax.ShapeDtypeStruct((rows, len(arrays), chunks, CHUNK), dtype)]
    outputs += [jax.ShapeDtypeStruct((rows, chunks, CHUNK), dtype)] if keeps else []
    call = plgpu.kernel(
        body,
        out_type=outputs,
        grid=(len(arrays), rows),  # the last axis is the one that CUDA lets grow past 65,535
        grid_names=("part", "row"),
        kernel_name=f"embed_norm_{width}",
        scratch_types=[
            plgpu.SMEM(tile_of(width), dtype),
            plgpu.SMEM(tile_of(width), weight.dtype),
            plgpu.Barrier(num_barriers=2),
        ],
        # As in rms_norm: copies of a part of a tile's rows.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    operands = [a.reshape(*a.shape[:-1], chunks, CHUNK) for pair in arrays for a in pair]
    normed, *kept = (a.reshape(rows, -1) for a in call(tokens, *operands))
    return (kept[0] if keeps else hidden), normed  # pyright: ignore[reportReturnType]
