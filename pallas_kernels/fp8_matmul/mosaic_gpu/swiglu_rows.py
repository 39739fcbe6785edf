"""SwiGLU of the float32 sums of gate and up, in fp8 by token: many rows that cuBLAS multiplied.

A CTA makes whole rows, since a scale depends on the whole row. Between the search for the largest
magnitude and the codes, a row stays in registers in bfloat16. So sums are read once. Rows of a CTA
share the scales of the weights, which are as long as a row.
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

from pallas_kernels.fp8_matmul.mosaic_gpu.quantise import scale_of, scaled
from pallas_kernels.fp8_matmul.rows import Rows
from pallas_kernels.fp8_matmul.weight import DTYPE
from pallas_kernels.hopper import NUM_SMS, WARPS, interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load, store
from pallas_kernels.swiglu import swiglu
from pallas_kernels.types import Barrier, Ref

T = TypeVar("T")  # an array, or the kernel's ref

VALUES = 4  # that a thread reads at once
LINE = 32 * VALUES  # of a row, that a warp reads at once; a row is [lines, LINE]
CHUNK = WARPS * LINE
LAYOUT = plgpu.Layout.TILED(
    fa.Tiling(((WARPS, LINE), (VALUES,))),
    warp_dims=(-3,),
    lane_dims=(-2,),
    vector_dim=-1,
)
# Widest row of which the registers of four warpgroups hold one, and two.
MAX_WIDTH, MAX_WIDTH_OF_TWO = 25600, 16384


class Products(NamedTuple, Generic[T]):
    """Gate and up without their scales, float32.

    gate, up:                 [rows, width], sums of products of codes
    gate_columns, up_columns: [width], scales of the weights
    rows:                     [rows], scales of the rows that they multiplied
    """

    gate: T
    up: T
    gate_columns: T
    up_columns: T
    rows: T


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    rows:       of a CTA
    warpgroups: of a CTA
    """

    rows: int
    warpgroups: int = 4


def takes(width: int) -> bool:
    """Return whether the kernel takes rows of this width; XLA takes all."""
    return width % CHUNK == 0 and width <= MAX_WIDTH


def choose_tuning(rows: int, width: int) -> Tuning:
    """Return two rows a CTA where there are more rows than SMs and registers hold both."""
    return Tuning(rows=2 if rows > NUM_SMS and width <= MAX_WIDTH_OF_TWO else 1)


def swiglu_rows(products: Products[jax.Array], *, tuning: Tuning | None = None) -> Rows:
    """Return silu(gate) * up in fp8 by token, rounded to bfloat16 where fp8_matmul rounds it."""
    tuning = tuning or choose_tuning(*products.gate.shape)
    return Rows(*_swiglu_rows(products, tuning=tuning))


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def _swiglu_rows(products: Products[jax.Array], *, tuning: Tuning) -> tuple[jax.Array, jax.Array]:
    rows, width = products.gate.shape
    lines, pdl = width // LINE, not interpreting()
    # Of a warpgroup: whole turns of its warps.
    own_lines = -(-lines // (WARPS * tuning.warpgroups)) * WARPS

    def body(products: Products[Ref], codes: Ref, scales: Ref, shared: Ref, seen: Barrier) -> None:
        wg, first = lax.axis_index("wg"), lax.axis_index("cta") * tuning.rows
        # Where rows or lines leave a remainder, some are made twice, with the same bits.
        own = [jnp.minimum(first + i, rows - 1) for i in range(tuning.rows)]
        here = pl.ds(jnp.minimum(wg * own_lines, lines - own_lines), own_lines)

        def read(ref: Ref) -> jax.Array:
            return load(ref.at[here], LAYOUT, optimized=False)

        # No kernel writes these scales: they need not wait for the kernel before.
        gate_columns, up_columns = read(products.gate_columns), read(products.up_columns)
        if pdl:
            plgpu.griddepcontrol_wait()
        by_row = [products.rows[row] for row in own]
        inner = []
        for row, scale in zip(own, by_row, strict=True):
            gate = read(products.gate.at[row]) * gate_columns * scale
            inner.append(_swiglu(gate, read(products.up.at[row]) * up_columns * scale))
        if pdl:
            plgpu.griddepcontrol_launch_dependents()
        for i, values in enumerate(inner):
            shared.at[i, pl.ds(wg * WARPS, WARPS)][...] = _largest_by_warp(values)
        plgpu.barrier_arrive(seen)
        plgpu.barrier_wait(seen)
        for i, (row, values) in enumerate(zip(own, inner, strict=True)):
            found = [shared[i, warp] for warp in range(tuning.warpgroups * WARPS)]
            scale = scale_of(functools.reduce(jnp.maximum, found))
            scales[row] = scale
            made = scaled(values.astype(jnp.float32), scale).astype(DTYPE)
            store(codes.at[row, here], made)

    kernel = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, lines, LINE), DTYPE),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        grid=(-(-rows // tuning.rows),),
        grid_names=("cta",),
        num_threads=tuning.warpgroups,
        thread_name="wg",
        kernel_name=f"swiglu_rows_{width}",
        scratch_types=(
            plgpu.SMEM((tuning.rows, tuning.warpgroups * WARPS), jnp.float32),
            plgpu.Barrier(num_arrivals=tuning.warpgroups),
        ),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    by_line = (a.reshape(*a.shape[:-1], lines, LINE) for a in products[:-1])
    codes, scales = kernel(Products(*by_line, rows=products.rows))
    return codes.reshape(rows, width), scales


def _swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Return silu(gate) * up in bfloat16, rounded as matmul's epilogue rounds few rows."""
    return swiglu(*(value.astype(jnp.bfloat16).astype(jnp.float32) for value in (gate, up)))


def _largest_by_warp(values: jax.Array) -> jax.Array:
    """Return the largest magnitude in each warp's lines of bfloat16 [lines, LINE]: [WARPS]."""
    magnitudes = jnp.abs(values.astype(jnp.float32))
    turns = (magnitudes[i : i + WARPS] for i in range(0, values.shape[0], WARPS))
    return jnp.max(functools.reduce(jnp.maximum, turns), axis=1)
