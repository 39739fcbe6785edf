"""Paged attention on Hopper: flash-decoding with TMA and wgmma, one warpgroup a CTA, one launch.

FlashAttention's tiles (Dao et al., 2022, arXiv:2205.14135) and Flash-Decoding's shares of the keys (Dao et al., 2023). A CTA holds the
query rows of one KV head (rows x group of them) and streams its tiles of 64 keys through a ring in shared memory. wgmma wants 64 rows on
its left side: there stand keys (K Q^T) and values (V^T P^T), and the few query rows are the narrow side, padded to 8 only.

Tile t belongs to class t mod 8. A class is folded from its first tile to its last, and the eight classes as a binary tree. CTAs of a
cluster share a row's keys as 1, 2, 4 or 8 equal subtrees, whatever the context's length, and the first CTA folds their results through
distributed shared memory. So the order of all sums depends on nothing but the keys' places: neither on the batch, nor on the block table,
nor on the number of CTAs. A tile that a row does not see leaves its state unchanged to the bit. (Prefill chunks have a kernel of their own,
prefill_mosaic_gpu.)

Short CTAs that do not fit the GPU at once become fewer CTAs of several KV heads, with tiles of the next head in flight while one ends: a
second wave would begin like the first, with nothing in flight.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper, paging
from pallas_kernels.attention.bounds import KEYS, NARROW, key_bounds
from pallas_kernels.online_softmax import LOG2E, NEVER, await_inputs, load, merge, normalise, where
from pallas_kernels.packing import pack, packed_size

CLASSES = 8  # of key tiles; also the largest portable cluster
SMS = 132


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits."""

    slots: int | None = None  # tiles in flight a CTA; None: one or two, see Plan.slots
    fill: int = 2 * SMS  # CTAs that run at once: with up to 24 columns a thread has 110 to 240 registers, so two CTAs an SM
    cluster: int | None = None  # CTAs that share a row's keys: 1, 2, 4 or 8; None: as many as `fill` has room for
    heads: int | None = None  # KV heads that a CTA does one after another; None: enough that all CTAs run at once


