"""Few rows that a product quantises itself, in place of a kernel before it.

Every CTA reads the rows while its rings fill, and keeps the codes of its part of the depth. Codes
and scales are those of quantise.py, bit for bit: a largest magnitude depends on no order, and
values are divided, clipped and rounded one by one. So it changes no bits which of the two runs.

A CTA reads its part of each row, 2 bytes a value. A scale depends on the whole row. Either every
CTA reads all of it as well, or the product before has stored the largest magnitudes of its tiles.
All CTAs together then read more from the L2 cache than the codes have bytes, so the rows are few.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import scale_of, scaled
from pallas_kernels.fp8_matmul.weight import DTYPE
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Scratch, Sizes
from pallas_kernels.matmul.plan import TILE_N, WARPS, Product, choose_tuning, is_resident
from pallas_kernels.mosaic import load
from pallas_kernels.types import Ref

T = TypeVar("T")  # an array, or the kernel's ref

ROWS = 8  # at most
ROW_BYTES = 64 * 1024  # of all rows, at most, where each CTA looks for their largest magnitudes
STEP = 256  # depths of a step: two for each thread
LANES = 32
AT_ONCE = 64  # steps of all rows that a warpgroup holds in registers


class Values(NamedTuple, Generic[T]):
    """Rows that are no codes yet, bfloat16, in two views, and what is known of their scales.

    by_step: [rows, split, steps, warpgroups, STEP], as warpgroups multiply them
    by_warp: [rows, warpgroups, WARPS, depth], as warps look for the largest magnitude; or None
    largest: float32 [WARPS, tiles, padded rows], of the product before; or None

    Without by_warp and largest, all rows have a scale that is known.
    """

    by_step: T
    by_warp: T | None
    largest: T | None


def fits(product: Product, *, has_scales: bool) -> bool:
    """Return whether a product of codes can quantise its rows: few, in shared memory, in steps.

    has_scales: whether the scales are known, or the product before has measured the rows
    """
    tuning = choose_tuning(product)
    return (
        tuning is not None
        and product.rows <= ROWS
        and tuning.tile_k == tuning.stripe_k == STEP
        and is_resident(product, product.depth // tuning.split)
        and (has_scales or 2 * product.rows * product.depth <= ROW_BYTES)
    )


def measured(depth: int) -> bool:
    """Return whether the product before can store `largest` of rows of this depth."""
    return depth % (TILE_N * WARPS * LANES // ROWS) == 0


def values_of(
    sizes: Sizes, x: jax.Array, largest: jax.Array | None, *, has_scale: bool
) -> Values[jax.Array]:
    """Return the operands for rows x [rows, depth].

    largest:   float32 [tiles, rows or more], of the product before
    has_scale: whether all rows have a scale that is known
    """
    rows, tuning = x.shape[0], sizes.tuning
    by_warp = None
    if largest is not None:
        largest = largest.reshape(WARPS, -1, sizes.padded)
    elif not has_scale:
        by_warp = x.reshape(rows, tuning.warpgroups, WARPS, -1)
    by_step = x.reshape(rows, tuning.split, sizes.steps, tuning.warpgroups, STEP)
    return Values(by_step, by_warp, largest)


def with_scratch(
    scratch: Scratch[pl.MemoryRef], sizes: Sizes, values: Values
) -> Scratch[pl.MemoryRef]:
    """Return the scratch memory with what `quantise` needs."""
    if values.largest is None and values.by_warp is None:
        return scratch
    warpgroups = sizes.tuning.warpgroups
    return scratch._replace(
        by_warp=plgpu.SMEM((warpgroups + 1, ROWS, ROWS), jnp.float32),
        measured=plgpu.Barrier(num_arrivals=warpgroups),
    )


def row_scales(sizes: Sizes, scratch: Scratch[Ref]) -> Ref:
    """Return the scales that the first warpgroup keeps: float32 [padded rows]."""
    assert scratch.by_warp is not None
    return scratch.by_warp.at[sizes.tuning.warpgroups, 0]


def quantise(ring: Ring, values: Values[Ref], scale: jax.Array | None) -> None:
    """Write the codes of a warpgroup's steps to the resident x.

    scale: of all rows, if it is known; else the first warpgroup keeps those of the rows

    No warpgroup reads another's codes. The codes of rows past the last one are those of the first.
    """
    sizes, scratch = ring.sizes, ring.scratch
    rows, steps = sizes.product.rows, sizes.steps
    count = next(n for n in range(steps, 0, -1) if steps % n == 0 and n * rows <= AT_ONCE)
    shape = count, sizes.padded, STEP
    tile_layout = plgpu.Layout.TILED(  # a thread has two depths of each step, of all rows
        fa.Tiling(((1, ROWS, STEP), (STEP // WARPS,), (2,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )

    def read(start: int) -> list[jax.Array]:
        here = pl.ds(start, count)
        refs = [values.by_step.at[row, ring.part, here, ring.wg] for row in range(rows)]
        return [load(ref, tile_layout.reduce(1), optimized=False) for ref in refs]

    first = read(0)  # before anything waits for the scales
    scales = [scale] * rows if scale is not None else _scales(ring, values)
    row_of = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=tile_layout)
    for start in range(0, steps, count):
        tile: jax.Array | None = None
        for row, part in enumerate(first if start == 0 else read(start)):
            quotients = scaled(part.astype(jnp.float32), scales[row])
            spread = plgpu.layout_cast(lax.broadcast_in_dim(quotients, shape, [0, 2]), tile_layout)
            # A register's row is known when the kernel is compiled: this picks registers.
            tile = spread if tile is None else jnp.where(row_of == row, spread, tile)
        assert tile is not None
        scratch.x.at[pl.ds(ring.resident_step(start), count)][...] = tile.astype(DTYPE)
    if scale is None:

        @pl.when(ring.wg == 0)
        def _keep() -> None:
            for row in range(rows):
                row_scales(sizes, scratch)[row] = scales[row]

    plgpu.commit_smem()


def _scales(ring: Ring, values: Values[Ref]) -> list[jax.Array]:
    """Return the scale of each row, from its largest magnitude."""
    sizes, scratch = ring.sizes, ring.scratch
    by_warp, warpgroups = scratch.by_warp, sizes.tuning.warpgroups
    assert by_warp is not None
    if values.largest is not None:  # each warpgroup looks at all of it
        found = load(values.largest, _tiles_layout(), optimized=False)
        by_warp.at[ring.wg, pl.ds(0, WARPS)][...] = jnp.max(found, axis=1)
        seen = [lambda row, warp=warp: (ring.wg, warp, row) for warp in range(WARPS)]
    else:  # each warpgroup looks at a part of the row
        assert values.by_warp is not None
        layout = _row_layout(sizes.product.depth // (warpgroups * WARPS))
        for row in range(sizes.product.rows):
            part = values.by_warp.at[row, ring.wg]
            found = load(part, layout, optimized=False)
            largest = jnp.max(jnp.abs(found.astype(jnp.float32)), axis=1)
            by_warp.at[ring.wg, row, pl.ds(0, WARPS)][...] = largest
        plgpu.barrier_arrive(scratch.measured)
        plgpu.barrier_wait(scratch.measured)
        seen = [
            lambda row, wg=wg, warp=warp: (wg, row, warp)
            for wg in range(warpgroups)
            for warp in range(WARPS)
        ]

    def scale(row: int) -> jax.Array:
        largest = by_warp[seen[0](row)]
        for place in seen[1:]:
            largest = jnp.maximum(largest, by_warp[place(row)])
        return scale_of(largest)

    return [scale(row) for row in range(sizes.product.rows)]


def _row_layout(depth: int):
    """Return the layout of [WARPS, depth]: each warp has one of them."""
    vector = next(v for v in (8, 4, 2) if depth % (LANES * v) == 0)
    return plgpu.Layout.TILED(
        fa.Tiling(((WARPS, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def _tiles_layout():
    """Return the layout of [WARPS, tiles, padded rows]: each warp has some of the tiles."""
    return plgpu.Layout.TILED(
        fa.Tiling(((WARPS, LANES // ROWS, ROWS), (1,))),
        warp_dims=(-4,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )
