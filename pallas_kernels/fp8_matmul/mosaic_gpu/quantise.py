"""Rows in fp8, after a norm or as they are. One CTA for each row: no scale depends on another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dtypes import rounded_division
from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.weight import BLOCK, DTYPE, LARGEST, Activation
from pallas_kernels.hopper import interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.matmul.plan import MAX_ROWS, padded_rows
from pallas_kernels.mosaic import load
from pallas_kernels.types import Ref

VALUES = 8  # that a thread of the warpgroup reads at once
STEP = 128 * VALUES  # depths
BLOCKS = STEP // BLOCK


def takes(depth: int) -> bool:
    """Return whether the kernel takes rows of this depth; XLA takes all."""
    return depth % STEP == 0


def quantise(
    x: jax.Array,
    activation: Activation,
    scale: jax.Array | None,
    gain: jax.Array | None = None,
    eps: float = 0.0,
) -> Rows:
    """Return x [rows, depth], or its RMS norm, in fp8.

    See pallas_kernels.fp8_matmul.rows.quantise for activation and scale, and
    pallas_kernels.rms_norm for gain and eps.
    """
    return Rows(*_quantise(x, activation, scale, gain, eps))


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames=("activation", "eps"))
def _quantise(
    x: jax.Array,
    activation: Activation,
    scale: jax.Array | None,
    gain: jax.Array | None,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    rows, depth = x.shape
    shape, by_block = (depth // BLOCK, BLOCK), activation == "block"
    # A thread has the same values in both.
    layout = plgpu.Layout.WG_STRIDED(shape, vec_size=VALUES)
    if by_block:  # half a warp has a block
        layout = plgpu.Layout.TILED(
            fa.Tiling(((BLOCKS, BLOCK), (BLOCKS // 4, BLOCK), (VALUES,))),
            warp_dims=(-5,),
            lane_dims=(-3, -2),
            vector_dim=-1,
        )
    pdl = not interpreting()

    def body(
        x_gmem: Ref, scale_gmem: Ref | None, gain_gmem: Ref | None, codes: Ref, scales: Ref | None
    ) -> None:
        row = lax.axis_index("row")
        gain_values = None
        if gain_gmem is not None:  # no kernel writes it: it need not wait for the kernel before
            gain_values = load(gain_gmem, layout, optimized=False)
        if pdl:
            plgpu.griddepcontrol_wait()
            # The product's copies of weights start: a CTA here leaves it nearly all of an SM.
            plgpu.griddepcontrol_launch_dependents()
        values = load(x_gmem.at[row], layout, optimized=False).astype(jnp.float32)
        if gain_values is not None:
            squares = values * values
            total = jnp.sum(jnp.sum(squares, axis=1)) if by_block else jnp.sum(squares)
            normed = (values * lax.rsqrt(total / depth + eps)).astype(x.dtype) * gain_values
            values = normed.astype(jnp.float32)
        if scale_gmem is not None:
            divisor = scale_gmem[0]
        elif by_block and scales is not None:
            largest = jnp.max(jnp.abs(values), axis=1)
            divisors = jnp.where(largest == 0.0, 1.0, _divide(largest, jnp.float32(LARGEST)))
            scales.at[:, row][...] = divisors
            divisor = plgpu.layout_cast(lax.broadcast_in_dim(divisors, shape, [0]), layout)
        else:
            divisor = scale_of(jnp.max(jnp.abs(values)))
            if scales is not None:
                scales[row] = divisor
        codes.at[row][...] = scaled(values, divisor).astype(DTYPE)

    # The product of few rows reads whole tiles of scales. Those past the last row are not written.
    padded = padded_rows(rows) if rows <= MAX_ROWS else rows
    by_row = (depth // BLOCK, padded) if by_block else (padded,)
    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, *shape), DTYPE),
            jax.ShapeDtypeStruct(by_row, jnp.float32) if scale is None else None,
        ),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=f"quantise_{depth}" + ("" if gain is None else "_normed"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    arrays = (
        x.reshape(rows, *shape),
        None if scale is None else scale[None],
        None if gain is None else gain.reshape(shape),
    )
    codes, made = call(*arrays)
    return codes.reshape(rows, depth), made if scale is None else scale


def scale_of(largest: jax.Array) -> jax.Array:
    """Return the scale of a row, float32 [], from its largest magnitude."""
    return jnp.where(largest == 0, jnp.float32(1), _divide(largest, jnp.float32(LARGEST)))


def scaled(values: jax.Array, scale: jax.Array) -> jax.Array:
    """Return float32 values over their scale, which only have to be rounded to codes."""
    return jnp.clip(_divide(values, scale), -LARGEST, LARGEST)


def _divide(x: jax.Array, divisor: jax.Array) -> jax.Array:
    """Return x / divisor, correctly rounded: XLA, which interprets kernels, would invert it."""
    return rounded_division(x, divisor) if interpreting() else x / divisor
