"""A pass's metadata on Hopper: one launch, a block a request.

In jnp this is about ten kernels of a few numbers each, 2 us apiece, before every draft step and before the target's pass. cos and sin are
libdevice's, as XLA's are, so a prefill chunk (which is jnp's) and a decode step rotate a key by the same bits.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.bounds import KEYS, NARROW, bounds_size
from pallas_kernels.hopper import interpreting
from pallas_kernels.step_metadata.reference import PAD_SLOT, StepMetadata

THREADS = 128  # of a block


def unsupported(rows: int, group: int, rope_dim: int) -> str | None:
    """Why this kernel cannot run, None if it can."""
    if rows * group > NARROW:
        return f"expected at most {NARROW} rows x heads a KV head, got {rows} x {group}"
    if rope_dim % 8 or 2 * THREADS % rope_dim:
        return f"expected a rope_dim that is a multiple of 8 and a divisor of {2 * THREADS}, got {rope_dim}"
    return None


def step_metadata(
    block_table: jax.Array,
    start: jax.Array,
    num_rows: jax.Array,
    step: jax.Array,
    *,
    rows: int,
    block_size: int,
    max_model_len: int,
    window: int | None,
    group: int,
    frequencies: tuple[float, ...],
    attention_factor: float,
) -> StepMetadata:
    """See pallas_kernels.step_metadata.step_metadata."""
    batch, pages = block_table.shape
    limit, half = min(max_model_len, pages * block_size), len(frequencies)
    size = bounds_size(rows, group)
    columns = (size - 4) // 2
    padded = (
        -(-rows * half // THREADS) * THREADS // half
    )  # rows of the tables, so that every thread has as many numbers
    by_number = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)
    by_angle = plgpu.Layout.WG_STRIDED((padded, half), vec_size=1)
    pdl = not interpreting()

    def body(
        table_gmem: Any,
        start_gmem: Any,
        num_rows_gmem: Any,
        step_gmem: Any,
        frequencies_gmem: Any,
        *rest: Any,
    ) -> None:
        (
            positions_gmem,
            seq_lens_gmem,
            slots_gmem,
            window_gmem,
            bounds_gmem,
            cos_gmem,
            sin_gmem,
            bounds_smem,
            cos_smem,
            sin_smem,
        ) = rest
        request = lax.axis_index("request")
        if pdl:
            plgpu.griddepcontrol_launch_dependents()
            plgpu.griddepcontrol_wait()
        first = start_gmem[request] + step_gmem[0]
        real = jnp.minimum(num_rows_gmem[request], rows)
        length = jnp.where(real > 0, jnp.minimum(first + real, limit), 0)

        def position_of(row: Any) -> Any:
            return jnp.minimum(first + row, limit)

        def window_start(position: Any) -> Any:
            return (
                jnp.zeros_like(position)
                if window is None
                else jnp.maximum(position - (window - 1), 0)
            )

        def keys_of(row: Any) -> tuple[Any, Any]:
            """A row's first key, and the key after its last."""
            last = jnp.minimum(position_of(row) + 1, length)
            return jnp.minimum(window_start(position_of(row)), last), last

        slots = []  # all loads before the first store, which waits
        for row in range(rows):
            position = position_of(row)
            block = table_gmem[request, jnp.minimum(lax.div(position, block_size), pages - 1)]
            slot = block * block_size + lax.rem(position, block_size)
            slots.append(jnp.where((row < real) & (first + row < limit), slot, PAD_SLOT))

        angles = position_of(
            plgpu.broadcasted_iota(jnp.int32, (padded, half), 0, layout=by_angle)
        ).astype(jnp.float32)
        angles = angles * plgpu.load(frequencies_gmem, layout=by_angle)  # pyright: ignore[reportCallIssue]
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        cos_smem[...], sin_smem[...] = (
            (cos, sin)
            if attention_factor == 1.0
            else (cos * attention_factor, sin * attention_factor)
        )

        begin, end = -(-pages * block_size // KEYS) * KEYS, 0
        for row in range(rows):
            low, high = keys_of(row)
            begin, end = (
                jnp.where(low < high, jnp.minimum(begin, low), begin),
                jnp.where(low < high, jnp.maximum(end, high), end),
            )
        number = plgpu.broadcasted_iota(jnp.int32, (THREADS,), 0, layout=by_number)
        column = jnp.where(number < columns, number, number - columns)
        low, high = keys_of(lax.div(column, group))
        bounds = jnp.where(column < rows * group, jnp.where(number < columns, low, high), 0)
        for i, value in enumerate(
            (lax.div(begin, KEYS), lax.div(end + (KEYS - 1), KEYS), length, length)
        ):
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
            window_gmem[request, row] = window_start(position_of(row))
        plgpu.wait_smem_to_gmem(0)

    by_row, table = (
        jax.ShapeDtypeStruct((batch, rows), jnp.int32),
        jax.ShapeDtypeStruct((batch, rows, half), jnp.float32),
    )
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
    # Tiled here, where it is a constant: XLA would launch a kernel for it.
    tiled = np.tile(np.asarray(frequencies, np.float32), (padded, 1))
    return StepMetadata(*call(block_table, start, num_rows, step.reshape(1), jnp.asarray(tiled)))
