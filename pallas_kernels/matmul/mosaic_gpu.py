"""Matrix products of few rows on Hopper: weights stream through shared memory, tensor cores see them as the wide operand.

A decode step multiplies 1 to 64 rows by every weight of the model once, so its floor is the weights' bytes over the memory's bandwidth.
A block owns 64 output columns at a time, for the whole depth. Its warpgroups share the depth, step by step in turn, each with a ring of
TMA copies of its own, so that up to 200 KB are in flight an SM and the latency of one wgmma chain hides behind the other's. wgmma
computes the transposed product (W^T x^T), whose narrow axis is the rows padded to 8, 16, 32 or 64 instead of to 64.

Blocks have to lie evenly over the GPU's eight GPCs: the 16 or 18 SMs of one take in 0.7 TB/s together, so 64 blocks that crowd into four of
them read 2.8 TB/s. So where tiles are few and deep (o and down of an 8B model have 64) a block is a cluster of two CTAs that share the
depth, and a kernel that would land on whatever SMs this one leaves is not called early. docs/notes/block-placement.md has
the figures.

Every launch costs about two microseconds, so SwiGLU and the residual sum are done here, and so is the RMS norm between two products: the
one that makes the rows multiplies them by the norm's gain and sums the squares of each tile, the one that takes them divides its result by
the root of their mean. (Normalising in each block took 8 to 12 microseconds. docs/notes/shared-norms.md has what else was tried.)

The order of summation, chosen in plan.py, depends on the weights and on whether there are more than 8 rows: a cluster's CTAs send their
shares to the first one, which adds them in turn, whoever came first. So a row's bits do not depend on its neighbours.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting
from pallas_kernels.matmul import cluster_sum
from pallas_kernels.matmul.plan import (
    REDUCTION_BYTES,
    TILE_N,
    Tuning,
    choose_tuning,
    is_resident,
    num_pieces,
    padded_rows,
)


# Compiled as a function of its own, so that a model's layers share one kernel instead of lowering one each.
@partial(jax.jit, static_argnames=("eps", "swiglu", "transposed", "out_dtype", "tuning"))
def matmul(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    squares: jax.Array | None = None,
    eps: float = 0.0,
    residual: jax.Array | None = None,
    gain: jax.Array | None = None,
    swiglu: bool = False,
    transposed: bool = False,
    out_dtype: Any = jnp.bfloat16,
    tuning: Tuning | None = None,
) -> Any:
    """See pallas_kernels.matmul.matmul."""
    rows, depth = x.shape
    widths = tuple(w.shape[0 if transposed else 1] for w in weights)
    out_bytes = jnp.dtype(out_dtype).itemsize
    options: dict[str, Any] = {
        "residual": residual is not None,
        "normed": squares is not None,
        "norms": gain is not None,
    }
    tuning = tuning or choose_tuning(
        rows, depth, widths, swiglu=swiglu, out_bytes=out_bytes, **options
    )
    assert tuning is not None  # the public op has asked `unsupported`
    tile_k, stages, warpgroups = tuning.tile_k, tuning.stages, tuning.warpgroups
    split, part_depth = tuning.split, depth // tuning.split
    padded, steps = padded_rows(rows), part_depth // tile_k // warpgroups  # steps of one warpgroup
    assert stages > 1 and steps * tile_k * warpgroups * split == depth, (depth, tuning)
    counts = [n // TILE_N for n in widths]
    # With swiglu a block makes the same columns of gate and up; otherwise the weights lie side by side.
    num_tiles, width = (counts[0], widths[0]) if swiglu else (sum(counts), sum(widths))
    products = 2 if swiglu else 1
    blocks = min(tuning.blocks, num_tiles)
    assert split == 1 or blocks == num_tiles, tuning
    share = (products, TILE_N, padded)  # of a warpgroup in its tile's sums
    senders = (split - 1) * warpgroups  # to a cluster's first CTA
    through_memory = cluster_sum.outputs(blocks, senders, share)
    resident = is_resident(rows, part_depth)
    pdl = tuning.pdl and not interpreting()
    layout = plgpu.Layout.WGMMA
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(*refs: Any) -> None:
        rest: Any
        x_gmem, *rest = refs
        w_gmems, rest = rest[: len(weights)], rest[len(weights) :]
        optional: list[Any] = []
        for given in (squares, residual, gain):
            first, rest = (None, rest) if given is None else (rest[0], rest[1:])
            optional.append(first)
        squares_gmem, residual_gmem, gain_gmem = optional
        out_gmem, rest = rest[0], rest[1:]
        scaled_gmem: Any
        made_gmem: Any
        (scaled_gmem, made_gmem), rest = (
            (rest[:2], rest[2:]) if gain is not None else ((None, None), rest)
        )
        exchange, rest = rest[: len(through_memory)], rest[len(through_memory) :]
        x_smem, w_smem, out_smem, partial_smem, halves, residual_smem, *rest = rest
        scale_smem, gain_smem, scaled_smem, made_smem, *barriers = rest
        barrier, x_barrier, done, taken, residual_barrier, gain_barrier, *received = barriers
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        part, cluster_memory = (
            lax.axis_index(cluster_sum.AXIS) if split > 1 else 0,
            [*exchange, *received],
        )
        finishes = (wg == 0) & (part == 0)
        all_rows = pl.ds(
            block * 0, padded
        )  # rows past the last one: copies fill them with zeros, and drop them on the way out

        # Turns count a warpgroup's steps through all tiles of its block.
        def place(turn: Any) -> tuple[Any, Any, Any]:
            tile, step = (
                block + lax.div(turn, steps) * blocks,
                lax.rem(turn, steps) * warpgroups + wg,
            )
            return tile, depth_of(step), wg * stages + lax.rem(turn, stages)

        def depth_of(step: Any) -> Any:
            return pl.ds(part * part_depth + step * tile_k, tile_k)

        def copy_weight(ref: Any, column: Any, k: Any, slot: Any, product: int) -> None:
            n = pl.ds(column * TILE_N, TILE_N)
            source = ref.at[n, k] if transposed else ref.at[k, n]
            plgpu.copy_gmem_to_smem(source, w_smem.at[slot, product], barrier.at[slot])

        def load_weights(turn: Any) -> None:
            tile, k, slot = place(turn)
            if swiglu:
                copy_weight(w_gmems[0], tile, k, slot, 0)
                copy_weight(w_gmems[1], tile, k, slot, 1)
                return
            first = 0
            for ref, count in zip(w_gmems, counts, strict=True):
                if len(w_gmems) == 1:
                    copy_weight(ref, tile, k, slot, 0)
                else:
                    mine = (tile >= first) & (tile < first + count)
                    pl.when(mine)(
                        lambda ref=ref, first=first: copy_weight(ref, tile - first, k, slot, 0)
                    )
                first += count

        def load_x(turn: Any) -> None:
            _, k, slot = place(turn)
            plgpu.copy_gmem_to_smem(x_gmem.at[all_rows, k], x_smem.at[slot], barrier.at[slot])

        tiles_here = lax.div(num_tiles - 1 - block, blocks) + 1
        turns = steps * tiles_here

        def fill() -> None:
            for turn in range(stages):
                pl.when(turn < turns)(lambda turn=turn: load_weights(jnp.int32(turn)))

        if tuning.weights_first:
            fill()
        if pdl:
            plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; x does
        if resident:
            # A warpgroup brings and multiplies the same steps: nothing has to meet.
            @pl.loop(0, steps)
            def _bring(i: Any) -> None:
                step = i * warpgroups + wg
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[all_rows, depth_of(step)], x_smem.at[step], x_barrier.at[wg]
                )
        else:
            for turn in range(stages):
                pl.when(turn < turns)(lambda turn=turn: load_x(jnp.int32(turn)))
        if not tuning.weights_first:
            fill()
        if resident:
            plgpu.barrier_wait(x_barrier.at[wg])

        def refill(turn: Any) -> None:
            load_weights(turn)
            if not resident:
                load_x(turn)

        def scale() -> Any:
            """What the norm divides the rows by, inverted."""
            sums = plgpu.load(squares_gmem, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
            written = (
                plgpu.broadcasted_iota(jnp.int32, sums.shape, 0, layout=layout) < depth // TILE_N
            )
            return lax.rsqrt(jnp.sum(jnp.where(written, sums, 0.0), axis=0) / depth + eps)

        # A lone warpgroup keeps it in registers. Several share the memory that sums across warps need, so just one of them may sum.
        scale_here = scale() if squares_gmem is not None and warpgroups == 1 else None
        if squares_gmem is not None and warpgroups > 1:

            @pl.when(wg == 0)
            def _keep_scale() -> None:
                scale_smem[...] = scale()
                plgpu.commit_smem()

        @pl.loop(0, tiles_here)
        def _tile(index: Any) -> None:
            tile = block + index * blocks
            here = (all_rows, pl.ds(tile * TILE_N, TILE_N))
            if gain_gmem is not None:
                of_tile = gain_gmem.at[pl.ds(tile * TILE_N, TILE_N)]
                pl.when(finishes)(lambda: plgpu.copy_gmem_to_smem(of_tile, gain_smem, gain_barrier))
            if residual_gmem is not None:
                source = residual_gmem.at[here]
                pl.when(finishes)(
                    lambda: plgpu.copy_gmem_to_smem(source, residual_smem, residual_barrier)
                )

            def accumulate(*accumulators: Any) -> Any:
                @pl.loop(0, steps)
                def _step(step: Any) -> None:
                    turn = step + index * steps
                    slot = wg * stages + lax.rem(turn, stages)
                    plgpu.barrier_wait(barrier.at[slot])
                    x_tile = x_smem.at[step * warpgroups + wg if resident else slot].transpose(
                        (1, 0)
                    )
                    for product, acc in enumerate(accumulators):
                        w = w_smem.at[slot, product]
                        plgpu.wgmma(acc, w if transposed else w.transpose((1, 0)), x_tile)
                    plgpu.wgmma_wait(
                        products
                    )  # the step before is done: its slot takes a later turn
                    pl.when((turn > 0) & (turn - 1 + stages < turns))(
                        lambda: refill(turn - 1 + stages)
                    )
                    if (
                        pdl and tuning.calls_next
                    ):  # not before the last copy is on its way: the next one's blocks would compete with it
                        pl.when(turn == jnp.maximum(turns - stages, 0))(
                            plgpu.griddepcontrol_launch_dependents
                        )

                return tuple(acc[...] for acc in accumulators)

            results = pl.run_scoped(
                accumulate, *[plgpu.ACC((TILE_N, padded), jnp.float32)] * products
            )

            if senders:
                pl.when(part > 0)(
                    lambda: cluster_sum.send(
                        results, cluster_memory, block, (part - 1) * warpgroups + wg
                    )
                )

            if warpgroups > 1:

                @pl.when((wg > 0) & (part == 0))
                def _hand_over() -> None:
                    pl.when(index > 0)(lambda: plgpu.barrier_wait(taken.at[wg - 1]))
                    for product, result in enumerate(results):
                        partial_smem[wg - 1, product] = result
                    plgpu.barrier_arrive(done)

            def finish(totals: list[Any]) -> None:
                if squares_gmem is not None:
                    factor = scale_here
                    if factor is None:
                        factor = plgpu.load(scale_smem, layout=layout.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
                    totals = [
                        total * lax.broadcast_in_dim(factor, total.shape, [1]) for total in totals
                    ]
                if swiglu:
                    gate, up = (t.astype(out_dtype).astype(jnp.float32) for t in totals)
                    total = (gate / (1.0 + jnp.exp(-gate))).astype(out_dtype).astype(
                        jnp.float32
                    ) * up
                else:
                    (total,) = totals
                total = total.astype(out_dtype)
                if residual_gmem is not None:
                    plgpu.barrier_wait(residual_barrier)
                    added = residual_smem.transpose((1, 0))[...].astype(jnp.float32) + total.astype(
                        jnp.float32
                    )
                    total = added.astype(out_dtype)
                plgpu.wait_smem_to_gmem(0)  # the tile before has left out_smem
                if gain_gmem is not None:
                    plgpu.barrier_wait(gain_barrier)
                    column = plgpu.load(gain_smem, layout=layout.reduce(1), optimized=False).astype(
                        jnp.float32
                    )  # pyright: ignore[reportCallIssue]
                    value = total.astype(jnp.float32)
                    scaled_smem.transpose((1, 0))[...] = (
                        value * lax.broadcast_in_dim(column, value.shape, [0])
                    ).astype(out_dtype)
                    made_smem[...] = jnp.sum(value * value, axis=0)
                if out_dtype == jnp.float32:
                    # Only 16-bit values can be stored transposed: high and low halves go apart and meet again in rows of the output.
                    bits = lax.bitcast_convert_type(total, jnp.uint32)
                    halves.at[0].transpose((1, 0))[...] = (bits >> 16).astype(jnp.uint16)
                    halves.at[1].transpose((1, 0))[...] = (bits & 0xFFFF).astype(jnp.uint16)
                    plgpu.commit_smem()
                    bits = (halves[0].astype(jnp.uint32) << 16) | halves[1].astype(jnp.uint32)
                    out_smem[...] = lax.bitcast_convert_type(bits, jnp.float32)
                else:
                    out_smem.transpose((1, 0))[...] = total
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(out_smem, out_gmem.at[here])
                if gain is not None:
                    plgpu.copy_smem_to_gmem(scaled_smem, scaled_gmem.at[here])
                    plgpu.copy_smem_to_gmem(made_smem, made_gmem.at[tile])

            @pl.when(finishes)
            def _add_up() -> None:
                totals = list(results)
                if warpgroups > 1:
                    plgpu.barrier_wait(done)
                    for other in range(warpgroups - 1):
                        for product in range(products):
                            totals[product] += plgpu.load(
                                partial_smem.at[other, product], layout=layout, optimized=False
                            )  # pyright: ignore[reportCallIssue]

                    @pl.when(index + 1 < tiles_here)
                    def _free() -> None:
                        for other in range(warpgroups - 1):
                            plgpu.barrier_arrive(taken.at[other])

                if senders:
                    totals = cluster_sum.add(totals, cluster_memory, block, senders, warpgroups)
                finish(totals)

        plgpu.wait_smem_to_gmem(0)

    slots, several = warpgroups * stages, warpgroups > 1
    weight_tile = (TILE_N, tile_k) if transposed else (tile_k, TILE_N)
    out_type = jax.ShapeDtypeStruct((rows, width), out_dtype)
    made_type = jax.ShapeDtypeStruct((num_pieces(width), padded), jnp.float32)
    results = (out_type,) if gain is None else (out_type, out_type, made_type)
    suffixes = {
        "swiglu": swiglu,
        "normed": squares is not None,
        "residual": residual is not None,
        "norms": gain is not None,
    }
    call = plgpu.kernel(
        body,
        out_type=(*results, *through_memory),
        grid=(blocks,),
        grid_names=("block",),
        **({"cluster": (split,), "cluster_names": (cluster_sum.AXIS,)} if split > 1 else {}),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name="_".join(
            [f"matmul_{depth}x{width}", *(name for name, present in suffixes.items() if present)]
        ),
        scratch_types=[
            plgpu.SMEM(
                (part_depth // tile_k if resident else slots, padded, tile_k),
                x.dtype,
                transforms=transforms,
            ),
            plgpu.SMEM((slots, products, *weight_tile), x.dtype, transforms=transforms),
            plgpu.SMEM((padded, TILE_N), out_dtype),
            plgpu.SMEM((warpgroups - 1, *share), jnp.float32) if several else None,
            plgpu.SMEM((2, padded, TILE_N), jnp.uint16) if out_dtype == jnp.float32 else None,
            None if residual is None else plgpu.SMEM((padded, TILE_N), residual.dtype),
            plgpu.SMEM((padded,), jnp.float32) if squares is not None and several else None,
            None if gain is None else plgpu.SMEM((TILE_N,), gain.dtype),
            None if gain is None else plgpu.SMEM((padded, TILE_N), out_dtype),
            None if gain is None else plgpu.SMEM((padded,), jnp.float32),
            plgpu.Barrier(num_barriers=slots, num_arrivals=products if resident else products + 1),
            plgpu.Barrier(num_barriers=warpgroups, num_arrivals=steps) if resident else None,
            plgpu.Barrier(num_arrivals=warpgroups - 1) if several else None,
            plgpu.Barrier(num_barriers=warpgroups - 1) if several else None,
            None if residual is None else plgpu.Barrier(),
            None if gain is None else plgpu.Barrier(),
            *cluster_sum.scratch(senders, warpgroups, share),
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
    )
    made = call(x, *weights, *(a for a in (squares, residual, gain) if a is not None))[
        : len(results)
    ]
    return made[0] if gain is None else tuple(made)
