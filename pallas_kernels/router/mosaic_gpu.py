"""The router on Hopper in one launch, where XLA takes seven to ten.

A CTA takes 64 rows and streams the router through shared memory (TMA ring, wgmma). It then takes
the best k by k passes over the row, and weighs them. A row of logits is spread over four threads,
so its maximum costs two shuffles. A row's bits and its experts depend on the row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.hopper import interpreting
from pallas_kernels.lowered_once import lowered_once
from pallas_kernels.mosaic import load
from pallas_kernels.router import MAX_ROWS
from pallas_kernels.router.inputs import Inputs
from pallas_kernels.types import Accumulator, Barrier, Index, Ref

TILE_ROWS = 64
SWIZZLE_ROWS = 8  # that a swizzle moves together
EXPERTS = (32, 64, 128)
WIDTH = 8  # columns of the result: wgmma's narrowest tile
RING_BYTES = 192 * 1024


@dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    tile_k: depth of a step. pdl: programmatic dependent launch, which CUDA graphs ignore before
    jax 0.12 and the interpreter does not know.
    """

    tile_k: int = 128
    pdl: bool = True


def unsupported(rows: int, router: tuple[int, ...], top_k: int, dtype: DTypeLike) -> str | None:
    """Return why this kernel cannot run, None if it can."""
    depth, count = router
    if dtype != jnp.bfloat16:
        return f"expected bfloat16, got {jnp.dtype(dtype).name}"
    if not 1 <= rows <= MAX_ROWS:
        return f"expected 1 to {MAX_ROWS} rows, got {rows}"
    if count not in EXPERTS or depth % 64:
        return (
            f"expected {', '.join(map(str, EXPERTS))} experts and a hidden size that is a "
            f"multiple of 64, got {count} and {depth}"
        )
    return f"expected a top_k of at most {WIDTH}, got {top_k}" if top_k > WIDTH else None


