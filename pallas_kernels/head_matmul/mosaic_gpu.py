"""Products by head, of few rows, on Hopper: a block makes 64 columns of one head in one step.

As in pallas_kernels.matmul, wgmma computes the transposed product (W^T x^T), whose narrow axis is
the rows padded to a multiple of 8. Copies of the weights, which no kernel writes, start before the
kernel in front has ended. Depths are small, so there is no ring.

The rotation is one more product, in a block of its own: by the identity, and by the matrix that
swaps the halves and negates one. Both are exact and have the layout of the other results. Cosine
and sine join them in float32.

A row's bits depend on the row alone: the depth is summed in one order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.head_matmul.inputs import Inputs
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load
from pallas_kernels.types import Accumulator, Barrier, Ref, Shaped, Slice

TILE_N = 64  # output columns of a block: wgmma's M; also rope_head_dim
TILE_ROWS = 64
MAX_ROWS = 128  # more row tiles read each weight too often: XLA's batched product is faster
MAX_DEPTH = 512


def unsupported(x: Shaped, weights: Shaped) -> str | None:
    """Return why this kernel cannot make this product, None if it can."""
    rows, _, total = x.shape
    _, depth, width = weights.shape
    if x.dtype != jnp.bfloat16 or weights.dtype != jnp.bfloat16:
        return f"expected bfloat16 operands, got {x.dtype} and {weights.dtype}"
    if not 1 <= rows <= MAX_ROWS:
        return f"expected 1 to {MAX_ROWS} rows, got {rows}"
    if depth % 64 or not 0 < depth <= MAX_DEPTH or width % TILE_N:
        return (
            f"expected a depth of a multiple of 64 up to {MAX_DEPTH} and a width of a multiple of "
            f"{TILE_N}, got {depth} and {width}"
        )
    if total - depth not in (0, TILE_N):
        return f"expected {TILE_N} numbers a head to rotate, or none, got {total - depth}"
    return None


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="pdl")
def head_matmul(inputs: Inputs, *, pdl: bool = True) -> jax.Array:
    """Run the op; see pallas_kernels.head_matmul.head_matmul."""
    x, weights, cos, sin = inputs.x, inputs.weights, inputs.cos, inputs.sin
    rows = x.shape[0]
    heads, depth, width = weights.shape
    out_heads, rotates = inputs.out_heads or heads, cos is not None
    chunks = width // TILE_N
    row_tiles = -(-rows // TILE_ROWS)
    tile = -(-rows // (8 * row_tiles)) * 8
    padding = row_tiles * tile - rows
    if rows > 8 and padding:  # tiled copies take fewer rows than a tile of 8, or whole tiles
        x = jnp.pad(x, ((0, padding), (0, 0), (0, 0)))
    rotations = tables = None
    if cos is not None and sin is not None:
        # Equal in every layer, so XLA makes them once.
        both = jnp.tile(jnp.stack((cos, sin)), (1, 1, 2)).transpose(0, 2, 1)
        rotations, tables = _rotations(), jnp.pad(both, ((0, 0), (0, 0), (0, padding)))
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(
        x_gmem: Ref,
        w_gmem: Ref,
        rotations_gmem: Ref | None,
        tables_gmem: Ref | None,
        out_gmem: Ref,
        x_smem: Ref,
        w_smem: Ref,
        out_smem: Ref,
        w_barrier: Barrier,
        x_barrier: Barrier,
    ) -> None:
        head, chunk = lax.axis_index("head"), lax.axis_index("chunk")
        row_tile = lax.axis_index("row_tile")
        # Copies fill rows past the last one with zeros, and do not write them.
        here = pl.ds(row_tile * tile, tile)

        def columns() -> Slice:
            return pl.ds(chunk * TILE_N, TILE_N)

        def store(total: jax.Array) -> None:
            out_smem.transpose((1, 0))[...] = total.astype(x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[here, head, columns()])
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        @pl.when(chunk < chunks)
        def _multiply() -> None:
            plgpu.copy_gmem_to_smem(w_gmem.at[head, :, columns()], w_smem, w_barrier)
            if pdl:
                plgpu.griddepcontrol_wait()
            plgpu.copy_gmem_to_smem(x_gmem.at[here, head, pl.ds(0, depth)], x_smem, x_barrier)
            plgpu.barrier_wait(w_barrier)
            plgpu.barrier_wait(x_barrier)

            def product(acc: Accumulator) -> jax.Array:
                plgpu.wgmma(acc, w_smem.transpose((1, 0)), x_smem.transpose((1, 0)))
                return acc[...]

            store(pl.run_scoped(product, plgpu.ACC((TILE_N, tile), jnp.float32)))

        if rotations_gmem is None or tables_gmem is None:
            return

        @pl.when(chunk == chunks)
        def _rotate() -> None:
            raw, matrix = out_smem, w_smem.at[pl.ds(0, TILE_N)]  # free until the result is stored
            plgpu.copy_gmem_to_smem(rotations_gmem.at[0], matrix, w_barrier)
            if pdl:
                plgpu.griddepcontrol_wait()
            plgpu.copy_gmem_to_smem(x_gmem.at[here, head, pl.ds(depth, TILE_N)], raw, x_barrier)
            plgpu.barrier_wait(x_barrier)
            total = None
            for i in range(2):
                plgpu.barrier_wait(w_barrier)

                def product(acc: Accumulator) -> jax.Array:
                    plgpu.wgmma(acc, matrix.transpose((1, 0)), raw.transpose((1, 0)))
                    return acc[...]

                turned = pl.run_scoped(product, plgpu.ACC((TILE_N, tile), jnp.float32))
                if i == 0:
                    plgpu.copy_gmem_to_smem(rotations_gmem.at[1], matrix, w_barrier)
                table = load(tables_gmem.at[i, :, here], plgpu.Layout.WGMMA, optimized=False)
                total = turned * table if total is None else total + turned * table
            assert total is not None
            store(total)

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (x.shape[0], out_heads, width + (TILE_N if rotates else 0)), x.dtype
        ),
        grid=(row_tiles, heads, chunks + rotates),
        grid_names=("row_tile", "head", "chunk"),
        kernel_name=f"head_matmul_{depth}x{width}" + ("_rope" if rotates else ""),
        scratch_types=[
            plgpu.SMEM((tile, depth), x.dtype, transforms=transforms),
            plgpu.SMEM((depth, TILE_N), x.dtype, transforms=transforms),
            plgpu.SMEM((tile, TILE_N), x.dtype, transforms=transforms),
            plgpu.Barrier(),
            plgpu.Barrier(),
        ],
    )
    return call(x, weights, rotations, tables)[:rows]


def _rotations() -> jax.Array:
    """Return bfloat16 [2, 64, 64]: the identity, and x -> [-second half, first half]."""
    one, half = np.eye(TILE_N), TILE_N // 2
    swap = np.concatenate((one[half:], -one[:half]))
    return jnp.asarray(np.stack((one, swap)).astype(np.float32), jnp.bfloat16)
