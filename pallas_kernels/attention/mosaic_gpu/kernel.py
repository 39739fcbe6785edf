"""The kernel of decode attention.

A CTA fetches tiles of keys and values ahead of their use, and folds them one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paging
from pallas_kernels.attention.bounds import KEYS
from pallas_kernels.attention.mosaic_gpu import cluster_fold, fp8_tiles
from pallas_kernels.attention.mosaic_gpu.plan import Plan
from pallas_kernels.attention.mosaic_gpu.softmax_state import (
    BY_COLUMN,
    MATRIX,
    join,
    nothing,
    splat,
    spread,
)
from pallas_kernels.attention.mosaic_gpu.tile_order import TileOrder
from pallas_kernels.attention.sizes import of_head
from pallas_kernels.mosaic import load, store
from pallas_kernels.online_softmax import LOG2E, State, await_inputs, normalise, where
from pallas_kernels.types import Accumulator, Barrier, Index, Ref

T = TypeVar("T")  # a ref, or its type
Carry = tuple[jax.Array, ...]


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    q: queries of its KV heads. k, v: rings of tiles. weights: of a tile. out: a head's result.
    q_ready: the queries have arrived. k_ready, v_ready: for each slot, its copies have arrived.
    received: of cluster_fold.scratch. fp8: for tiles in fp8.
    """

    q: T
    k: T
    v: T
    weights: T
    out: T
    q_ready: Barrier
    k_ready: Barrier
    v_ready: Barrier
    received: list[Barrier]
    fp8: fp8_tiles.Scratch[T] | None