# Compiled as a function of its own, so that layers and programs share one kernel.
@lowered_once(static_argnames="tuning")
def route(inputs: Inputs, *, tuning: Tuning | None = None) -> tuple[jax.Array, jax.Array]:
    """Run the op; see pallas_kernels.router.route. Experts are [rows, WIDTH]."""
    x, router, bias, kind = inputs.x, inputs.router, inputs.bias, inputs.kind
    num_rows = x.shape[0]
    if num_rows > SWIZZLE_ROWS:  # a copy takes up to 8 rows, or a multiple of 8
        x = jnp.pad(x, ((0, -num_rows % SWIZZLE_ROWS), (0, 0)))
    (rows, depth), count = x.shape, router.shape[1]
    tuning = tuning or Tuning(128 if depth % 128 == 0 else 64)
    tile_k = tuning.tile_k
    steps = depth // tile_k
    stages = min(steps, RING_BYTES // (2 * tile_k * (TILE_ROWS + count)))
    pdl = tuning.pdl and not interpreting()
    layout = plgpu.Layout.WGMMA
    square = (TILE_ROWS, count)

    def spread(vector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return lax.broadcast_in_dim(vector, shape, (0,))

    def side_by_side(columns: list[jax.Array]) -> jax.Array:
        """Return the vectors as columns of [TILE_ROWS, WIDTH]; those past the last are zeros."""
        column = plgpu.broadcasted_iota(jnp.int32, (TILE_ROWS, WIDTH), 1, layout=layout)
        out = plgpu.layout_cast(jnp.full(column.shape, 0.0, jnp.float32), layout)
        for i, values in enumerate(columns):
            out = jnp.where(column == i, spread(values, column.shape), out)
        return out

    def body(
        x_gmem: Ref,
        router_gmem: Ref,
        bias_gmem: Ref | None,
        ids_gmem: Ref,
        weights_gmem: Ref,
        x_smem: Ref,
        router_smem: Ref,
        ids_smem: Ref,
        weights_smem: Ref,
        barrier: Barrier,
    ) -> None:
        # Copies fill rows past the last one with zeros, and do not write them.
        here = pl.ds(lax.axis_index("tile") * TILE_ROWS, TILE_ROWS)

        def fetch(step: Index, slot: Index, ref: Ref, smem: Ref) -> None:
            depths = pl.ds(step * tile_k, tile_k)
            source = ref.at[here, depths] if ref is x_gmem else ref.at[depths]
            plgpu.copy_gmem_to_smem(source, smem.at[slot], barrier.at[slot])

        for step in range(stages):
            fetch(jnp.int32(step), step, router_gmem, router_smem)
        if pdl:
            plgpu.griddepcontrol_wait()  # the router does not depend on the kernel before; x does
        for step in range(stages):
            fetch(jnp.int32(step), step, x_gmem, x_smem)

        def multiply(acc: Accumulator) -> jax.Array:
            @pl.loop(0, steps)
            def _step(step: jax.Array) -> None:
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(barrier.at[slot])
                plgpu.wgmma(acc, x_smem.at[slot], router_smem.at[slot])
                plgpu.wgmma_wait(1)  # the step before is done: refill its slot

                @pl.when((step > 0) & (step - 1 + stages < steps))
                def _refill() -> None:
                    done = lax.rem(step - 1, stages)
                    fetch(step - 1 + stages, done, router_gmem, router_smem)
                    fetch(step - 1 + stages, done, x_gmem, x_smem)

            return acc[...]

        scores = pl.run_scoped(multiply, plgpu.ACC(square, jnp.float32))
        if pdl:
            plgpu.griddepcontrol_launch_dependents()
        if kind == "sigmoid":
            scores = 1.0 / (1.0 + jnp.exp(-scores))
        choice = scores
        if bias_gmem is not None:
            added = load(bias_gmem, layout.reduce(0), optimized=False)
            choice = scores + lax.broadcast_in_dim(added.astype(jnp.float32), square, (1,))
        total = None  # that the weights are divided by, if it is not the sum of the chosen ones
        if kind == "softmax" and not inputs.normalise:
            total = jnp.exp(choice - spread(choice.max(axis=1), square)).sum(axis=1)
        expert = plgpu.broadcasted_iota(jnp.int32, square, 1, layout=layout)
        never = jnp.full(square, -jnp.inf, jnp.float32)
        ids: list[jax.Array] = []
        chosen: list[jax.Array] = []
        for _ in range(inputs.top_k):
            highest = choice.max(axis=1)
            best = choice == spread(highest, square)
            first = jnp.where(best, expert, jnp.full(square, count, jnp.int32)).min(axis=1)
            taken = expert == spread(first, square)
            # As floats: no layout is inferred for integers that are spread to two shapes.
            ids.append(first.astype(jnp.float32))
            # A softmax's scores are what it chooses by. Kept beside it, 128 of them would spill.
            chosen.append(
                highest if kind == "softmax" else jnp.where(taken, scores, never).max(axis=1)
            )
            choice = jnp.where(taken, never, choice)
        if kind == "softmax":
            chosen = [jnp.exp(value - chosen[0]) for value in chosen]
        scale = jnp.full((TILE_ROWS,), inputs.scaling if kind == "sigmoid" else 1.0, jnp.float32)
        if inputs.normalise:
            total = sum(chosen[1:], chosen[0]) + 1e-20
        if total is not None:
            scale = scale / total
        ids_smem[...] = side_by_side(ids).astype(jnp.int32)
        weights_smem[...] = side_by_side([value * scale for value in chosen])
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ids_smem, ids_gmem.at[here])
        plgpu.copy_smem_to_gmem(weights_smem, weights_gmem.at[here])
        plgpu.wait_smem_to_gmem(0)

    def tiled(columns: int) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
        return plgpu.TilingTransform((SWIZZLE_ROWS, columns)), plgpu.SwizzleTransform(2 * columns)

    call = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((rows, WIDTH), jnp.int32),
            jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),
        ),
        grid=(-(-rows // TILE_ROWS),),
        grid_names=("tile",),
        kernel_name=f"route_{depth}x{count}_{kind}",
        scratch_types=[
            plgpu.SMEM((stages, TILE_ROWS, tile_k), x.dtype, transforms=tiled(min(count, 64))),
            plgpu.SMEM((stages, tile_k, count), router.dtype, transforms=tiled(min(count, 64))),
            plgpu.SMEM((TILE_ROWS, WIDTH), jnp.int32),
            plgpu.SMEM((TILE_ROWS, WIDTH), jnp.float32),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        ],
    )
    ids, weights = call(x, router, bias)
    return ids[:num_rows], weights[:num_rows, : inputs.top_k]
