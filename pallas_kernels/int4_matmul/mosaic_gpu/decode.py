"""Matrices in int4 as bfloat16 arrays, for products of many rows on Hopper.

Memory is the limit: a matrix is read once and written once, at four times the bytes. A warp has a
unit in registers, whose order is that of wgmma's operands. Shared memory turns it around, so that
whole rows of 64 columns go to memory.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fragments import i32
from pallas_kernels.hopper import WARPS, interpreting
from pallas_kernels.int4_matmul.mosaic_gpu.units import EXPONENT, decode_word
from pallas_kernels.int4_matmul.weight import COLUMNS, DEPTHS, UNIT, ZERO, Int4Weight
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load
from pallas_kernels.types import Ref

LAYOUT = plgpu.Layout.WGMMA
TILE = WARPS * COLUMNS  # columns that a warpgroup decodes at once
UNITS = (4, 2, 1)  # of a CTA, along the depth
SLOTS = 2  # tiles on their way to memory


def unsupported(weight: Int4Weight) -> str | None:
    """Return why the kernel cannot decode this matrix, None if it can."""
    width = weight.shape[-1]
    if width % TILE or weight.group % DEPTHS:
        expected = f"a width that is a multiple of {TILE} and groups of a multiple of {DEPTHS}"
        return f"expected {expected}, got {width} and {weight.group}"
    return None


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once()
def decode(weight: Int4Weight) -> jax.Array:
    """Return weight.to_array(jnp.bfloat16) of a matrix [in, out], with the same bits."""
    depth, width = weight.shape
    units = next(n for n in UNITS if depth // DEPTHS % n == 0)
    group, pdl = weight.group, not interpreting()

    def body(weight: Any, out: Ref, tiles: Ref) -> None:
        tile, block = lax.axis_index("tile"), lax.axis_index("block")
        columns = pl.ds(tile * TILE, TILE)
        first = block * units
        words = [weight.words.at[pl.ds(tile * WARPS, WARPS), first + i] for i in range(units)]
        loaded = [load(ref, _layout_of_words(), optimized=False) for ref in words]
        if pdl:
            plgpu.griddepcontrol_wait()  # the kernel before may read where this one writes
        for i, unit in enumerate(loaded):
            place = lax.div((first + i) * DEPTHS, group)
            by_column = (
                load(ref.at[place, columns], LAYOUT.reduce(1), optimized=False).astype(jnp.float32)
                for ref in (weight.scales, weight.zeros)
                if ref is not None
            )
            scale, *zeros = (lax.broadcast_in_dim(a, (TILE, DEPTHS), [0]) for a in by_column)
            codes = _codes(unit).astype(jnp.float32)
            values = ((codes - (zeros[0] if zeros else float(ZERO))) * scale).astype(jnp.bfloat16)
            slot = tiles.at[i % SLOTS]
            if i >= SLOTS:
                plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
            slot.transpose((1, 0))[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(slot, out.at[pl.ds((first + i) * DEPTHS, DEPTHS), columns])
        plgpu.wait_smem_to_gmem(0)

    transforms = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((depth, width), jnp.bfloat16),
        grid=(width // TILE, depth // DEPTHS // units),
        grid_names=("tile", "block"),
        kernel_name=f"int4_decode_{depth}x{width}",
        scratch_types=[plgpu.SMEM((SLOTS, DEPTHS, TILE), jnp.bfloat16, transforms=transforms)],
    )
    return call(weight)


def _layout_of_words() -> Any:
    """Return the layout of a unit for each warp, int32 [WARPS, UNIT]: four words a lane."""
    return plgpu.Layout.TILED(
        fa.Tiling(((WARPS, UNIT), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
    )


def _codes(words: jax.Array) -> jax.Array:
    """Return the codes of a unit for each warp, bfloat16 [columns, depths]."""
    if interpreting():
        ones = jnp.ones((1, TILE), jnp.float32)
        return Int4Weight(words[:, None], ones).codes().T.astype(jnp.bfloat16)

    @plgpu.inline_mgpu(
        arg_types=(_layout_of_words(),),
        return_type=plgpu.ShapeDtypeStruct((TILE, DEPTHS), jnp.bfloat16, layout=LAYOUT),
    )
    def run(_: Any, words: Any) -> Any:
        (four,) = words.registers.flat
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        registers = [
            llvm.bitcast(pair, register)
            for j in range(4)
            for register in decode_word(llvm.extractelement(four, i32(j)), [i32(EXPONENT)] * 2)
        ]
        like = fa.FragmentedArray.splat(
            arith.constant(ir.BF16Type.get(), ir.FloatAttr.get(ir.BF16Type.get(), 0.0)),
            (TILE, DEPTHS),
            fa.WGMMA_LAYOUT,
        )
        shaped = np.array(registers, dtype=object).reshape(like.registers.shape)
        return fa.FragmentedArray(_registers=shaped, _layout=like.layout, _is_signed=None)

    call: Any = run
    return call(words)
