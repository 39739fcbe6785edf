"""Metadata of a pass on Hopper: one launch, one block for each request.

In jnp this is about ten kernels of a few numbers each, 2 us apiece, before every draft step and
before the target's pass. cos and sin are libdevice's, as XLA's are. So a prefill chunk (in jnp)
and a decode step rotate a key by the same bits.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.bounds import KEYS, NARROW, bounds_size
from pallas_kernels.hopper import interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load
from pallas_kernels.step_metadata.inputs import Inputs
from pallas_kernels.step_metadata.reference import PAD_SLOT, StepMetadata
from pallas_kernels.types import Index, Ref

THREADS = 128  # of a block


def unsupported(rows: int, queries_per_kv: int, rope_dim: int) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    if rows * queries_per_kv > NARROW:
        return f"expected at most {NARROW} rows x heads a KV head, got {rows} x {queries_per_kv}"
    if rope_dim % 8 or 2 * THREADS % rope_dim:
        expected = f"a rope_dim that is a multiple of 8 and a divisor of {2 * THREADS}"
        return f"expected {expected}, got {rope_dim}"
    return None


def step_metadata(inputs: Inputs) -> StepMetadata:
    """Run the op; see pallas_kernels.step_metadata.step_metadata."""
    return StepMetadata(*_step_metadata(inputs))


# Compiled as a function of its own, so that programs share the kernel.
@lowered_once()
def _step_metadata(inputs: Inputs) -> tuple[jax.Array, ...]:
    queries_per_kv, frequencies = inputs.queries_per_kv, inputs.frequencies
    assert queries_per_kv is not None and frequencies is not None  # checked by the public op
    rows, block_size, window = inputs.rows, inputs.block_size, inputs.window
    batch, pages = inputs.block_table.shape
    limit, half = inputs.limit, len(frequencies)
    size = bounds_size(rows, queries_per_kv)
    columns = (size - 4) // 2
    # Rows of the tables, padded so that every thread has as many numbers.
    padded = -(-rows * half // THREADS) * THREADS // half
    by_number = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    by_angle = plgpu.Layout.WG_STRIDED((padded, half), vec_size=1)
    pdl = not interpreting()

    def body(
        table_gmem: Ref,
        start_gmem: Ref,
        num_rows_gmem: Ref,
        step_gmem: Ref,
        frequencies_gmem: Ref,
        positions_gmem: Ref,
        seq_lens_gmem: Ref,
        slots_gmem: Ref,
        window_gmem: Ref,
        bounds_gmem: Ref,
        cos_gmem: Ref,
        sin_gmem: Ref,
        bounds_smem: Ref,
        cos_smem: Ref,
        sin_smem: Ref,
    ) -> None:
        request = lax.axis_index("request")
        if pdl:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        first = start_gmem[request] + step_gmem[0]
        real = jnp.minimum(num_rows_gmem[request], rows)
        length = jnp.where(real > 0, jnp.minimum(first + real, limit), 0)

        def position_of(row: Index) -> jax.Array:
            return jnp.minimum(first + row, limit)

        def window_start(row: Index) -> jax.Array:
            if window is None:
                return jnp.zeros_like(position_of(row))
            return jnp.maximum(position_of(0 if inputs.one_window else row) - (window - 1), 0)

        def keys_of(row: Index) -> tuple[jax.Array, jax.Array]:
            """Return a row's first key, and the key after its last."""
            last = jnp.minimum(position_of(row) + 1, length) if inputs.causal else length
            return jnp.minimum(window_start(row), last), last

        slots = []  # all loads before the first store, which waits
        for row in range(rows):
            position = position_of(row)
            block = table_gmem[request, jnp.minimum(lax.div(position, block_size), pages - 1)]
            slot = block * block_size + lax.rem(position, block_size)
            slots.append(jnp.where((row < real) & (first + row < limit), slot, PAD_SLOT))

        row = plgpu.broadcasted_iota(jnp.int32, (padded, half), 0, layout=by_angle)
        angles = position_of(row).astype(jnp.float32) * load(frequencies_gmem, by_angle)
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        if inputs.attention_factor != 1.0:
            cos, sin = cos * inputs.attention_factor, sin * inputs.attention_factor
        cos_smem[...], sin_smem[...] = cos, sin

        begin, end = -(-pages * block_size // KEYS) * KEYS, 0
        for row in range(rows):
            low, high = keys_of(row)
            begin = jnp.where(low < high, jnp.minimum(begin, low), begin)
            end = jnp.where(low < high, jnp.maximum(end, high), end)
        number = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=by_number)
        column = jnp.where(number < columns, number, number - columns)
        low, high = keys_of(lax.div(column, queries_per_kv))
        is_used = column < rows * queries_per_kv
        bounds = jnp.where(is_used, jnp.where(number < columns, low, high), 0)
        ranges = lax.div(begin, KEYS), lax.div(end + (KEYS - 1), KEYS), length, length
        for i, value in enumerate(ranges):
            bounds = jnp.where(number == 2 * columns + i, value, bounds)
        bounds_smem[...] = bounds

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(bounds_smem.at[pl.ds(0, size)], bounds_gmem.at[request, 0])
        plgpu.copy_smem_to_gmem(cos_smem.at[pl.ds(0, rows)], cos_gmem.at[request])
        plgpu.copy_smem_to_gmem(sin_smem.at[pl.ds(0, rows)], sin_gmem.at[request])
        seq_lens_gmem[request] = length
        for row in range(rows):
            positions_gmem[request, row] = position_of(row)
            slots_gmem[request, row] = slots[row]
            window_gmem[request, row] = window_start(row)
        plgpu.wait_smem_to_gmem(0)

    by_row = jax.ShapeDtypeStruct((batch, rows), jnp.int32)
    table = jax.ShapeDtypeStruct((batch, rows, half), jnp.float32)
    call = plgpu.kernel(
        body,
        out_type=(
            by_row,
            jax.ShapeDtypeStruct((batch,), jnp.int32),
            by_row,
            by_row,
            jax.ShapeDtypeStruct((batch, 1, size), jnp.int32),
            table,
            table,
        ),
        grid=(batch,),
        grid_names=("request",),
        kernel_name=f"step_metadata_{rows}",
        scratch_types=[
            plgpu.SMEM((THREADS,), jnp.int32),
            plgpu.SMEM((padded, half), jnp.float32),
            plgpu.SMEM((padded, half), jnp.float32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    # Tiled here, as a constant: XLA would launch a kernel to tile it.
    tiled = jnp.asarray(np.tile(np.asarray(frequencies, np.float32), (padded, 1)))
    step = jnp.asarray(inputs.step, jnp.int32).reshape(1)
    return call(inputs.block_table, inputs.start, inputs.num_rows, step, tiled)
