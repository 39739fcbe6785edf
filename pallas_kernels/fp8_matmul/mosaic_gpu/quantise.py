"""Rows in fp8, after a norm or as they are. One CTA for each row: no scale depends on another.

A row may be there already, or be the sum of the residual stream and a product of many rows, whose
float32 sums come from cuBLAS (`Sums`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dtypes import rounded_division
from pallas_kernels.fp8_matmul.mosaic_gpu import row_parts
from pallas_kernels.fp8_matmul.rows import RowNorm, Rows
from pallas_kernels.fp8_matmul.weight import BLOCK, DTYPE, LARGEST, Activation
from pallas_kernels.hopper import WARPS, interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul.mosaic_gpu import any_rows
from pallas_kernels.matmul.plan import MAX_ROWS, REDUCTION_BYTES, padded_rows
from pallas_kernels.mosaic import load, store
from pallas_kernels.types import Ref

T = TypeVar("T")  # an array, or the kernel's ref

VALUES = 8  # that a thread of the warpgroup reads at once
STEP = 128 * VALUES  # depths
BLOCKS = STEP // BLOCK
MAX_SUMS_WIDTH = 8192  # registers hold a row of this width


class Sums(NamedTuple, Generic[T]):
    """A product that has no scales yet, and the residual stream that it is added to.

    parts:    float32 [parts, rows, width], whose sum is the product of codes
    columns:  float32 [width], scales of the weight
    rows:     float32 [rows], scales of the rows that it multiplied
    residual: [rows, width]
    """

    parts: T
    columns: T
    rows: T
    residual: T


def takes(depth: int) -> bool:
    """Return whether the kernel takes rows of this depth; XLA takes all."""
    return depth % STEP == 0


def takes_sums(width: int) -> bool:
    """Return whether `add_and_quantise` takes rows of this width."""
    return takes(width) and width <= MAX_SUMS_WIDTH


def quantise(
    x: jax.Array,
    activation: Activation,
    scale: jax.Array | None,
    norm: RowNorm | None = None,
    squares: jax.Array | None = None,
    eps: float = 0.0,
) -> Rows:
    """Return x [rows, depth], or its norm, in fp8.

    See pallas_kernels.fp8_matmul.rows.quantise for activation and scale.

    squares, eps: of "token" activations without a norm here: see matmul.Inputs. The scales then
                  have the factor of the norm
    """
    return Rows(*_quantise(x, activation, scale, norm, squares, eps)[:2])


def add_and_quantise(sums: Sums[jax.Array], norm: RowNorm) -> tuple[jax.Array, Rows]:
    """Return the stream [rows, width] with the product added, and its norm by token.

    The bits of the norm and of the codes are those of `quantise` of the stream.
    """
    codes, scales, stream = _quantise(sums, "token", None, norm, None, norm.eps)
    assert stream is not None
    return stream, Rows(codes, scales)


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("activation", "eps"))
def _quantise(
    x: jax.Array | Sums[jax.Array],
    activation: Activation,
    scale: jax.Array | None,
    norm: RowNorm | None,
    squares: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    values = x.residual if isinstance(x, Sums) else x
    rows, depth = values.shape
    gain, eps = (None, eps) if norm is None else (norm.gain, norm.eps)
    assert squares is None or (activation == "token" and norm is None)
    # Products read whole tiles of scales. Those past the last row are not written.
    padded = padded_rows(rows) if rows <= MAX_ROWS else rows
    if activation == "block":
        assert not isinstance(x, Sums)
        if rows > MAX_ROWS:
            padded = any_rows.rows_of_tiles(rows)
        shape, body = (depth // BLOCK, BLOCK), _by_block(depth, eps)
        scales_shape, scratch = (depth // BLOCK, padded), ()
    else:
        shape, body = row_parts.in_parts(values).shape[1:], _by_row(depth, eps)
        scales_shape = (padded,)
        scratch = (plgpu.SMEM((row_parts.KINDS, row_parts.ROWS, row_parts.PARTS), jnp.float32),)
    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, *shape), DTYPE),
            jax.ShapeDtypeStruct(scales_shape, jnp.float32) if scale is None else None,
            jax.ShapeDtypeStruct((rows, *shape), values.dtype) if isinstance(x, Sums) else None,
        ),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=("add_and_" if isinstance(x, Sums) else "")
        + f"quantise_{depth}"
        + ("" if gain is None and squares is None else "_normed"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=REDUCTION_BYTES if activation == "block" else 0,
        ),
    )

    def in_parts(a: jax.Array) -> jax.Array:
        return a.reshape(*a.shape[:-1], *shape)

    arrays = (
        Sums(in_parts(x.parts), in_parts(x.columns), x.rows, in_parts(x.residual))
        if isinstance(x, Sums)
        else in_parts(x),
        None if scale is None else scale[None],
        None if gain is None else in_parts(gain),
        None if squares is None else row_parts.by_warp(squares),
    )
    codes, made, stream = kernel(*arrays)
    stream = None if stream is None else stream.reshape(rows, depth)
    return codes.reshape(rows, depth), made if scale is None else scale, stream


def _wait_for_rows() -> None:
    """Wait for the kernel before, and let the product's copies of weights start."""
    if not interpreting():
        plgpu.griddepcontrol_wait()
        # A CTA here leaves the product's nearly all of an SM.
        plgpu.griddepcontrol_launch_dependents()


