"""Few rows that a product norms and quantises itself, in place of a kernel before it.

Every CTA reads the rows while its rings fill, and keeps the codes of its part of the depth. Codes
and scales are those of quantise.py, bit for bit: sums of squares have the same order, a largest
magnitude depends on none, and values are scaled, divided, clipped and rounded one by one. So it
changes no bits which of the two runs.

A CTA reads its part of each row, 2 bytes a value. A norm and a scale depend on the whole row.
Either every CTA reads all of it as well, or the product before has stored the largest magnitudes of
their pieces, and under a norm the sums of squares. All CTAs together then read more from the L2
cache than the codes have bytes, so the rows are few.

Under such a norm the rows come times its gain. The norm's factor changes a scale, and no code.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.fp8_matmul.mosaic_gpu import row_parts
from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import scale_of, scaled
from pallas_kernels.fp8_matmul.mosaic_gpu.row_parts import (
    HALVES,
    MAGNITUDES,
    PARTS,
    ROWS,
    SQUARES,
)
from pallas_kernels.fp8_matmul.rows import RowNorm
from pallas_kernels.fp8_matmul.weight import DTYPE
from pallas_kernels.hopper import WARPS
from pallas_kernels.matmul.mosaic_gpu.ring import Ring
from pallas_kernels.matmul.mosaic_gpu.sizes import Scratch, Sizes
from pallas_kernels.matmul.plan import Product, choose_tuning, is_resident
from pallas_kernels.mosaic import load
from pallas_kernels.types import Index, Ref

T = TypeVar("T")  # an array, or the kernel's ref
Parts = TypeVar("Parts")  # T, or arrays in registers

ROW_BYTES = 64 * 1024  # of all rows, at most, where each CTA reads the whole of them
STEP = 256  # depths of a step: two for each thread
AT_ONCE = 64  # steps of all rows that a warpgroup holds in registers
TILE_LAYOUT = plgpu.Layout.TILED(  # a thread has two depths of each step, of all rows
    fa.Tiling(((1, ROWS, STEP), (STEP // WARPS,), (2,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)


class Gain(NamedTuple, Generic[T, Parts]):
    """The norm's gain, in the views of Values without rows.

    In registers: by_step of the first steps, and a list of the halves that a warpgroup reduces.
    """

    by_step: T
    by_part: Parts


class Values(NamedTuple, Generic[T]):
    """Rows that are no codes yet, bfloat16, in two views, and what is known of their scales.

    by_step: [rows, split, steps, warpgroups, STEP], as warpgroups multiply them
    by_part: [rows, HALVES, WARPS, depth / PARTS], as warps reduce whole rows; or None
    gain:    of the norm; or None
    largest: float32 [WARPS, pieces, padded rows], of the product before; or None
    squares: the same, sums of the squares of the rows before their gain; or None

    by_part is None if no warp needs whole rows: with largest, or with a known scale and no norm.
    """

    by_step: T
    by_part: T | None
    gain: Gain[T, T] | None
    largest: T | None
    squares: T | None


def fits(product: Product, *, has_scales: bool, normed: bool) -> bool:
    """Return whether a product of codes can quantise its rows: few, in shared memory, in steps.

    has_scales: whether the scales are known, or the product before has measured the rows
    normed:     whether it norms the rows first
    """
    tuning = choose_tuning(product)
    return (
        tuning is not None
        # A CTA reads a row under a norm twice, and its warps wait for each other in between. With
        # four rows that takes longer than a kernel before the product.
        and product.rows <= (1 if normed else ROWS)
        and tuning.tile_k == tuning.stripe_k == STEP
        and is_resident(product, product.depth // tuning.split)
        and ((has_scales and not normed) or _reads_all(product, tuning.warpgroups))
    )


def _reads_all(product: Product, warpgroups: int) -> bool:
    """Return whether each CTA can read the whole of the rows."""
    return (
        2 * product.rows * product.depth <= ROW_BYTES
        and HALVES % warpgroups == 0
        and row_parts.divides(product.depth)
    )


def values_of(
    sizes: Sizes,
    x: jax.Array,
    norm: RowNorm | None,
    largest: jax.Array | None,
    squares: jax.Array | None,
    *,
    has_scale: bool,
) -> Values[jax.Array]:
    """Return the operands for rows x [rows, depth].

    largest:   float32 [pieces, rows or more], of the product before, in place of a norm here
    squares:   the same, if the product before has multiplied the rows by a norm's gain
    has_scale: whether all rows have a scale that is known
    """
    rows, tuning = x.shape[0], sizes.tuning
    by_part = gain = None
    if largest is not None:
        assert norm is None
        largest = row_parts.by_warp(largest)
    elif norm is not None or not has_scale:
        by_part = row_parts.in_parts(x)
    steps = tuning.split, sizes.steps, tuning.warpgroups, STEP
    if norm is not None:
        gain = Gain(norm.gain.reshape(steps), row_parts.in_parts(norm.gain))
    assert squares is None or largest is not None
    squares = None if squares is None else row_parts.by_warp(squares)
    return Values(x.reshape(rows, *steps), by_part, gain, largest, squares)


def with_scratch(
    scratch: Scratch[pl.MemoryRef], sizes: Sizes, values: Values
) -> Scratch[pl.MemoryRef]:
    """Return the scratch memory with what `OwnRows` needs."""
    if values.largest is None and values.by_part is None:
        return scratch
    warpgroups = sizes.tuning.warpgroups
    # by_row is [kind, row, part] to RowReductions and [warpgroup, warp of a kind, row] to
    # _reduce_pieces. The scales of row_scales lie at [last, 0, row].
    kinds = max(row_parts.KINDS, warpgroups) + 1
    assert row_parts.KINDS * WARPS <= ROWS == PARTS == sizes.padded, sizes.padded
    assert 4 * kinds * ROWS * PARTS <= 1024  # what plan.smem_bytes counts
    return scratch._replace(
        by_row=plgpu.SMEM((kinds, ROWS, PARTS), jnp.float32),
        seen=plgpu.Barrier(num_arrivals=warpgroups)
        if values.by_part is not None and warpgroups > 1
        else None,
    )


def row_scales(scratch: Scratch[Ref]) -> Ref:
    """Return the scales that the first warpgroup keeps: float32 [padded rows]."""
    assert scratch.by_row is not None
    return scratch.by_row.at[scratch.by_row.shape[0] - 1, 0]


OwnGain = Gain[jax.Array, list[jax.Array]]  # in registers


@dataclass(frozen=True)
class OwnRows:
    """Rows that a warpgroup quantises for itself, in the kernel.

    eps: of the norm, here or in the product before, if there is one
    """

    ring: Ring
    values: Values[Ref]
    eps: float | None

    @property
    def rows(self) -> range:
        return range(self.ring.sizes.product.rows)

    @property
    def halves(self) -> list[Index]:
        """The halves of a row that this warpgroup reduces: two warpgroups have one each."""
        both = self.ring.sizes.tuning.warpgroups < HALVES
        return list(range(HALVES)) if both else [self.ring.wg]

    @property
    def at_once(self) -> int:
        """Steps that are in registers at once."""
        steps = self.ring.sizes.steps
        counts = (n for n in range(steps, 0, -1) if steps % n == 0)
        return next(n for n in counts if n * len(self.rows) <= AT_ONCE)

    def read_gain(self) -> OwnGain | None:
        """Return the gain. No kernel writes it: it need not wait for the kernel before."""
        if self.values.gain is None:
            return None
        by_step, by_part = self.values.gain
        return Gain(self._steps(by_step, 0), [self._half(by_part, half) for half in self.halves])

    def quantise(self, gain: OwnGain | None, scale: jax.Array | None) -> None:
        """Write the codes of a warpgroup's steps to the resident x.

        scale: of all rows, if it is known; else the first warpgroup keeps those of the rows

        No warpgroup reads another's codes. The codes of rows past the last one are those of the
        first.
        """
        ring, scratch = self.ring, self.ring.scratch
        shape = self.at_once, ring.sizes.padded, STEP
        # Before anything waits for the scales:
        first, largest, squares = self._rows(0), *self._found_before()
        factor, scales = self._factor_and_scales(gain, scale, largest)
        row_of = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE_LAYOUT)
        for start in range(0, ring.sizes.steps, self.at_once):
            tile: jax.Array | None = None
            for row, part in enumerate(first if start == 0 else self._rows(start)):
                if gain is None or factor is None:
                    part = part.astype(jnp.float32)
                else:
                    part = row_parts.normed(part, self._gain(gain, start), factor)
                spread = lax.broadcast_in_dim(scaled(part, scales[row]), shape, [0, 2])
                spread = plgpu.layout_cast(spread, TILE_LAYOUT)
                # A register's row is known when the kernel is compiled: this picks registers.
                tile = spread if tile is None else jnp.where(row_of == row, spread, tile)
            assert tile is not None
            steps = pl.ds(ring.resident_step(start), self.at_once)
            scratch.x.at[steps][...] = tile.astype(DTYPE)
        if scale is None:

            @pl.when(ring.wg == 0)
            def _keep() -> None:
                for row, kept in enumerate(self._with_norm_before(scales, squares)):
                    row_scales(scratch)[row] = kept

        plgpu.commit_smem()

    def _factor_and_scales(
        self, gain: OwnGain | None, scale: jax.Array | None, largest: jax.Array | None
    ) -> tuple[jax.Array | None, list[jax.Array]]:
        """Return the factor of the norm's one row, None without a norm, and each row's scale."""
        if largest is not None:
            found = self._reduce_pieces(MAGNITUDES, largest)
            return None, [scale_of(functools.reduce(jnp.maximum, parts)) for parts in found]
        by_part, scratch = self.values.by_part, self.ring.scratch
        factor, known = None, [] if scale is None else [scale] * len(self.rows)
        if by_part is None:
            return factor, known
        assert scratch.by_row is not None
        reductions = row_parts.RowReductions(scratch.by_row, self.halves, scratch.seen)
        rows = [[self._half(by_part.at[row], half) for half in self.halves] for row in self.rows]
        if gain is not None:
            assert self.eps is not None
            [row] = rows  # see fits
            factor = reductions.norm_factor(row, self.ring.sizes.product.depth, self.eps)
            pairs = zip(row, gain.by_part, strict=True)
            rows = [[row_parts.normed(half, own, factor) for half, own in pairs]]
        return factor, known or [scale_of(largest) for largest in reductions.largest(rows)]

    def _gain(self, gain: OwnGain, start: int) -> jax.Array:
        """Return the gain of the steps from `start`."""
        if start == 0:
            return gain.by_step
        assert self.values.gain is not None
        return self._steps(self.values.gain.by_step, start)

    def _found_before(self) -> tuple[jax.Array | None, jax.Array | None]:
        """Return what the product before has found: magnitudes and squares, in registers."""

        def read(ref: Ref | None) -> jax.Array | None:
            return None if ref is None else row_parts.read_pieces(ref)

        return read(self.values.largest), read(self.values.squares)

    def _with_norm_before(
        self, scales: list[jax.Array], squares: jax.Array | None
    ) -> list[jax.Array]:
        """Return the scales of the rows' norm, where the product before has made their squares."""
        if squares is None:
            return scales
        assert self.eps is not None
        depth, found = self.ring.sizes.product.depth, self._reduce_pieces(SQUARES, squares)
        factors = [row_parts.norm_factor(parts, depth, self.eps) for parts in found]
        return [scale * factor for scale, factor in zip(scales, factors, strict=True)]

    def _reduce_pieces(self, kind: int, pieces: jax.Array) -> list[list[jax.Array]]:
        """Return what each warp has found in its pieces of each row; a warpgroup reduces all."""
        by_row = self.ring.scratch.by_row
        assert by_row is not None
        shared = by_row.at[self.ring.wg, pl.ds(kind * WARPS, WARPS)]
        reduce = jnp.max if kind == MAGNITUDES else jnp.sum
        return row_parts.share_between_warps(reduce(pieces, axis=1), shared, self.rows)

    def _rows(self, start: int) -> list[jax.Array]:
        return [self._steps(self.values.by_step.at[row], start) for row in self.rows]

    def _steps(self, ref: Ref, start: int) -> jax.Array:
        here = ref.at[self.ring.part, pl.ds(start, self.at_once), self.ring.wg]
        return load(here, TILE_LAYOUT.reduce(1), optimized=False)

    def _half(self, ref: Ref, half: Index) -> jax.Array:
        layout = row_parts.layout_of(self.ring.sizes.product.depth)
        return load(ref.at[half], layout, optimized=False)