def attend(plan: Plan) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the kernel: a cluster for each (request, row tile, KV head), or a CTA for a few heads.

    A row tile may be divided into parts, which have clusters of their own.

    Its operands are packed queries, k_cache, v_cache, block_table and bounds, then sinks, out_rows,
    k_scale and v_scale or None for each.
    """
    head_dim, group = plan.head_dim, plan.queries_per_kv
    columns, slots = plan.columns, plan.slots
    cluster, heads = plan.cluster, plan.heads
    tall, square = plan.tall, plan.square
    pieces = max(KEYS // plan.block_size, 1)  # pages in a tile
    piece = KEYS // pieces

    def body(
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        table_ref: Ref,
        bounds_ref: Ref,
        sinks_ref: Ref | None,
        rows_ref: Ref | None,
        k_scale_ref: Ref | None,
        v_scale_ref: Ref | None,
        out_ref: Ref,
        shares: list[Ref],
        scratch: Scratch[Ref],
    ) -> None:
        q_smem, k_smem, v_smem, p_smem, out_smem = scratch[:5]
        fp8 = scratch.fp8
        q_barrier, k_barriers, v_barriers = scratch.q_ready, scratch.k_ready, scratch.v_ready
        await_inputs(plan.interpreted)
        request, first_head = lax.axis_index("request"), lax.axis_index("kv_head") * heads
        # The last rows of a prefill chunk see most keys: they start first.
        part_of_all = plan.row_tiles * plan.parts - 1 - lax.axis_index("part")
        row_tile, part = lax.div(part_of_all, plan.parts), lax.rem(part_of_all, plan.parts)
        first_row = row_tile * plan.tile_rows + part * plan.part_rows
        own_columns = pl.ds(part * columns, columns)
        rank = lax.axis_index("rank") if cluster > 1 else jnp.int32(0)
        start, stop, num_keys = (
            bounds_ref[request, row_tile, 2 * plan.packed_columns + i] for i in range(3)
        )
        if plan.parts > 1:  # a part of padding alone has no tiles
            stop = jnp.where(first_row < plan.rows, stop, start)
        tiles = TileOrder(
            start, stop, rank * plan.classes, passes=heads * plan.classes, tiles=plan.tiles
        )

        def pages_of(tile: jax.Array) -> tuple[jax.Array, ...]:
            return paging.pages_of(
                table_ref, request, tile, keys=KEYS, block_size=plan.block_size, pages=plan.pages
            )

        def fetch(
            source: Ref,
            target: Ref,
            barriers: Barrier,
            slot: Index,
            number: jax.Array,
            tile: jax.Array,
            blocks: Sequence[jax.Array],
        ) -> None:
            """Start the copies of a tile: pass `number`, from these blocks, into a slot."""
            kv_head = first_head + lax.div(number, plan.classes)
            for i, block in enumerate(blocks):
                offset = lax.rem(tile * KEYS, plan.block_size) if pieces == 1 else 0
                plgpu.copy_gmem_to_smem(
                    source.at[block, pl.ds(offset, piece), kv_head],
                    target.at[slot, pl.ds(i * piece, piece)],
                    barriers.at[slot],
                )

        ahead = [(*place, pages_of(place[1])) for place in tiles.first_places(slots + 1)]
        any_tile = ahead[0][1] < stop
        for slot, (number, tile, blocks) in enumerate(ahead[:slots]):

            @pl.when(tile < stop)
            def _fetch_first(
                slot: int = slot,
                number: jax.Array = number,
                tile: jax.Array = tile,
                blocks: Sequence[jax.Array] = blocks,
            ) -> None:
                if slot == 0:
                    for i in range(heads):
                        plgpu.copy_gmem_to_smem(
                            q_ref.at[request, row_tile, first_head + i, own_columns],
                            q_smem.at[i],
                            q_barrier,
                        )
                fetch(k_ref, k_smem, k_barriers, slot, number, tile, blocks)
                fetch(v_ref, v_smem, v_barriers, slot, number, tile, blocks)

        first, last = (
            load(
                bounds_ref.at[request, row_tile, pl.ds(side + part * columns, columns)],
                BY_COLUMN,
                optimized=False,
            )
            for side in (0, plan.packed_columns)
        )
        pl.when(any_tile)(lambda: plgpu.barrier_wait(q_barrier))
        if fp8 is not None:
            fp8_tiles.convert_queries(q_smem, fp8.queries)

        def clear_unwritten(slot: Index, tile: jax.Array) -> None:
            # Unwritten cache slots may hold NaN, and 0 * NaN is NaN.
            row = (
                plgpu.broadcasted_iota(jnp.int32, (KEYS, head_dim), 0, layout=MATRIX) + tile * KEYS
            )
            v = load(v_smem.at[slot], MATRIX)
            v_smem[slot] = where(row < num_keys, v, 0.0)

        def seen_by_all() -> tuple[jax.Array, jax.Array]:
            """Return the first key that all rows see, and the key after the last."""
            rows = jnp.minimum(plan.rows - first_row, plan.part_rows)
            column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=BY_COLUMN)
            is_row = column < rows * group  # the others fill up the tile
            past = where(is_row, last, jnp.iinfo(jnp.int32).max)
            return where(is_row, first, 0).max(), past.min()

        common = seen_by_all() if plan.is_fp8 else None

        def hide(scores: jax.Array, tile: jax.Array) -> jax.Array:
            """Return scores of a tile with -inf for the keys that a column does not see."""
            key = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=MATRIX) + tile * KEYS
            begin = spread(first, square)
            if common is None:
                is_seen = (key >= begin) & (key < spread(last, square))
                return where(is_seen, scores, -jnp.inf)
            # One comparison without signs: keys before the first one wrap around.
            size = spread((last - first).astype(jnp.uint32), square)
            is_seen = (key - begin).astype(jnp.uint32) < size
            return lax.cond(
                (tile * KEYS >= common[0]) & ((tile + 1) * KEYS <= common[1]),
                lambda: scores,
                lambda: where(is_seen, scores, -jnp.inf),
            )

        def score_scale_of(head: Index) -> jax.Array | float:
            """Return the factor of a KV head's scores, in powers of two: above 0."""
            factor = plan.scale * LOG2E * (1.0 if fp8 is None else 1.0 / fp8_tiles.QUERY_SCALE)
            if k_scale_ref is None:
                return factor
            return of_head(k_scale_ref, first_head + head) * factor

        def queries_of(head: Index) -> fp8_tiles.Queries:
            return q_smem.at[head] if fp8 is None else fp8_tiles.load_queries(fp8.queries.at[head])

        def step(
            q: fp8_tiles.Queries, score_scale: jax.Array | float, tile: jax.Array, carry: Carry
        ) -> Carry:
            """Fold a tile into (values, maximum, sum by key), and fetch the one after the ring."""
            values, top, total, count, coming_number, coming, *rest = carry
            blocks, later = rest[:pieces], rest[pieces:]  # later: fp8 alone has it
            slot = lax.rem(count, slots)
            # Looked up here, before the tile is needed: a load from device memory must not delay
            # its copy.
            after_number, after = later or tiles.after(coming_number, coming)
            after_blocks = pages_of(after)
            plgpu.barrier_wait(k_barriers.at[slot])

            def fetch_keys() -> None:
                fetch(k_ref, k_smem, k_barriers, slot, coming_number, coming, blocks)

            def fetch_values() -> None:
                fetch(v_ref, v_smem, v_barriers, slot, coming_number, coming, blocks)

            v = None  # a tile's values in registers
            if fp8 is None:

                def scores_of(acc: Accumulator) -> jax.Array:
                    plgpu.wgmma(acc, k_smem.at[slot], q.transpose((1, 0)))
                    return acc[...]

                scores = pl.run_scoped(scores_of, plgpu.ACC(square, jnp.float32))
                pl.when(coming < stop)(fetch_keys)
                scores = hide(scores * score_scale, tile)
                highest = scores.max(axis=0)
            else:
                scores = fp8_tiles.scores(k_smem.at[slot], q, columns)
                plgpu.barrier_wait(v_barriers.at[slot])
                v = fp8_tiles.load_values(v_smem.at[slot], num_keys - tile * KEYS)
                # The factor comes after the mask: exp2's argument is then one fma.
                scores = hide(scores, tile)
                highest = fp8_tiles.maximum(scores, fp8.maxima) * score_scale
                scores = scores * score_scale

            new = jnp.maximum(top, highest)
            old = jnp.exp2(top - new)
            weights = jnp.exp2(scores - spread(new, square))
            # All warps have read the weights before these: the maximum has a barrier.
            if v is None:
                p_smem.transpose((1, 0))[...] = weights.astype(p_smem.dtype)
                plgpu.barrier_wait(v_barriers.at[slot])
                pl.when((tile + 1) * KEYS > num_keys)(lambda: clear_unwritten(slot, tile))
                plgpu.commit_smem()

                def values_of(acc: Accumulator) -> jax.Array:
                    plgpu.wgmma(acc, v_smem.at[slot].transpose((1, 0)), p_smem.transpose((1, 0)))
                    return acc[...]

                added = pl.run_scoped(values_of, plgpu.ACC(tall, jnp.float32))
                values = values * spread(old, tall) + added
                pl.when(coming < stop)(fetch_values)
            else:
                fp8_tiles.store_weights(weights, p_smem)

                @pl.when(coming < stop)
                def _fetch() -> None:
                    fetch_keys()
                    fetch_values()

                later = tiles.after(after_number, after)
                values = fp8_tiles.weigh(values * spread(old, tall), v, p_smem)
            return (
                values,
                new,
                # Summed over the keys only when the class ends, since that takes a barrier.
                total * spread(old, square) + weights,
                count + 1,
                after_number,
                after,
                *after_blocks,
                *later,
            )

        def fold(
            q: fp8_tiles.Queries,
            score_scale: jax.Array | float,
            size: int,
            base: Index,
            order: Carry,
        ) -> tuple[State, Carry]:
            """Return the softmax over the classes base .. base + size - 1, and the next order.

            order: number of tiles so far, then the next place and its pages; in fp8, the place
            after it too.
            """
            if size > 1:

                def half(i: jax.Array, carry: Carry) -> Carry:
                    state: State = (carry[0], carry[1], carry[2])
                    order = carry[3:]
                    right, order = fold(q, score_scale, size // 2, base + i * (size // 2), order)
                    return *join(state, right), *order

                carry = lax.fori_loop(0, 2, half, (*nothing(plan), *order))
                return carry[:3], carry[3:]
            begin = tiles.first_of(base)
            values, top, _ = nothing(plan)
            carry = lax.fori_loop(
                0,
                tiles.class_length(begin),
                lambda i, carry: step(q, score_scale, tiles.in_class(begin, i), carry),
                (values, top, splat(square, 0.0, MATRIX), *order),
            )
            values, top, total = carry[:3]
            return (values, top, total.sum(axis=0)), carry[3:]

        def write(kv_head: Index, state: State) -> None:
            sink = None
            if sinks_ref is not None:
                column = plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=BY_COLUMN)
                # Mosaic folds the remainder of one head, and finds no layout for a constant.
                head = lax.rem(column, group) if group > 1 else jnp.minimum(column, 0)
                sink = splat((columns,), 0.0, BY_COLUMN)
                for i in range(group):
                    sink = where(head != i, sink, sinks_ref[kv_head * group + i])
            if heads > 1:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the head before
            mean = normalise(state, sink, lambda x: spread(x, tall))
            if v_scale_ref is not None:
                mean = mean * of_head(v_scale_ref, kv_head)
            mean = mean.astype(jnp.bfloat16)
            if plan.is_fp8:
                fp8_tiles.store_values(mean, out_smem)
            else:
                store(out_smem.transpose((1, 0)), mean)
            plgpu.commit_smem()
            for i in range(plan.part_rows):
                row = first_row + i
                if rows_ref is None or plan.num_out_rows is None:
                    is_kept, place = row < plan.rows, (request, row)
                else:
                    # Packed queries have one row tile, whose last part may have rows of padding.
                    place = (rows_ref[request, jnp.minimum(row, plan.rows - 1)],)
                    is_kept = (row < plan.rows) & (place[0] < plan.num_out_rows)

                @pl.when(is_kept)
                def _write_row(i: int = i, place: tuple[jax.Array, ...] = place) -> None:
                    plgpu.copy_smem_to_gmem(
                        out_smem.at[pl.ds(i * group, group)],
                        out_ref.at[*place, pl.ds(kv_head * group, group)],
                    )

        coming_number, coming, blocks = ahead[slots]
        later = tiles.after(coming_number, coming) if plan.is_fp8 else ()
        order = (jnp.int32(0), coming_number, coming, *blocks, *later)
        if cluster == 1:

            def one_head(head: jax.Array, order: Carry) -> Carry:
                state, order = fold(
                    queries_of(head), score_scale_of(head), plan.classes, jnp.int32(0), order
                )
                write(first_head + head, state)
                return order

            lax.fori_loop(0, heads, one_head, order)
        else:
            state, _ = fold(
                queries_of(0), score_scale_of(0), plan.classes, tiles.first_class, order
            )
            here = (request, part_of_all, first_head)
            cluster_fold.fold_cluster(
                plan,
                shares,
                scratch.received,
                here,
                rank,
                state,
                lambda whole: write(first_head, whole),
            )

        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = (
        fp8_tiles.ring(plan)
        if plan.is_fp8
        else plgpu.SMEM((slots, KEYS, head_dim), jnp.bfloat16, transforms=tiling)
    )
    scratch = Scratch(
        q=plgpu.SMEM((heads, columns, head_dim), jnp.bfloat16, transforms=tiling),
        k=ring,
        v=ring,
        weights=plgpu.SMEM(
            (columns, KEYS), jnp.float16 if plan.is_fp8 else jnp.bfloat16, transforms=tiling
        ),
        out=plgpu.SMEM((columns, head_dim), jnp.bfloat16),
        q_ready=plgpu.Barrier(num_arrivals=heads),
        k_ready=plgpu.Barrier(num_barriers=slots, num_arrivals=pieces),
        v_ready=plgpu.Barrier(num_barriers=slots, num_arrivals=pieces),
        received=cluster_fold.scratch(plan),
        fp8=fp8_tiles.scratch(plan) if plan.is_fp8 else None,
    )
    by_row = (plan.batch, plan.rows) if plan.num_out_rows is None else (plan.num_out_rows,)
    out = jax.ShapeDtypeStruct((*by_row, plan.num_heads, head_dim), jnp.bfloat16)
    return plgpu.kernel(
        body,
        out_type=(out, cluster_fold.outputs(plan)),
        # The last axis runs fastest: CTAs that follow each other read the same pages' KV heads.
        grid=(plan.batch, plan.row_tiles * plan.parts, plan.num_kv_heads // heads),
        grid_names=("request", "part", "kv_head"),
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention",
        **({"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}),
    )
