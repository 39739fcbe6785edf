"""Paged attention of prefill chunks on Hopper: queries on wgmma's wide side, keys and values streamed once for up to 192 of them.

FlashAttention-3's division of labour (Shah et al., 2024, arXiv:2407.08608). A CTA takes some rows of a request under some heads of one KV
head, head after head: up to three warpgroups of 64 queries each. One more warpgroup only copies: the queries, then tiles of keys and
values, page by page, through a ring in shared memory that all three read. (FlashAttention-3's turns at queries times keys made it slower
here: docs/notes/prefill-attention.md.)

Tiles are counted from a request's first token and folded in order, and a tile that a row does not see leaves its state unchanged to the
bit: a row's result depends neither on the rows beside it nor on the batch nor on the block table. A tile that every row sees whole is
not masked, which changes no bit either.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.online_softmax import LOG2E, NEVER, await_inputs, load, normalise, where

QUERIES = 64  # of a warpgroup: wgmma's left side
HALF = 64  # keys
# Warpgroups that compute -> registers a thread of theirs and of the one that copies; the block has 65,536. One has enough as it is.
REGISTERS = {2: (240, 24), 3: (160, 32)}


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices. Results of two values of `keys` or `overlap` differ by rounding."""

    keys: int = 64  # a tile: 64 or 128
    slots: int = 4  # tiles of keys, and of values, in flight
    warpgroups: int = 3  # that compute, at most
    overlap: bool = True  # a tile's softmax with the product of the tile before; the interpreter cannot, weights go through memory there


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of one call."""

    batch: int
    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    pages: int
    scale: float
    tuning: Tuning
    has_sinks: bool
    interpreted: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def shares(self) -> tuple[int, int]:
        """(heads, rows) of a CTA: fewest warpgroups in all, copying ones too; then fewest CTAs, least padding, most heads."""

        def cost(share: tuple[int, int]) -> tuple[int, int, int, int]:
            heads, rows = share
            tiles = -(-self.rows // rows)
            ctas = self.group // heads * tiles
            return ctas * (-(-heads * rows // QUERIES) + 1), ctas, tiles * rows, -heads

        most = self.tuning.warpgroups * QUERIES
        heads = [n for n in range(1, self.group + 1) if self.group % n == 0]
        rows = range(8, min(most, self.rows + 7) + 1, 8)  # whole rows of the swizzle
        return min(((h, r) for h in heads for r in rows if h * r <= most), key=cost)

    @property
    def heads(self) -> int:
        return self.shares[0]

    @property
    def tile_rows(self) -> int:
        return self.shares[1]

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def warpgroups(self) -> int:
        return -(-self.heads * self.tile_rows // QUERIES)

    @property
    def tiles(self) -> int:
        """Tiles of keys that the block table can hold."""
        return -(-self.pages * self.block_size // self.tuning.keys)

    def pieces(self, warpgroup: int) -> list[tuple[int, int, int, int]]:
        """What lies in a warpgroup's queries: (first query of it, head, first row, number of rows)."""
        found = []
        for head in range(self.heads):
            first = max(head * self.tile_rows, warpgroup * QUERIES)
            past = min((head + 1) * self.tile_rows, (warpgroup + 1) * QUERIES)
            if first < past:
                found.append(
                    (first - warpgroup * QUERIES, head, first - head * self.tile_rows, past - first)
                )
        return found


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    window_start: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See pallas_kernels.attention.paged_attention."""
    batch, rows, num_heads, head_dim = q.shape
    plan = Plan(
        batch=batch,
        rows=rows,
        num_heads=num_heads,
        num_kv_heads=k_cache.shape[2],
        head_dim=head_dim,
        block_size=k_cache.shape[1],
        pages=block_table.shape[1],
        scale=scale,
        tuning=tuning or Tuning(),
        has_sinks=sinks is not None,
        interpreted=hopper.interpreting(),
    )
    padding = plan.row_tiles * plan.tile_rows - rows
    if padding:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        # As the last row: a padded row must not make a tile one that only some rows see.
        positions, window_start = (
            jnp.pad(x, ((0, 0), (0, padding)), mode="edge") for x in (positions, window_start)
        )
    bounds = _bounds(plan, positions, seq_lens, window_start)
    out = _attend(plan)(
        q, k_cache, v_cache, block_table, bounds, *(() if sinks is None else (sinks,))
    )
    return out[:, :rows] if padding else out


def _bounds(
    plan: Plan, positions: jax.Array, seq_lens: jax.Array, window_start: jax.Array
) -> jax.Array:
    """Which keys exist and who sees them; equal in every layer, so XLA computes it once.

    int32 [batch, row_tiles, 128 warpgroups + 8]: per query of a CTA, the first key of its row and the key after the last; first tile of
    keys that any row sees, the tile after the last, the first tile that all rows see whole, the tile after the last, number of keys.
    """
    keys = plan.tuning.keys
    written = jnp.minimum(seq_lens, plan.pages * plan.block_size)
    last = jnp.minimum(positions + 1, written[:, None])
    first = jnp.minimum(jnp.maximum(window_start, 0), last)
    first, last = (x.reshape(plan.batch, plan.row_tiles, plan.tile_rows) for x in (first, last))
    seen = first < last
    begin = jnp.min(jnp.where(seen, first, jnp.max(last, axis=2, keepdims=True)), axis=2) // keys
    end = (jnp.max(jnp.where(seen, last, 0), axis=2) + keys - 1) // keys
    ranges = (
        begin,
        jnp.maximum(
            end, begin + 1
        ),  # an idle request sees one masked tile: a kernel without a case for none
        (jnp.max(first, axis=2) + keys - 1) // keys,
        jnp.min(last, axis=2) // keys,
        jnp.broadcast_to(written[:, None], first.shape[:2]),
    )
    spare = plan.warpgroups * QUERIES - plan.heads * plan.tile_rows
    limits = [
        jnp.pad(jnp.tile(x, (1, 1, plan.heads)), ((0, 0), (0, 0), (0, spare)))
        for x in (first, last)
    ]
    return jnp.concatenate(
        (*limits, jnp.pad(jnp.stack(ranges, axis=2), ((0, 0), (0, 0), (0, 8 - len(ranges))))),
        axis=2,
    )


def _attend(plan: Plan):
    """The kernel: a CTA for every (request, row tile, some heads of a KV head)."""
    head_dim, heads, tile_rows, warpgroups = (
        plan.head_dim,
        plan.heads,
        plan.tile_rows,
        plan.warpgroups,
    )
    keys, slots = plan.tuning.keys, plan.tuning.slots
    head_tiles = plan.group // heads
    piece = min(
        keys, plan.block_size & -plan.block_size
    )  # keys of one copy: of one page, and dividing a tile
    overlap = plan.tuning.overlap and not plan.interpreted
    matrix = plgpu.Layout.WGMMA
    by_row = matrix.reduce(1)
    wide, square = (QUERIES, head_dim), (QUERIES, keys)  # of values, of scores

    def to_values(x):
        return lax.broadcast_in_dim(x, wide, [0])

    def to_scores(x):
        return lax.broadcast_in_dim(x, square, [0])

    def splat(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def body(q_ref, k_ref, v_ref, table_ref, bounds_ref, *rest):
        sinks_ref, rest = (rest[0], rest[1:]) if plan.has_sinks else (None, rest)
        out_ref, q_smem, k_smem, v_smem, q_barrier, k_full, v_full, k_empty, v_empty, *rest = rest
        p_smem: Any = None if overlap else rest.pop(0)
        await_inputs(plan.interpreted)
        # The last rows of a chunk see most keys: they start first.
        request = plan.batch - 1 - lax.axis_index("request")
        row_tile = plan.row_tiles - 1 - lax.axis_index("row_tile")
        kv_head, head_tile = (
            lax.div(lax.axis_index("heads"), head_tiles),
            lax.rem(lax.axis_index("heads"), head_tiles),
        )
        first_head = kv_head * plan.group + head_tile * heads
        warpgroup = lax.axis_index("warpgroup")
        start, stop, whole, past_whole, num_keys = (
            bounds_ref[request, row_tile, 2 * warpgroups * QUERIES + i] for i in range(5)
        )
        count = stop - start  # at least 1

        def in_memory(ref, head, row, num_rows):
            first = pl.multiple_of(
                row_tile * tile_rows + row, 8
            )  # a copy into swizzled memory has to know
            return ref.at[request, pl.ds(first, num_rows), first_head + head]

        def copy_in():
            def places_of(tile):
                """(block, offset in it) of a tile's copies. Past the request's last page it may be anything: those keys are masked."""
                places = []
                for i in range(keys // piece):
                    key = tile * keys + i * piece
                    block = table_ref[
                        request, jnp.minimum(lax.div(key, plan.block_size), plan.pages - 1)
                    ]
                    places += [block, lax.rem(key, plan.block_size)]
                return tuple(places)

            def fetch(source, target, barriers, slot, places):
                for i in range(keys // piece):
                    block, offset = places[2 * i : 2 * i + 2]
                    part = target.at[slot, pl.ds(i * piece, piece)]
                    plgpu.copy_gmem_to_smem(
                        source.at[block, pl.ds(pl.multiple_of(offset, piece), piece), kv_head],
                        part,
                        barriers.at[slot],
                    )

            for w in range(warpgroups):
                for query, head, row, num_rows in plan.pieces(w):
                    plgpu.copy_gmem_to_smem(
                        in_memory(q_ref, head, row, num_rows),
                        q_smem.at[w, pl.ds(query, num_rows)],
                        q_barrier,
                    )

            def step(i, places):
                slot = lax.rem(i, slots)
                following = places_of(
                    start + i + 1
                )  # looked up now: a load from device memory must not hold up the next copy
                for source, target, full, empty in (
                    (k_ref, k_smem, k_full, k_empty),
                    (v_ref, v_smem, v_full, v_empty),
                ):
                    pl.when(i >= slots)(lambda empty=empty: plgpu.barrier_wait(empty.at[slot]))
                    fetch(source, target, full, slot, places)
                return following

            lax.fori_loop(0, count, step, places_of(start))
            for slot in range(slots):  # nobody's arrival may find the CTA gone

                @pl.when(slot < count)
                def _(slot=slot):
                    plgpu.barrier_wait(k_empty.at[slot])
                    plgpu.barrier_wait(v_empty.at[slot])

        def fold():
            """Softmax over all tiles: (values, maximum, sum)."""
            first, last = (
                load(
                    bounds_ref.at[
                        request, row_tile, pl.ds(n * QUERIES + warpgroup * QUERIES, QUERIES)
                    ],
                    by_row,
                    optimized=False,
                )
                for n in (0, warpgroups)
            )
            plgpu.barrier_wait(q_barrier)

            def multiply_keys(acc, i):
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.wgmma(acc, q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0)))

            def scores_of(i):
                def product(acc):
                    multiply_keys(acc, i)
                    return acc[...]

                scores = pl.run_scoped(product, plgpu.ACC(square, jnp.float32))
                plgpu.barrier_arrive(k_empty.at[lax.rem(i, slots)])
                return scores

            def softmax(masked, i, scores, top, total):
                """With one more tile's scores: (maximum, sum, the tile's weights, the factor on all values so far)."""
                if masked:
                    key = (
                        plgpu.broadcasted_iota(jnp.int32, square, 1, layout=matrix)
                        + (start + i) * keys
                    )
                    scores = where(
                        (key >= to_scores(first)) & (key < to_scores(last)), scores, -jnp.inf
                    )
                new = jnp.maximum(top, scores.max(axis=1) * (plan.scale * LOG2E))
                old = jnp.exp2(top - new)
                weights = jnp.exp2(scores * (plan.scale * LOG2E) - to_scores(new))
                return new, total * old + weights.sum(axis=1), weights.astype(jnp.bfloat16), old

            def add_values(i, values, weights):
                slot = lax.rem(i, slots)
                if not overlap:
                    p_smem[warpgroup] = weights
                    plgpu.commit_smem()
                plgpu.barrier_wait(v_full.at[slot])
                pl.when((start + i + 1) * keys > num_keys)(lambda: clear(slot, start + i))

                def product(acc):
                    if overlap:
                        acc[...] = values
                    plgpu.wgmma(acc, weights if overlap else p_smem.at[warpgroup], v_smem.at[slot])
                    return acc[...]

                added = pl.run_scoped(product, plgpu.ACC(wide, jnp.float32))
                plgpu.barrier_arrive(v_empty.at[slot])
                return added if overlap else values + added

            def step(masked, i, state):
                """The scores of a tile, and the values of the one before."""
                values, top, total, weights = state
                if not overlap:
                    values = add_values(i - 1, values, weights)
                    *sums, old = softmax(masked, i, scores_of(i), top, total)
                    return values * to_values(old), *sums

                def products(scores_acc, values_acc):
                    slot, before = lax.rem(i, slots), lax.rem(i - 1, slots)
                    values_acc[...] = values
                    multiply_keys(scores_acc, i)
                    plgpu.barrier_wait(v_full.at[before])
                    plgpu.wgmma(values_acc, weights, v_smem.at[before])
                    scores = plgpu.wgmma_accumulator_load(scores_acc, wait_n=1)
                    plgpu.barrier_arrive(k_empty.at[slot])
                    *sums, old = softmax(masked, i, scores, top, total)
                    added = values_acc[...]
                    plgpu.barrier_arrive(v_empty.at[before])
                    return added * to_values(old), *sums

                return pl.run_scoped(
                    products, plgpu.ACC(square, jnp.float32), plgpu.ACC(wide, jnp.float32)
                )

            def clear(slot, tile):
                """Values that nobody has written may be NaN, and 0 * NaN is NaN. Each warpgroup does it: all write the same."""
                for part in range(keys // HALF):
                    here = v_smem.at[slot, pl.ds(part * HALF, HALF)]
                    row = plgpu.broadcasted_iota(jnp.int32, (HALF, head_dim), 0, layout=matrix) + (
                        tile * keys + part * HALF
                    )
                    here[...] = where(row < num_keys, load(here, matrix), 0.0)
                plgpu.commit_smem()

            nothing = splat((QUERIES,), NEVER, by_row), splat((QUERIES,), 0.0, by_row)
            *sums, _ = softmax(True, 0, scores_of(0), *nothing)
            state = splat(wide, 0.0, matrix), *sums
            past_head = jnp.clip(whole - start, 1, count)
            past_middle = jnp.clip(past_whole - start, past_head, count)
            state = lax.fori_loop(1, past_head, lambda i, state: step(True, i, state), state)
            state = lax.fori_loop(
                past_head, past_middle, lambda i, state: step(False, i, state), state
            )
            values, top, total, weights = lax.fori_loop(
                past_middle, count, lambda i, state: step(True, i, state), state
            )
            values = add_values(count - 1, values, weights)
            return values, top, total

        def write(state):
            sink = None
            if sinks_ref is not None:
                query = (
                    plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=by_row)
                    + warpgroup * QUERIES
                )
                sink = splat((QUERIES,), 0.0, by_row)
                for head in range(heads):
                    sink = where(query < head * tile_rows, sink, sinks_ref[first_head + head])
            q_smem[warpgroup] = normalise(state, sink, to_values).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for w in range(warpgroups):

                @pl.when(warpgroup == w)
                def _(w=w):
                    for query, head, row, num_rows in plan.pieces(w):
                        plgpu.copy_smem_to_gmem(
                            q_smem.at[w, pl.ds(query, num_rows)],
                            in_memory(out_ref, head, row, num_rows),
                        )

            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        @pl.when(warpgroup == warpgroups)
        def _():
            if warpgroups in REGISTERS:
                plgpu.set_max_registers(REGISTERS[warpgroups][1], action="decrease")
            copy_in()

        @pl.when(warpgroup < warpgroups)
        def _():
            if warpgroups in REGISTERS:
                plgpu.set_max_registers(REGISTERS[warpgroups][0], action="increase")
            write(fold())

    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    copies = sum(len(plan.pieces(w)) for w in range(warpgroups))
    scratch = [
        plgpu.SMEM((warpgroups, *wide), jnp.bfloat16, transforms=tiling),
        plgpu.SMEM((slots, keys, head_dim), jnp.bfloat16, transforms=tiling),
        plgpu.SMEM((slots, keys, head_dim), jnp.bfloat16, transforms=tiling),
        plgpu.Barrier(num_arrivals=copies),
        plgpu.Barrier(num_barriers=slots, num_arrivals=keys // piece),
        plgpu.Barrier(num_barriers=slots, num_arrivals=keys // piece),
        plgpu.Barrier(num_barriers=slots, num_arrivals=warpgroups),
        plgpu.Barrier(num_barriers=slots, num_arrivals=warpgroups),
    ]
    if not overlap:
        scratch.append(plgpu.SMEM((warpgroups, *square), jnp.bfloat16, transforms=tiling))
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (plan.batch, plan.row_tiles * tile_rows, plan.num_heads, head_dim), jnp.bfloat16
        ),
        # The last axis runs fastest: neighbours in time read the KV heads of the same pages.
        grid=(plan.batch, plan.row_tiles, plan.num_kv_heads * head_tiles),
        grid_names=("request", "row_tile", "heads"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="prefill_attention",
    )