def _by_row(depth: int, eps: float) -> Callable[..., None]:
    """Return the kernel of rows that have one scale each, or one for all rows."""
    layout = row_parts.layout_of(depth)

    def body(
        x: Ref | Sums[Ref],
        scale: Ref | None,
        gain: Ref | None,
        squares: Ref | None,
        codes: Ref,
        scales: Ref | None,
        stream: Ref | None,
        shared: Ref,
    ) -> None:
        row, halves = lax.axis_index("row"), range(row_parts.HALVES)
        reductions = row_parts.RowReductions(shared, halves, None)

        def read(ref: Ref) -> list[jax.Array]:
            return [load(ref.at[half], layout, optimized=False) for half in halves]

        # No kernel writes gain and scales of the weight: they need not wait for the one before.
        gains = None if gain is None else read(gain)
        columns = read(x.columns) if isinstance(x, Sums) else []
        _wait_for_rows()
        if isinstance(x, Sums):
            assert stream is not None
            values = _added(x, columns, row, read)
            for half in halves:
                store(stream.at[row, half], values[half])
        else:
            values = read(x.at[row])
        if gains is None:
            values = [half.astype(jnp.float32) for half in values]
        else:
            factor = reductions.norm_factor(values, depth, eps)
            values = [row_parts.normed(values[half], gains[half], factor) for half in halves]
        if scale is not None:
            divisor = scale[0]
        else:
            [largest] = reductions.largest([values])
            divisor = scale_of(largest)
            if scales is not None:
                kept = divisor
                if squares is not None:
                    kept *= row_parts.norm_factor(_squares_of(row, squares, shared), depth, eps)
                scales[row] = kept
        for half in halves:
            codes.at[row, half][...] = scaled(values[half], divisor).astype(DTYPE)

    return body


def _added(
    sums: Sums[Ref],
    columns: list[jax.Array],
    row: jax.Array,
    read: Callable[[Ref], list[jax.Array]],
) -> list[jax.Array]:
    """Return the halves of a row of the stream, with the product added.

    columns: the weight's scales, in registers. read: returns the halves of a row
    """
    parts = [read(sums.parts.at[part, row]) for part in range(sums.parts.shape[0])]
    residual, by_row, added = read(sums.residual.at[row]), sums.rows[row], []
    for half, before in enumerate(residual):
        total = functools.reduce(jnp.add, (part[half] for part in parts))
        product = (total * columns[half] * by_row).astype(before.dtype)
        wide = before.astype(jnp.float32) + product.astype(jnp.float32)
        added.append(wide.astype(before.dtype))
    return added


def _squares_of(row: jax.Array, squares: Ref, shared: Ref) -> list[jax.Array]:
    """Return the sums of a row's squares in the pieces of each warp."""
    rows = row_parts.ROWS
    pieces = row_parts.read_pieces(squares.at[:, :, pl.ds(lax.div(row, rows) * rows, rows)])
    shared = shared.at[row_parts.SQUARES, pl.ds(0, WARPS)]
    [parts] = row_parts.share_between_warps(jnp.sum(pieces, axis=1), shared, [lax.rem(row, rows)])
    return parts


def _by_block(depth: int, eps: float) -> Callable[..., None]:
    """Return the kernel of rows that have a scale for each BLOCK values."""
    shape = depth // BLOCK, BLOCK
    layout = plgpu.Layout.TILED(  # half a warp has a block
        fa.Tiling(((BLOCKS, BLOCK), (BLOCKS // WARPS, BLOCK), (VALUES,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )

    def body(
        x: Ref, _: None, gain: Ref | None, __: None, codes: Ref, scales: Ref, ___: None
    ) -> None:
        row = lax.axis_index("row")
        gains = None if gain is None else load(gain, layout, optimized=False)
        _wait_for_rows()
        values = load(x.at[row], layout, optimized=False)
        if gains is None:
            values = values.astype(jnp.float32)
        else:
            squares = jnp.sum(jnp.sum(jnp.square(values.astype(jnp.float32)), axis=1))
            values = row_parts.normed(values, gains, lax.rsqrt(squares / depth + eps))
        largest = jnp.max(jnp.abs(values), axis=1)
        divisors = jnp.where(largest == 0.0, 1.0, _divide(largest, jnp.float32(LARGEST)))
        store(scales.at[:, row], divisors)
        divisor = plgpu.layout_cast(lax.broadcast_in_dim(divisors, shape, [0]), layout)
        codes.at[row][...] = scaled(values, divisor).astype(DTYPE)

    return body


def scale_of(largest: jax.Array) -> jax.Array:
    """Return the scale of a row, float32 [], from its largest magnitude."""
    return jnp.where(largest == 0, jnp.float32(1), _divide(largest, jnp.float32(LARGEST)))


def scaled(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Return float32 values over their scale, which only have to be rounded to codes."""
    return jnp.clip(_divide(values, scale), -LARGEST, LARGEST)


def _divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return x / divisor. XLA, which interprets kernels, would multiply by the inverse."""
    return rounded_division(x, divisor) if interpreting() else x / divisor
