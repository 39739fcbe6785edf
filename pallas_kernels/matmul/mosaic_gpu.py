"""Matrix products of few rows on Hopper: weights stream through shared memory, tensor cores see them as the wide operand.

A decode step multiplies 1 to 64 rows by every weight of the model once, so its floor is the weights' bytes over the memory's bandwidth.
A block owns 64 output columns at a time, for the whole depth. Its warpgroups share the depth, step by step in turn, each with a ring of
TMA copies of its own, so that up to 200 KB are in flight an SM and the latency of one wgmma chain hides behind the other's. wgmma
computes the transposed product (W^T x^T), whose narrow axis is the rows padded to 8, 16, 32 or 64 instead of to 64.

Every launch costs about two microseconds, so SwiGLU and the residual sum are done here, and so is the RMS norm between two products: the
one that makes the rows multiplies them by the norm's gain and sums the squares of each tile, the one that takes them divides its result by
the root of their mean. (Normalising in each block took 8 to 12 microseconds. docs/performance.md has what else was tried.)

The order of summation depends on the shape of the weights and on whether there are more than 8 rows, and on nothing else: a row's bits do
not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import interpreting

MAX_ROWS = 64
MAX_NORM_ROWS = 8  # that share a norm: for 64 rows a kernel of the norm's own is faster
MAX_SMEM = 227 * 1024
NUM_SMS = 132
TILE_N = 64  # output columns a tile: wgmma's M
REDUCTION_BYTES = 1024  # for sums across warps
RESIDENT_BYTES = 72 * 1024  # an input up to this size stays in shared memory; a wider one streams beside the weights


@dataclass(frozen=True)
class Tuning:
    """tile_k depth a step (64 or 128), warpgroups that share the depth, stages (at least 2) of each one's ring, most blocks at once
    (they take the tiles in turn). pdl: programmatic dependent launch, which CUDA graphs ignore and the interpreter does not know."""

    tile_k: int = 128
    warpgroups: int = 2
    stages: int = 6
    blocks: int = NUM_SMS
    pdl: bool = True


def padded_rows(rows: int) -> int:
    """The narrow axis of the product: wgmma takes multiples of 8."""
    return next(p for p in (8, 16, 32, MAX_ROWS) if p >= rows)


def is_resident(rows: int, depth: int) -> bool:
    """Whether all of x stays in shared memory."""
    return padded_rows(rows) * depth * 2 <= RESIDENT_BYTES


def num_pieces(width: int) -> int:
    """Partial sums of squares that a row of this width has: one a tile, in whole wgmma tiles, of which the last may never be written."""
    return -(-width // TILE_N // TILE_N) * TILE_N


def smem_bytes(
    rows: int, depth: int, tuning: Tuning, products: int, out_bytes: int, residual: bool, normed: bool = False, norms: bool = False
) -> int:
    """Shared memory of a block, to within the barriers."""
    padded, slots = padded_rows(rows), tuning.warpgroups * tuning.stages
    x = depth * padded * 2 if is_resident(rows, depth) else slots * tuning.tile_k * padded * 2
    ring = slots * tuning.tile_k * TILE_N * products * 2
    partial_sums = (tuning.warpgroups - 1) * products * TILE_N * padded * 4
    out = TILE_N * padded * (out_bytes + (4 if out_bytes == 4 else 0) + (2 if residual else 0))
    out += 1024 if normed and tuning.warpgroups > 1 else 0  # what is small takes 1 KB, where the next piece may start
    out += TILE_N * padded * 2 + 2 * 1024 if norms else 0
    return x + ring + partial_sums + out + (REDUCTION_BYTES if normed or norms else 0) + 1024


def choose_tuning(
    rows: int,
    depth: int,
    widths: tuple[int, ...],
    *,
    swiglu: bool = False,
    out_bytes: int = 2,
    residual: bool = False,
    normed: bool = False,
    norms: bool = False,
) -> Tuning | None:
    """What measured best on an H200 (docs/performance.md), with as many stages as fit; None if nothing does.

    tile_k and warpgroups set the order of summation. They depend on whether there are at most 8 rows, and on nothing else of the rows.
    """
    few = padded_rows(rows) == 8
    tiles = (widths[0] if swiglu else sum(widths)) // TILE_N
    # Gate and up of many rows: two blocks an SM, each with half of the shared memory, keep the tensor cores busy.
    blocks_an_sm = 2 if swiglu and not few and not is_resident(rows, depth) else 1
    rounds = -(-tiles // (NUM_SMS * blocks_an_sm))
    for tile_k in (128, 64) if few else (64, 128):
        for warpgroups in (1, 3) if swiglu else (2, 3, 1):
            if depth % (tile_k * warpgroups):
                continue
            for stages in (6, 5, 4, 3, 2):
                tuning = Tuning(tile_k, warpgroups, stages, -(-tiles // rounds))
                needed = smem_bytes(rows, depth, tuning, 2 if swiglu else 1, out_bytes, residual, normed, norms)
                if needed <= MAX_SMEM // blocks_an_sm:
                    return tuning
    return None


def unsupported(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    residual: bool = False,
    swiglu: bool = False,
    transposed: bool = False,
    normed: bool = False,
    norms: bool = False,
    out_dtype: Any = jnp.bfloat16,
) -> str | None:
    """Why this kernel cannot make this product, None if it can. Takes anything with a shape and a dtype. normed: x comes with its squares;
    norms: the result is to have its own, and a gain."""
    rows, depth = x.shape
    widths = tuple(w.shape[0 if transposed else 1] for w in weights)
    if any(a.dtype != jnp.bfloat16 for a in (x, *weights)):
        return f"expected bfloat16 operands, got {x.dtype} and {weights[0].dtype}"
    if not 1 <= rows <= MAX_ROWS or (rows > 8 and rows % 8):
        return f"expected 1 to 8 rows, or a multiple of 8 up to {MAX_ROWS}, got {rows}"
    if depth % 64 or any(n % TILE_N for n in widths):
        return f"expected a depth and widths that are multiples of 64, got {depth} and {widths}"
    if (norms or normed) and rows > MAX_NORM_ROWS:
        return f"expected at most {MAX_NORM_ROWS} rows that share a norm, got {rows}"
    if norms and (swiglu or len(weights) > 1 or out_dtype != jnp.bfloat16):
        return f"expected one weight and a bfloat16 result without swiglu where it gets a gain, got {len(weights)}, {out_dtype}, {swiglu}"
    options: dict[str, Any] = {"swiglu": swiglu, "residual": residual, "normed": normed, "norms": norms}
    if choose_tuning(rows, depth, widths, out_bytes=jnp.dtype(out_dtype).itemsize, **options) is None:
        return f"expected a ring of two stages to fit into {MAX_SMEM} bytes of shared memory, got {rows} rows of {depth}"
    return None


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
    options: dict[str, Any] = {"residual": residual is not None, "normed": squares is not None, "norms": gain is not None}
    tuning = tuning or choose_tuning(rows, depth, widths, swiglu=swiglu, out_bytes=out_bytes, **options)
    assert tuning is not None  # the public op has asked `unsupported`
    tile_k, stages, warpgroups = tuning.tile_k, tuning.stages, tuning.warpgroups
    padded, steps = padded_rows(rows), depth // tile_k // warpgroups  # steps of one warpgroup
    assert stages > 1 and steps * tile_k * warpgroups == depth, (depth, tuning)
    counts = [n // TILE_N for n in widths]
    # With swiglu a block makes the same columns of gate and up; otherwise the weights lie side by side.
    num_tiles, width = (counts[0], widths[0]) if swiglu else (sum(counts), sum(widths))
    products = 2 if swiglu else 1
    blocks = min(tuning.blocks, num_tiles)
    resident = is_resident(rows, depth)
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
        (scaled_gmem, made_gmem), rest = (rest[:2], rest[2:]) if gain is not None else ((None, None), rest)
        x_smem, w_smem, out_smem, partial_smem, halves, residual_smem, *rest = rest
        scale_smem, gain_smem, scaled_smem, made_smem, *barriers = rest
        barrier, x_barrier, done, taken, residual_barrier, gain_barrier = barriers
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        all_rows = pl.ds(block * 0, padded)  # rows past the last one: copies fill them with zeros, and drop them on the way out

        def copy_weight(ref: Any, column: Any, step: Any, slot: Any, product: int) -> None:
            k, n = pl.ds(step * tile_k, tile_k), pl.ds(column * TILE_N, TILE_N)
            source = ref.at[n, k] if transposed else ref.at[k, n]
            plgpu.copy_gmem_to_smem(source, w_smem.at[slot, product], barrier.at[slot])

        # Turns count a warpgroup's steps through all tiles of its block.
        def place(turn: Any) -> tuple[Any, Any, Any]:
            tile, step = block + lax.div(turn, steps) * blocks, lax.rem(turn, steps) * warpgroups + wg
            return tile, step, wg * stages + lax.rem(turn, stages)

        def load_weights(turn: Any) -> None:
            tile, step, slot = place(turn)
            if swiglu:
                copy_weight(w_gmems[0], tile, step, slot, 0)
                copy_weight(w_gmems[1], tile, step, slot, 1)
                return
            first = 0
            for ref, count in zip(w_gmems, counts, strict=True):
                if len(w_gmems) == 1:
                    copy_weight(ref, tile, step, slot, 0)
                else:
                    mine = (tile >= first) & (tile < first + count)
                    pl.when(mine)(lambda ref=ref, first=first: copy_weight(ref, tile - first, step, slot, 0))
                first += count

        def load_x(turn: Any) -> None:
            _, step, slot = place(turn)
            plgpu.copy_gmem_to_smem(x_gmem.at[all_rows, pl.ds(step * tile_k, tile_k)], x_smem.at[slot], barrier.at[slot])

        tiles_here = lax.div(num_tiles - 1 - block, blocks) + 1
        turns = steps * tiles_here
        for turn in range(stages):
            pl.when(turn < turns)(lambda turn=turn: load_weights(jnp.int32(turn)))
        if pdl:
            plgpu.griddepcontrol_wait()  # weights do not depend on the kernel before; x does
        if resident:
            # A warpgroup brings and multiplies the same steps: nothing has to meet.
            @pl.loop(0, steps)
            def _bring(i: Any) -> None:
                step = i * warpgroups + wg
                plgpu.copy_gmem_to_smem(x_gmem.at[all_rows, pl.ds(step * tile_k, tile_k)], x_smem.at[step], x_barrier.at[wg])

            plgpu.barrier_wait(x_barrier.at[wg])
        else:
            for turn in range(stages):
                pl.when(turn < turns)(lambda turn=turn: load_x(jnp.int32(turn)))

        def refill(turn: Any) -> None:
            load_weights(turn)
            if not resident:
                load_x(turn)

        def scale() -> Any:
            """What the norm divides the rows by, inverted."""
            sums = plgpu.load(squares_gmem, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]
            written = plgpu.broadcasted_iota(jnp.int32, sums.shape, 0, layout=layout) < depth // TILE_N
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
                pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(of_tile, gain_smem, gain_barrier))
            if residual_gmem is not None:
                source = residual_gmem.at[here]
                pl.when(wg == 0)(lambda: plgpu.copy_gmem_to_smem(source, residual_smem, residual_barrier))

            def accumulate(*accumulators: Any) -> Any:
                @pl.loop(0, steps)
                def _step(step: Any) -> None:
                    turn = step + index * steps
                    slot = wg * stages + lax.rem(turn, stages)
                    plgpu.barrier_wait(barrier.at[slot])
                    x_tile = x_smem.at[step * warpgroups + wg if resident else slot].transpose((1, 0))
                    for product, acc in enumerate(accumulators):
                        w = w_smem.at[slot, product]
                        plgpu.wgmma(acc, w if transposed else w.transpose((1, 0)), x_tile)
                    plgpu.wgmma_wait(products)  # the step before is done: its slot takes a later turn
                    pl.when((turn > 0) & (turn - 1 + stages < turns))(lambda: refill(turn - 1 + stages))
                    if pdl and gain is None:
                        # Not before the last copy is on its way: the next kernel's blocks would compete with this one's. Those of another
                        # product do even then (10 microseconds a layer), and that is what follows a result with a gain.
                        pl.when(turn == jnp.maximum(turns - stages, 0))(plgpu.griddepcontrol_launch_dependents)

                return tuple(acc[...] for acc in accumulators)

            results = pl.run_scoped(accumulate, *[plgpu.ACC((TILE_N, padded), jnp.float32)] * products)

            if warpgroups > 1:

                @pl.when(wg > 0)
                def _hand_over() -> None:
                    pl.when(index > 0)(lambda: plgpu.barrier_wait(taken.at[wg - 1]))
                    for product, result in enumerate(results):
                        partial_smem[wg - 1, product] = result
                    plgpu.barrier_arrive(done)

            @pl.when(wg == 0)
            def _finish() -> None:
                totals = list(results)
                if warpgroups > 1:
                    plgpu.barrier_wait(done)
                    for other in range(warpgroups - 1):
                        for product in range(products):
                            totals[product] += plgpu.load(partial_smem.at[other, product], layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

                    @pl.when(index + 1 < tiles_here)
                    def _free() -> None:
                        for other in range(warpgroups - 1):
                            plgpu.barrier_arrive(taken.at[other])

                if squares_gmem is not None:
                    factor = scale_here
                    if factor is None:
                        factor = plgpu.load(scale_smem, layout=layout.reduce(0), optimized=False)  # pyright: ignore[reportCallIssue]
                    totals = [total * lax.broadcast_in_dim(factor, total.shape, [1]) for total in totals]
                if swiglu:
                    gate, up = (t.astype(out_dtype).astype(jnp.float32) for t in totals)
                    total = (gate / (1.0 + jnp.exp(-gate))).astype(out_dtype).astype(jnp.float32) * up
                else:
                    (total,) = totals
                total = total.astype(out_dtype)
                if residual_gmem is not None:
                    plgpu.barrier_wait(residual_barrier)
                    added = residual_smem.transpose((1, 0))[...].astype(jnp.float32) + total.astype(jnp.float32)
                    total = added.astype(out_dtype)
                plgpu.wait_smem_to_gmem(0)  # the tile before has left out_smem
                if gain_gmem is not None:
                    plgpu.barrier_wait(gain_barrier)
                    column = plgpu.load(gain_smem, layout=layout.reduce(1), optimized=False).astype(jnp.float32)  # pyright: ignore[reportCallIssue]
                    value = total.astype(jnp.float32)
                    scaled_smem.transpose((1, 0))[...] = (value * lax.broadcast_in_dim(column, value.shape, [0])).astype(out_dtype)
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

        plgpu.wait_smem_to_gmem(0)

    slots, several = warpgroups * stages, warpgroups > 1
    weight_tile = (TILE_N, tile_k) if transposed else (tile_k, TILE_N)
    out_type = jax.ShapeDtypeStruct((rows, width), out_dtype)
    made_type = jax.ShapeDtypeStruct((num_pieces(width), padded), jnp.float32)
    suffixes = {"swiglu": swiglu, "normed": squares is not None, "residual": residual is not None, "norms": gain is not None}
    call = plgpu.kernel(
        body,
        out_type=out_type if gain is None else (out_type, out_type, made_type),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=warpgroups,
        thread_name="wg",
        kernel_name="_".join([f"matmul_{depth}x{width}", *(name for name, present in suffixes.items() if present)]),
        scratch_types=[
            plgpu.SMEM((depth // tile_k if resident else slots, padded, tile_k), x.dtype, transforms=transforms),
            plgpu.SMEM((slots, products, *weight_tile), x.dtype, transforms=transforms),
            plgpu.SMEM((padded, TILE_N), out_dtype),
            plgpu.SMEM((warpgroups - 1, products, TILE_N, padded), jnp.float32) if several else None,
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
        ],
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=REDUCTION_BYTES),
    )
    return call(x, *weights, *(a for a in (squares, residual, gain) if a is not None))
