"""Embedding and RMS norm on Hopper: the gather, the norms and the concatenation in one launch.

A block takes one norm of one row: the embedding's, or the hidden state's. The norm is that of the
rms_norm kernel, bit for bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.embed_norm.inputs import Inputs
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.rms_norm.mosaic_gpu import CHUNK, normed_row, tile_of
from pallas_kernels.types import Barrier, Index, Ref


# Compiled as a function of its own, so that layers and programs share the kernel.
@lowered_once(static_argnames="pdl")
def embed_norm(inputs: Inputs, *, pdl: bool) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.embed_norm.embed_norm."""
    tokens, table, weight, eps = inputs.tokens, inputs.table, inputs.weight, inputs.eps
    hidden, norm_residual = inputs.hidden, inputs.norm_residual
    (rows,), (vocab, width) = tokens.shape, table.shape
    chunks = width // CHUNK
    arrays = [(table, weight)]
    if hidden is not None and inputs.hidden_weight is not None:
        arrays.append((hidden, inputs.hidden_weight))
    keeps_embedding = hidden is None  # as it is, for a target's residual

    def body(
        tokens_gmem: Ref,
        sources: list[tuple[Ref, Ref]],
        normed_gmem: Ref,
        kept_gmem: Ref | None,
        x_smem: Ref,
        weight_smem: Ref,
        barrier: Barrier,
    ) -> None:
        part, row = lax.axis_index("part"), lax.axis_index("row")
        in_smem = pl.ds(0, chunks)

        for i, (_, weight_gmem) in enumerate(sources):

            @pl.when(part == i)
            def _fetch_gain(weight_gmem: Ref = weight_gmem) -> None:  # no kernel writes it
                plgpu.copy_gmem_to_smem(weight_gmem, weight_smem.at[in_smem], barrier.at[0])

        if pdl:
            plgpu.griddepcontrol_wait()
        token = jnp.clip(tokens_gmem[row], 0, vocab - 1)
        for i, (source, _) in enumerate(sources):

            @pl.when(part == i)
            def _fetch_row(source: Ref = source, index: Index = (token, row)[i]) -> None:
                plgpu.copy_gmem_to_smem(source.at[index], x_smem.at[in_smem], barrier.at[1])

        plgpu.barrier_wait(barrier.at[1])
        if kept_gmem is not None and keeps_embedding:
            plgpu.copy_smem_to_gmem(x_smem.at[in_smem], kept_gmem.at[row])
        normed = normed_row(x_smem, weight_smem, barrier.at[0], width, eps)
        if keeps_embedding:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        x_smem[...] = normed
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(x_smem.at[in_smem], normed_gmem.at[row, part])
        if kept_gmem is not None and norm_residual:
            kept_row = kept_gmem.at[row]
            pl.when(part == 1)(lambda: plgpu.copy_smem_to_gmem(x_smem.at[in_smem], kept_row))

        plgpu.wait_smem_to_gmem(0)

    dtype = arrays[-1][0].dtype
    kept = jax.ShapeDtypeStruct((rows, chunks, CHUNK), dtype)
    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, len(arrays), chunks, CHUNK), dtype),
            kept if keeps_embedding or norm_residual else None,
        ),
        grid=(len(arrays), rows),  # CUDA lets only the last axis grow past 65,535
        grid_names=("part", "row"),
        kernel_name=f"embed_norm_{width}",
        scratch_types=[
            plgpu.SMEM(tile_of(width), dtype),
            plgpu.SMEM(tile_of(width), weight.dtype),
            plgpu.Barrier(num_barriers=2),
        ],
        # As in rms_norm, which copies some of a tile's rows too.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    tiled = [tuple(a.reshape(*a.shape[:-1], chunks, CHUNK) for a in pair) for pair in arrays]
    normed, residual = call(tokens, tiled)
    residual = hidden if residual is None else residual.reshape(rows, -1)
    assert residual is not None
    return residual, normed.reshape(rows, -1)
