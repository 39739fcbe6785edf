"""Paged attention of prefill chunks on Hopper: queries on wgmma's wide side, keys streamed once.

FlashAttention-3's division of labour (Shah et al., 2024, arXiv:2407.08608). A CTA takes some rows
of a request under some heads of one KV head, head after head: up to three warpgroups of 64 queries
each. One more warpgroup only copies: the queries, then tiles of keys and values, page by page,
through a ring in shared memory that all three read. (FlashAttention-3's turns at queries times
keys made it slower here: docs/notes/prefill-attention.md.)

Tiles are counted from a request's first token and folded in order, and a tile that a row does not
see leaves its state unchanged to the bit. So a row's result depends neither on the rows beside it,
nor on the batch, nor on the block table. A tile that every row sees whole is not masked, which
changes no bit either.

Keys and values in fp8 (e4m3) arrive in a ring of their own. The warpgroup that copies widens them
to bfloat16, which is exact, while the others multiply.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.inputs import FP8, Inputs
from pallas_kernels.attention.sizes import Sizes, of_head, sizes_of
from pallas_kernels.mosaic import RegisterShares, load
from pallas_kernels.online_softmax import LOG2E, NEVER, State, await_inputs, normalise, where
from pallas_kernels.types import Accumulator, Barrier, Index, Ref

if TYPE_CHECKING:
    from pallas_kernels.mosaic import Layout

T = TypeVar("T")  # a ref, or its type
Carry = tuple[jax.Array, ...]  # values, maximum, sum and the last tile's weights
QUERIES = 64  # of a warpgroup: wgmma's left side
HALF = 64  # keys that are cleared at once
WIDENED = 64  # dimensions of 64 keys that are widened at once
CODES_TILING = plgpu.TilingTransform((8, WIDENED)), plgpu.SwizzleTransform(WIDENED)
CODES_LAYOUT = plgpu.Layout.WGMMA_UPCAST_2X  # four codes of a row, a word, lie in one thread
# Number of computing warpgroups -> registers of their threads, and of the copying one's. Equal
# shares are enough for one warpgroup.
SHARES = {2: (240, 24), 3: (160, 32)}
WIDENING_SHARES = {2: (208, 88), 3: (152, 56)}  # where the copying warpgroup widens fp8


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices. Results of two values of `keys` or `overlap` differ by rounding.

    keys:       of a tile: 64 or 128
    slots:      tiles of keys, and of values, in flight; in fp8, three of each are bfloat16 as well
    warpgroups: most warpgroups that compute
    overlap:    a tile's softmax with the product of the tile before. The interpreter cannot: there
                weights go through memory
    """

    keys: int = 64
    slots: int = 4
    warpgroups: int = 3
    overlap: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan(Sizes):
    """Sizes and division of one launch."""

    tuning: Tuning

    @classmethod
    def of(cls, inputs: Inputs, tuning: Tuning) -> Plan:
        return cls(**vars(sizes_of(inputs)), tuning=tuning)

    @property
    def shares(self) -> tuple[int, int]:
        """(heads, rows) of a CTA.

        The choice with fewest warpgroups in all, copying ones included; then with fewest CTAs,
        least padding, most heads.
        """

        def cost(share: tuple[int, int]) -> tuple[int, int, int, int]:
            heads, rows = share
            tiles = -(-self.rows // rows)
            ctas = self.queries_per_kv // heads * tiles
            return ctas * (-(-heads * rows // QUERIES) + 1), ctas, tiles * rows, -heads

        most = self.tuning.warpgroups * QUERIES
        heads = [n for n in range(1, self.queries_per_kv + 1) if self.queries_per_kv % n == 0]
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
    def registers(self) -> RegisterShares | None:
        """Registers of the CTA's warpgroups; None if all keep equal shares."""
        shares = (WIDENING_SHARES if self.is_fp8 else SHARES).get(self.warpgroups)
        return None if shares is None else RegisterShares(self.warpgroups, *shares)

    @property
    def wide_slots(self) -> int:
        """Tiles of keys, and of values, in bfloat16."""
        return min(self.tuning.slots, 3) if self.is_fp8 else self.tuning.slots

    @property
    def tiles(self) -> int:
        """Tiles of keys that the block table can hold."""
        return -(-self.pages * self.block_size // self.tuning.keys)

    def pieces(self, warpgroup: int) -> list[tuple[int, int, int, int]]:
        """Return the parts of a warpgroup's queries.

        Each is (first query of it, head, first row, number of rows).
        """
        found = []
        for head in range(self.heads):
            first = max(head * self.tile_rows, warpgroup * QUERIES)
            past = min((head + 1) * self.tile_rows, (warpgroup + 1) * QUERIES)
            if first < past:
                row = first - head * self.tile_rows
                found.append((first - warpgroup * QUERIES, head, row, past - first))
        return found


class Codes(NamedTuple, Generic[T]):
    """Shared memory and barriers of keys and values in fp8.

    k, v: rings of tiles. k_ready, v_ready: for each slot, its copies have arrived
    """

    k: T
    v: T
    k_ready: Barrier
    v_ready: Barrier


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    q: queries of each warpgroup, then its result. k, v: rings of tiles. q_ready: the queries have
    arrived. k_full, v_full: for each slot, its copies have arrived, or it is widened. k_empty,
    v_empty: for each slot, the warpgroups have read it. weights: of each warpgroup; without
    overlap. codes: of a cache in fp8.
    """

    q: T
    k: T
    v: T
    q_ready: Barrier
    k_full: Barrier
    v_full: Barrier
    k_empty: Barrier
    v_empty: Barrier
    weights: T | None
    codes: Codes[T] | None


def paged_attention(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.attention.paged_attention. Queries are not packed."""
    plan = Plan.of(inputs, tuning or Tuning())
    q, rows, seq_lens = inputs.q, plan.rows, inputs.seq_lens
    positions, window_start = inputs.positions, inputs.window_start
    padding = plan.row_tiles * plan.tile_rows - rows
    if padding:
        q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
        # As the last row: a padded row must not make a tile one that only some rows see.
        positions, window_start = (
            jnp.pad(x, ((0, 0), (0, padding)), mode="edge") for x in (positions, window_start)
        )
    bounds = _bounds(plan, positions, seq_lens, window_start)
    caches, rest = (inputs.k_cache, inputs.v_cache), (inputs.sinks, inputs.k_scale, inputs.v_scale)
    out = _attend(plan)(q, *caches, inputs.block_table, bounds, *rest)
    return out[:, :rows] if padding else out


def _bounds(
    plan: Plan, positions: jax.Array, seq_lens: jax.Array, window_start: jax.Array
) -> jax.Array:
    """Return which keys exist and which queries see them; equal in every layer.

    int32 [batch, row_tiles, 128 warpgroups + 8]. Per query of a CTA: the first key of its row, and
    the key after the last. Then the first tile of keys that any row sees, the tile after the last,
    the first tile that all rows see whole, the tile after the last, and the number of keys.
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
        # An idle request sees one masked tile: the kernel has no case for none.
        jnp.maximum(end, begin + 1),
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


def widen(codes: Ref, tile: Ref) -> None:
    """Store a tile in fp8 as bfloat16."""
    keys, head_dim = tile.shape
    for key in range(0, keys, QUERIES):
        # In parts, for a warpgroup of few registers.
        for dim in range(0, head_dim, WIDENED):
            part = (pl.ds(key, QUERIES), pl.ds(dim, WIDENED))
            numbers = load(codes.at[part], CODES_LAYOUT).astype(jnp.float32)
            tile[part] = numbers.astype(tile.dtype)


def _attend(plan: Plan) -> Callable[..., jax.Array]:
    """Return the kernel: a CTA for each (request, row tile, some heads of a KV head).

    Its operands are queries, k_cache, v_cache, block_table and bounds, then sinks, k_scale and
    v_scale or None for each.
    """
    head_dim, heads, tile_rows = plan.head_dim, plan.heads, plan.tile_rows
    warpgroups = plan.warpgroups
    keys, slots = plan.tuning.keys, plan.wide_slots
    head_tiles = plan.queries_per_kv // heads
    piece = min(keys, plan.block_size & -plan.block_size)  # keys of a copy: of one page and tile
    overlap = plan.tuning.overlap and not plan.interpreted
    registers = plan.registers
    matrix = plgpu.Layout.WGMMA
    by_row = matrix.reduce(1)
    wide, square = (QUERIES, head_dim), (QUERIES, keys)  # of values, of scores

    def to_values(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, wide, [0])

    def to_scores(x: jax.Array) -> jax.Array:
        return lax.broadcast_in_dim(x, square, [0])

    def splat(shape: tuple[int, ...], value: float, layout: Layout) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def body(
        q_ref: Ref,
        k_ref: Ref,
        v_ref: Ref,
        table_ref: Ref,
        bounds_ref: Ref,
        sinks_ref: Ref | None,
        k_scale_ref: Ref | None,
        v_scale_ref: Ref | None,
        out_ref: Ref,
        scratch: Scratch[Ref],
    ) -> None:
        q_smem, k_smem, v_smem, p_smem = scratch.q, scratch.k, scratch.v, scratch.weights
        q_barrier, k_full, v_full = scratch.q_ready, scratch.k_full, scratch.v_full
        k_empty, v_empty = scratch.k_empty, scratch.v_empty
        await_inputs(plan.interpreted)
        # The last rows of a chunk see most keys: they start first.
        request = plan.batch - 1 - lax.axis_index("request")
        row_tile = plan.row_tiles - 1 - lax.axis_index("row_tile")
        kv_head = lax.div(lax.axis_index("heads"), head_tiles)
        head_tile = lax.rem(lax.axis_index("heads"), head_tiles)
        first_head = kv_head * plan.queries_per_kv + head_tile * heads
        warpgroup = lax.axis_index("warpgroup")
        start, stop, whole, past_whole, num_keys = (
            bounds_ref[request, row_tile, 2 * warpgroups * QUERIES + i] for i in range(5)
        )
        count = stop - start  # at least 1
        score_scale = plan.scale * LOG2E
        if k_scale_ref is not None:
            score_scale = of_head(k_scale_ref, kv_head) * score_scale

        def in_memory(ref: Ref, head: int, row: int, num_rows: int) -> Ref:
            # A copy into swizzled memory must know the alignment.
            first = pl.multiple_of(row_tile * tile_rows + row, 8)
            return ref.at[request, pl.ds(first, num_rows), first_head + head]

        def copy_in() -> None:
            """Copy queries, keys and values: the work of the warpgroup that only copies."""

            def places_of(tile: jax.Array) -> tuple[jax.Array, ...]:
                """Return block and offset of each of a tile's copies.

                Past the request's last page they are arbitrary: those keys are masked.
                """
                places = []
                for i in range(keys // piece):
                    key = tile * keys + i * piece
                    block = table_ref[
                        request, jnp.minimum(lax.div(key, plan.block_size), plan.pages - 1)
                    ]
                    places += [block, lax.rem(key, plan.block_size)]
                return tuple(places)

            def fetch(
                source: Ref,
                target: Ref,
                barriers: Barrier,
                slot: jax.Array,
                places: tuple[jax.Array, ...],
            ) -> None:
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

            def widen_tiles(codes: Codes[Ref]) -> None:
                """Copy tiles in fp8, and widen each while later ones arrive."""
                ahead = codes.k.shape[0]
                both = (
                    (k_ref, codes.k, codes.k_ready, k_smem, k_full, k_empty),
                    (v_ref, codes.v, codes.v_ready, v_smem, v_full, v_empty),
                )

                def fetch_codes(i: Index) -> None:
                    for source, target, ready, *_ in both:
                        fetch(source, target, ready, lax.rem(i, ahead), places_of(start + i))

                for i in range(ahead):
                    pl.when(i < count)(lambda i=i: fetch_codes(jnp.int32(i)))

                @pl.loop(0, count)
                def _widen(i: jax.Array) -> None:
                    slot, place = lax.rem(i, ahead), lax.rem(i, slots)
                    for _, source, ready, target, full, empty in both:
                        plgpu.barrier_wait(ready.at[slot])
                        pl.when(i >= slots)(lambda empty=empty: plgpu.barrier_wait(empty.at[place]))
                        widen(source.at[slot], target.at[place])
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(full.at[place])
                    pl.when(i + ahead < count)(lambda: fetch_codes(i + ahead))

            def step(i: jax.Array, places: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
                slot = lax.rem(i, slots)
                # Looked up early: a load from device memory must not delay the next copy.
                following = places_of(start + i + 1)
                for source, target, full, empty in (
                    (k_ref, k_smem, k_full, k_empty),
                    (v_ref, v_smem, v_full, v_empty),
                ):
                    pl.when(i >= slots)(lambda empty=empty: plgpu.barrier_wait(empty.at[slot]))
                    fetch(source, target, full, slot, places)
                return following

            if scratch.codes is None:
                lax.fori_loop(0, count, step, places_of(start))
            else:
                widen_tiles(scratch.codes)
            for slot in range(slots):  # the CTA must not end before the last arrivals

                @pl.when(slot < count)
                def _drain(slot: int = slot) -> None:
                    plgpu.barrier_wait(k_empty.at[slot])
                    plgpu.barrier_wait(v_empty.at[slot])

        def fold() -> State:
            """Return the softmax over all tiles."""
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

            def multiply_keys(acc: Accumulator, i: Index) -> None:
                slot = lax.rem(i, slots)
                plgpu.barrier_wait(k_full.at[slot])
                plgpu.wgmma(acc, q_smem.at[warpgroup], k_smem.at[slot].transpose((1, 0)))

            def scores_of(i: Index) -> jax.Array:
                def product(acc: Accumulator) -> jax.Array:
                    multiply_keys(acc, i)
                    return acc[...]

                scores = pl.run_scoped(product, plgpu.ACC(square, jnp.float32))
                plgpu.barrier_arrive(k_empty.at[lax.rem(i, slots)])
                return scores

            def softmax(
                masked: bool, i: Index, scores: jax.Array, top: jax.Array, total: jax.Array
            ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
                """Add one tile's scores.

                Returns (maximum, sum, the tile's weights, the factor on all values so far).
                """
                if masked:
                    key = (
                        plgpu.broadcasted_iota(jnp.int32, square, 1, layout=matrix)
                        + (start + i) * keys
                    )
                    scores = where(
                        (key >= to_scores(first)) & (key < to_scores(last)), scores, -jnp.inf
                    )
                new = jnp.maximum(top, scores.max(axis=1) * score_scale)
                old = jnp.exp2(top - new)
                weights = jnp.exp2(scores * score_scale - to_scores(new))
                return new, total * old + weights.sum(axis=1), weights.astype(jnp.bfloat16), old

            def add_values(i: Index, values: jax.Array, weights: jax.Array) -> jax.Array:
                slot = lax.rem(i, slots)
                if p_smem is not None:
                    p_smem[warpgroup] = weights
                    plgpu.commit_smem()
                plgpu.barrier_wait(v_full.at[slot])
                pl.when((start + i + 1) * keys > num_keys)(lambda: clear(slot, start + i))

                def product(acc: Accumulator) -> jax.Array:
                    if overlap:
                        acc[...] = values
                    left = weights if p_smem is None else p_smem.at[warpgroup]
                    plgpu.wgmma(acc, left, v_smem.at[slot])
                    return acc[...]

                added = pl.run_scoped(product, plgpu.ACC(wide, jnp.float32))
                plgpu.barrier_arrive(v_empty.at[slot])
                return added if overlap else values + added

            def step(masked: bool, i: jax.Array, state: Carry) -> Carry:
                """Multiply a tile's keys, and the values of the tile before."""
                values, top, total, weights = state
                if not overlap:
                    values = add_values(i - 1, values, weights)
                    top, total, weights, old = softmax(masked, i, scores_of(i), top, total)
                    return values * to_values(old), top, total, weights

                def products(scores_acc: Accumulator, values_acc: Accumulator) -> Carry:
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

            def clear(slot: jax.Array, tile: jax.Array) -> None:
                """Clear unwritten values: they may be NaN, and 0 * NaN is NaN.

                Each warpgroup does it: all write the same.
                """
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

        def write(state: State) -> None:
            sink = None
            if sinks_ref is not None:
                query = (
                    plgpu.broadcasted_iota(jnp.int32, (QUERIES,), 0, layout=by_row)
                    + warpgroup * QUERIES
                )
                sink = splat((QUERIES,), 0.0, by_row)
                for head in range(heads):
                    sink = where(query < head * tile_rows, sink, sinks_ref[first_head + head])
            mean = normalise(state, sink, to_values)
            if v_scale_ref is not None:
                mean = mean * of_head(v_scale_ref, kv_head)
            q_smem[warpgroup] = mean.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for w in range(warpgroups):

                @pl.when(warpgroup == w)
                def _write_rows(w: int = w) -> None:
                    for query, head, row, num_rows in plan.pieces(w):
                        plgpu.copy_smem_to_gmem(
                            q_smem.at[w, pl.ds(query, num_rows)],
                            in_memory(out_ref, head, row, num_rows),
                        )

            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        @pl.when(warpgroup == warpgroups)
        def _copy() -> None:
            if registers is not None:
                registers.give_back()
            copy_in()

        @pl.when(warpgroup < warpgroups)
        def _compute() -> None:
            if registers is not None:
                registers.take()
            write(fold())

    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    arrivals, codes = keys // piece, None
    if plan.is_fp8:
        ring = plgpu.SMEM((plan.tuning.slots, keys, head_dim), FP8, transforms=CODES_TILING)
        ready = plgpu.Barrier(num_barriers=plan.tuning.slots, num_arrivals=arrivals)
        arrivals, codes = 1, Codes(ring, ring, ready, ready)
    copies = sum(len(plan.pieces(w)) for w in range(warpgroups))
    p = plgpu.SMEM((warpgroups, *square), jnp.bfloat16, transforms=tiling)
    scratch = Scratch(
        q=plgpu.SMEM((warpgroups, *wide), jnp.bfloat16, transforms=tiling),
        k=plgpu.SMEM((slots, keys, head_dim), jnp.bfloat16, transforms=tiling),
        v=plgpu.SMEM((slots, keys, head_dim), jnp.bfloat16, transforms=tiling),
        q_ready=plgpu.Barrier(num_arrivals=copies),
        k_full=plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals),
        v_full=plgpu.Barrier(num_barriers=slots, num_arrivals=arrivals),
        k_empty=plgpu.Barrier(num_barriers=slots, num_arrivals=warpgroups),
        v_empty=plgpu.Barrier(num_barriers=slots, num_arrivals=warpgroups),
        weights=None if overlap else p,
        codes=codes,
    )
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(
            (plan.batch, plan.row_tiles * tile_rows, plan.num_heads, head_dim), jnp.bfloat16
        ),
        # The last axis runs fastest: CTAs that follow each other read the same pages' KV heads.
        grid=(plan.batch, plan.row_tiles, plan.num_kv_heads * head_tiles),
        grid_names=("request", "row_tile", "heads"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="prefill_attention",
    )