def unsupported(
    *, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, q_dtype: Any, cache_dtype: Any
) -> str | None:
    """Why the kernel cannot run these shapes and dtypes on this device; None if it can."""
    if device := hopper.missing():
        return f"device: {device}"
    if rows < 1:
        return f"rows: expected at least 1, got {rows}"
    if head_dim not in (64, 128):
        return f"head_dim: expected 64 or 128, got {head_dim}"
    if num_heads // num_kv_heads > NARROW:
        return f"num_heads / num_kv_heads: expected at most {NARROW}, got {num_heads // num_kv_heads}"
    if reason := paging.unsupported(block_size, KEYS):
        return reason
    if q_dtype != jnp.bfloat16 or cache_dtype != jnp.bfloat16:
        return f"dtypes of q and the caches: expected bfloat16, got {q_dtype} and {cache_dtype}"
    return None


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
    window: int | None
    scale: float
    tuning: Tuning
    has_sinks: bool
    interpreted: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tile_rows(self) -> int:
        """Query rows in one row tile."""
        return min(self.rows, NARROW // self.group)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def columns(self) -> int:
        """The narrow side: row * group + head in the group, padded."""
        return packed_size(self.tile_rows * self.group)

    @property
    def tiles(self) -> int:
        """Tiles of keys that the block table can hold."""
        return -(-self.pages * self.block_size // KEYS)

    @property
    def _seen(self) -> int:
        """Tiles of keys that a row tile sees at most."""
        return self.tiles if self.window is None else min(self.tiles, max(self.window + self.tile_rows - 3, 0) // KEYS + 2)

    @property
    def _pairs(self) -> int:
        """Row tiles x KV heads: what a CTA or a cluster can do for itself."""
        return self.batch * self.row_tiles * self.num_kv_heads

    @property
    def _short(self) -> bool:
        """Whether no CTA has many tiles, so that starts and ends weigh as much as the stream between them."""
        return self._seen <= 16 * self.cluster

    @property
    def slots(self) -> int:
        """Tiles in flight a CTA. One where CTAs are many and short: with two, a CTA's last two tiles come late, together, and are then used
        one after the other.
        """
        if self.tuning.slots is not None:
            return self.tuning.slots
        many = self._pairs * self.cluster > SMS
        return 1 if many and self._short and self.columns <= 16 else 2  # the code for one takes 20 registers more: 32 columns would spill

    @property
    def cluster(self) -> int:
        """CTAs that share the keys of one row tile."""
        if self.tuning.cluster is not None:
            return self.tuning.cluster
        tiles = self._seen
        cluster = 1 if self.columns <= 16 else 2  # one CTA for the whole tree has no registers left for more than 16 columns
        ctas = self._pairs
        largest = 4 if self.columns > 24 and self.head_dim > 64 else CLASSES  # what the first CTA receives must fit beside its ring
        while cluster < min(tiles, largest) and 2 * cluster * ctas <= self.tuning.fill:
            cluster *= 2
        return cluster

    @property
    def heads(self) -> int:
        """KV heads of a CTA: as many as make the longest chain of them on any place of the GPU shortest, and of those choices the most.

        One where a context can be long: batches of unequal lengths are faster with small CTAs that come when others end.
        """
        if self.tuning.heads is not None:
            return self.tuning.heads
        if self.cluster > 1 or not self._short:
            return 1
        pairs = self._pairs
        choices = [heads for heads in (4, 3, 2, 1) if self.num_kv_heads % heads == 0]  # the queries of more leave no room for a second CTA
        return min(choices, key=lambda heads: heads * -(-pairs // (heads * self.tuning.fill)))


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_table: jax.Array,
    positions: jax.Array,
    seq_lens: jax.Array,
    window_start: jax.Array,
    sinks: jax.Array | None = None,
    bounds: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    packed_heads: int | None = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See pallas_kernels.attention.paged_attention; the output of a row that sees no key is 0."""
    batch, rows = positions.shape
    if packed_heads is not None and not packs(rows, packed_heads, k_cache.shape[2]):
        raise ValueError(
            f"packed queries: expected at most {NARROW} rows x heads a KV head, got {rows} x {packed_heads // k_cache.shape[2]}"
        )
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    plan = Plan(
        batch=batch,
        rows=rows,
        num_heads=packed_heads or q.shape[2],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        pages=block_table.shape[1],
        window=window,
        scale=scale,
        tuning=tuning or Tuning(),
        has_sinks=sinks is not None,
        interpreted=hopper.interpreting(),
    )
    packed = _pack(plan, q) if packed_heads is None else q[:, None]
    if bounds is None:
        max_keys = plan.pages * plan.block_size
        bounds = key_bounds(positions, seq_lens, window_start, group=plan.group, max_keys=max_keys)
    out, *_ = _attend(plan)(packed, k_cache, v_cache, block_table, bounds, *(() if sinks is None else (sinks,)))
    return out


def packs(rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether the rows of a request are one row tile, so that whoever makes the queries can write them packed."""
    return rows * (num_heads // num_kv_heads) <= NARROW


def too_long(rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether a request has so many rows (more than four row tiles) that they are prefill_mosaic_gpu's."""
    return rows * (num_heads // num_kv_heads) > 4 * NARROW


def _pack(plan: Plan, q: jax.Array) -> jax.Array:
    """q [batch, rows, num_heads, head_dim] -> [batch, row_tiles, num_kv_heads, columns, head_dim]; XLA fuses it with what makes q."""
    q = jnp.pad(q, ((0, 0), (0, plan.row_tiles * plan.tile_rows - plan.rows), (0, 0), (0, 0)))
    q = q.reshape(plan.batch * plan.row_tiles, plan.tile_rows, plan.num_heads, plan.head_dim)
    packed = pack(q, plan.num_kv_heads)
    return packed.reshape(plan.batch, plan.row_tiles, *packed.shape[1:])


def _attend(plan: Plan):
    """The kernel: a cluster for every (request, row tile, KV head), or a CTA for a few KV heads."""
    head_dim, group, columns, slots = plan.head_dim, plan.group, plan.columns, plan.slots
    cluster, heads = plan.cluster, plan.heads
    classes_here = CLASSES // cluster  # of one CTA
    pieces = max(KEYS // plan.block_size, 1)  # pages in a tile
    piece = KEYS // pieces
    matrix = plgpu.Layout.WGMMA
    by_column = matrix.reduce(0)
    tall, square = (head_dim, columns), (KEYS, columns)  # of values, of scores

    def to_values(x):
        return lax.broadcast_in_dim(x, tall, [1])

    def to_scores(x):
        return lax.broadcast_in_dim(x, square, [1])

    def splat(shape, value, layout):
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def nothing():
        return splat(tall, 0.0, matrix), splat((columns,), NEVER, by_column), splat((columns,), 0.0, by_column)

    def join(left, right):
        return merge(left, right, to_values)

    def body(q_ref, k_ref, v_ref, table_ref, bounds_ref, *rest):
        sinks_ref, rest = (rest[0], rest[1:]) if plan.has_sinks else (None, rest)
        out_ref, *rest = rest
        through_memory, rest = (rest[:2], rest[2:]) if cluster > 1 and plan.interpreted else ([], rest)
        q_smem, k_smem, v_smem, p_smem, out_smem, q_barrier, k_barriers, v_barriers, *exchange = rest
        exchange = [*through_memory, *exchange]
        await_inputs(plan.interpreted)
        request, first_head = lax.axis_index("request"), lax.axis_index("kv_head") * heads
        row_tile = plan.row_tiles - 1 - lax.axis_index("row_tile")  # the last rows of a prefill chunk see most keys: they start first
        rank = lax.axis_index("rank") if cluster > 1 else jnp.int32(0)
        start, stop, num_keys = (bounds_ref[request, row_tile, 2 * columns + i] for i in range(3))
        first_class = rank * classes_here
        passes = heads * classes_here  # through the tiles of a class, a KV head after the other

        def first_of(key_class):
            return start + lax.rem(key_class - start + plan.tiles * CLASSES, CLASSES)

        def settle(number, tile):
            """A place in this CTA's order of tiles: (pass, tile), moved on to the next pass while the pass has ended."""
            if passes == 1:
                return number, tile
            return lax.while_loop(
                lambda place: (place[1] >= stop) & (place[0] + 1 < passes),
                lambda place: (place[0] + 1, first_of(first_class + place[0] + 1)),
                (number, tile),
            )

        def places(count):
            """The first places. Of each, whoever takes it can look up the pages while the next one is found."""
            number, tile = settle(jnp.int32(0), first_of(first_class))
            for i in range(count):
                yield number, tile
                if i + 1 < count:
                    number, tile = settle(number, tile + CLASSES)

        def pages_of(tile):
            return paging.pages_of(table_ref, request, tile, keys=KEYS, block_size=plan.block_size, pages=plan.pages)

        def fetch(source, target, barriers, slot, number, tile, blocks):
            kv_head = first_head + lax.div(number, classes_here)
            for i, block in enumerate(blocks):
                offset = lax.rem(tile * KEYS, plan.block_size) if pieces == 1 else 0
                plgpu.copy_gmem_to_smem(
                    source.at[block, pl.ds(offset, piece), kv_head], target.at[slot, pl.ds(i * piece, piece)], barriers.at[slot]
                )

        ahead = [(*place, pages_of(place[1])) for place in places(slots + 1)]
        any_tile = ahead[0][1] < stop
        for slot, (number, tile, blocks) in enumerate(ahead[:slots]):

            @pl.when(tile < stop)
            def _(slot=slot, number=number, tile=tile, blocks=blocks):
                if slot == 0:
                    for i in range(heads):
                        plgpu.copy_gmem_to_smem(q_ref.at[request, row_tile, first_head + i], q_smem.at[i], q_barrier)
                fetch(k_ref, k_smem, k_barriers, slot, number, tile, blocks)
                fetch(v_ref, v_smem, v_barriers, slot, number, tile, blocks)

        first = load(bounds_ref.at[request, row_tile, pl.ds(0, columns)], by_column, optimized=False)
        last = load(bounds_ref.at[request, row_tile, pl.ds(columns, columns)], by_column, optimized=False)
        pl.when(any_tile)(lambda: plgpu.barrier_wait(q_barrier))

        def step(head, tile, carry):
            values, top, total, count, coming_number, coming, *blocks = carry
            slot = lax.rem(count, slots)
            # The page after the coming one is looked up now: a load from device memory must not hold up the copy.
            after_number, after = settle(coming_number, coming + CLASSES)
            after_blocks = pages_of(after)
            plgpu.barrier_wait(k_barriers.at[slot])

            def scores_of(acc):
                plgpu.wgmma(acc, k_smem.at[slot], q_smem.at[head].transpose((1, 0)))
                return acc[...]

            scores = pl.run_scoped(scores_of, plgpu.ACC(square, jnp.float32)) * (plan.scale * LOG2E)
            pl.when(coming < stop)(lambda: fetch(k_ref, k_smem, k_barriers, slot, coming_number, coming, blocks))

            key = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=matrix) + tile * KEYS
            scores = where((key >= to_scores(first)) & (key < to_scores(last)), scores, -jnp.inf)
            new = jnp.maximum(top, scores.max(axis=0))
            old = jnp.exp2(top - new)
            weights = jnp.exp2(scores - to_scores(new))
            p_smem.transpose((1, 0))[...] = weights.astype(jnp.bfloat16)

            plgpu.barrier_wait(v_barriers.at[slot])

            @pl.when((tile + 1) * KEYS > num_keys)
            def _():
                # Slots that nobody has written may hold NaN, and 0 * NaN is NaN.
                row = plgpu.broadcasted_iota(jnp.int32, (KEYS, head_dim), 0, layout=matrix) + tile * KEYS
                v = load(v_smem.at[slot], matrix)
                v_smem[slot] = where(row < num_keys, v, 0.0)

            plgpu.commit_smem()

            def values_of(acc):
                plgpu.wgmma(acc, v_smem.at[slot].transpose((1, 0)), p_smem.transpose((1, 0)))
                return acc[...]

            added = pl.run_scoped(values_of, plgpu.ACC(tall, jnp.float32))
            pl.when(coming < stop)(lambda: fetch(v_ref, v_smem, v_barriers, slot, coming_number, coming, blocks))
            return (
                values * to_values(old) + added,
                new,
                total * to_scores(old) + weights,  # summed over the keys when the class ends: that takes a barrier
                count + 1,
                after_number,
                after,
                *after_blocks,
            )

        def fold(head, size, base, order):
            """Softmax over the classes base .. base + size - 1 as (values, maximum, sum), and where the order of tiles has come to."""
            if size > 1:

                def half(i, carry):
                    state, order = carry[:3], carry[3:]
                    right, order = fold(head, size // 2, base + i * (size // 2), order)
                    return *join(state, right), *order

                carry = lax.fori_loop(0, 2, half, (*nothing(), *order))
                return carry[:3], carry[3:]
            begin = first_of(base)
            values, top, _ = nothing()
            carry = lax.fori_loop(
                0,
                lax.div(jnp.maximum(stop - begin, 0) + (CLASSES - 1), CLASSES),
                lambda i, carry: step(head, begin + i * CLASSES, carry),
                (values, top, splat(square, 0.0, matrix), *order),
            )
            values, top, total = carry[:3]
            return (values, top, total.sum(axis=0)), carry[3:]

        def write(kv_head, state):
            sink = None
            if sinks_ref is not None:
                head = lax.rem(plgpu.broadcasted_iota(jnp.int32, (columns,), 0, layout=by_column), group)
                sink = splat((columns,), 0.0, by_column)
                for i in range(group):
                    sink = where(head != i, sink, sinks_ref[kv_head * group + i])
            if heads > 1:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the head before
            out_smem.transpose((1, 0))[...] = normalise(state, sink, to_values).astype(jnp.bfloat16)
            plgpu.commit_smem()
            for i in range(plan.tile_rows):
                row = row_tile * plan.tile_rows + i

                @pl.when(row < plan.rows)
                def _(i=i, row=row):
                    plgpu.copy_smem_to_gmem(out_smem.at[pl.ds(i * group, group)], out_ref.at[request, row, pl.ds(kv_head * group, group)])

        coming_number, coming, blocks = ahead[slots]
        order = (jnp.int32(0), coming_number, coming, *blocks)
        if cluster == 1:

            def one_head(head, order):
                state, order = fold(head, CLASSES, jnp.int32(0), order)
                write(first_head + head, state)
                return order

            lax.fori_loop(0, heads, one_head, order)
        else:
            state, _ = fold(0, classes_here, first_class, order)
            send, receive = transport(request, row_tile, first_head, rank, exchange)
            pl.when((rank > 0) | plan.interpreted)(lambda: send(state))

            @pl.when(rank == 0)
            def _():
                plgpu.barrier_wait(exchange[-1])

                def gather(base, size):
                    if size == 1:
                        return state if base == 0 else receive(base)
                    return join(gather(base, size // 2), gather(base + size // 2, size // 2))

                write(first_head, gather(0, cluster))

        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    def transport(request, row_tile, kv_head, rank, exchange):
        """How CTAs of a cluster hand their state to the first one: send(state), and receive(rank)."""
        values_slots, stats_slots, *plain, barrier = exchange
        if plan.interpreted:
            # The interpreter knows no stores to another CTA: through device memory instead.
            here = (request, row_tile, kv_head)

            def write(state):
                values_slots[*here, rank], stats_slots[*here, rank, 0], stats_slots[*here, rank, 1] = state
                plgpu.barrier_arrive(barrier)

            return write, lambda sender: (values_slots[*here, sender], stats_slots[*here, sender, 0], stats_slots[*here, sender, 1])

        def send(state):
            values, top, total = state
            # Only two-dimensional tiles can be sent: the maxima are the upper half of one, the sums the lower.
            upper = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=matrix) < KEYS // 2
            stats = jnp.where(upper, to_scores(top), to_scores(total))
            for sent, slots_of in ((values, values_slots), (stats, stats_slots)):
                slot = slots_of.at[rank - 1]
                plgpu.async_store_smem(sent, slot, barrier, cluster_idx=jnp.int32(0), cluster_dim="rank", optimized=False)

        def receive(sender):
            values = load(values_slots.at[sender - 1], matrix, optimized=False)
            plain[0][...] = load(stats_slots.at[sender - 1], matrix, optimized=False)  # tiled to be sent; rows can be read here
            top, total = (load(plain[0].at[row], by_column, optimized=False) for row in (0, KEYS // 2))
            return values, top, total

        return send, receive

    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch = [
        plgpu.SMEM((heads, columns, head_dim), jnp.bfloat16, transforms=tiling),
        plgpu.SMEM((slots, KEYS, head_dim), jnp.bfloat16, transforms=tiling),
        plgpu.SMEM((slots, KEYS, head_dim), jnp.bfloat16, transforms=tiling),
        plgpu.SMEM((columns, KEYS), jnp.bfloat16, transforms=tiling),
        plgpu.SMEM((columns, head_dim), jnp.bfloat16),
        plgpu.Barrier(num_arrivals=heads),
        plgpu.Barrier(num_barriers=slots, num_arrivals=pieces),
        plgpu.Barrier(num_barriers=slots, num_arrivals=pieces),
    ]
    out_type = [jax.ShapeDtypeStruct((plan.batch, plan.rows, plan.num_heads, head_dim), jnp.bfloat16)]
    if cluster > 1 and plan.interpreted:
        lead = (plan.batch, plan.row_tiles, plan.num_kv_heads, cluster)
        out_type += [jax.ShapeDtypeStruct((*lead, *tall), jnp.float32), jax.ShapeDtypeStruct((*lead, 2, columns), jnp.float32)]
        scratch.append(plgpu.ClusterBarrier(collective_axes=("rank",)))
    elif cluster > 1:
        scratch += [
            plgpu.SMEM((cluster - 1, *tall), jnp.float32),
            plgpu.SMEM((cluster - 1, *square), jnp.float32),
            plgpu.SMEM(square, jnp.float32),
            plgpu.Barrier(num_arrivals=2 * (cluster - 1)),
        ]
    return plgpu.kernel(
        body,
        out_type=tuple(out_type),
        # The last axis runs fastest: neighbours in time read the KV heads of the same pages.
        grid=(plan.batch, plan.row_tiles, plan.num_kv_heads // heads),
        grid_names=("request", "row_tile", "kv_head"),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention",
        **({"cluster": (cluster,), "cluster_names": ("rank",)} if cluster > 1 else {}),
    )
