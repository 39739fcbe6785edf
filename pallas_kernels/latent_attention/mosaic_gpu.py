"""Latent attention on Hopper: one launch, each tile of latents read once as keys and as values.

FlashAttention's tiles (Dao et al., 2022, arXiv:2205.14135) and Flash-Decoding's shares of the keys
(Dao et al., 2023), as in pallas_kernels.attention. wgmma's 64 left rows are latents (K Q^T) and
values (V^T P^T), and the query rows, row x head, are its narrow side, so that 80 of them need no
padding to 128. A CTA is one warpgroup that holds up to 40 query rows, 46 KB, two tiles of 64
latents, 147 KB, and float32 sums of 512 x 40, 160 registers for each thread.

Tile t belongs to class t mod 8. One CTA folds a class from its first tile to its last. The CTAs of
a cluster share the classes and leave their results in device memory (half a cache line's traffic
for each latent: they do not fit beside the ring). Then each folds a share of the value dimensions
over the eight classes as a binary tree. So the order of all sums depends on the keys' places alone:
neither on the batch, nor on the block table, nor on the number of CTAs. (A prefill chunk has CTAs
enough: one class, and no exchange.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper, paging
from pallas_kernels.latent_attention.inputs import Inputs, Latents
from pallas_kernels.mosaic import load, store
from pallas_kernels.online_softmax import (
    LOG2E,
    NEVER,
    State,
    await_inputs,
    merge,
    normalise,
    where,
)
from pallas_kernels.types import Accumulator, Barrier, Index, Ref, Slice

T = TypeVar("T")  # a ref, or its type
Carry = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # tile, values, maximum, slot
KEYS = 64  # latents of a tile: the left side of a wgmma
CHUNK = 64  # value dimensions that are folded and written at once
MAX_COLUMNS = 40  # most query rows (row x head) of a CTA: more would spill
MAX_RANK = 512
CLASSES = 8  # of key tiles; also the largest portable cluster
PREFILL_ROWS = 16  # a request with more rows than this is a prefill chunk


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices that change no bits.

    slots: tiles in shared memory. fill: clusters grow while there are at most this many CTAs.
    cluster: CTAs that share a row's keys: 1, 2, 4 or 8; None: as `fill` says.
    """

    slots: int = 2
    max_columns: int = MAX_COLUMNS
    fill: int = hopper.NUM_SMS
    cluster: int | None = None


def unsupported(latents: Latents) -> str | None:
    """Return why the kernel cannot run on this process's device, None if it can."""
    if device := hopper.missing():
        return f"device: {device}"
    rank, rope = latents.kv_lora_rank, latents.rope_head_dim
    if rank % CHUNK or not CHUNK <= rank <= MAX_RANK or rope != 64:
        expected = (
            f"a kv_lora_rank of a multiple of {CHUNK} up to {MAX_RANK} and a rope_head_dim of 64"
        )
        return f"expected {expected}, got {rank} and {rope}"
    if latents.query_rows % 8:
        return f"rows x heads: expected a multiple of 8, got {latents.query_rows}"
    if reason := paging.unsupported(latents.block_size, KEYS):
        return reason
    if latents.q_dtype != jnp.bfloat16 or latents.cache_dtype != jnp.bfloat16:
        got = f"{latents.q_dtype} and {latents.cache_dtype}"
        return f"dtypes of q and the cache: expected bfloat16, got {got}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes and division of one launch. rank: kv_lora_rank. pages: columns of the block table."""

    batch: int
    rows: int
    num_heads: int
    rank: int
    width: int
    block_size: int
    pages: int
    scale: float
    tuning: Tuning
    interpreted: bool

    @property
    def query_rows(self) -> int:
        """Rows x heads of each request; a row's heads lie side by side."""
        return self.rows * self.num_heads

    @property
    def row_tiles(self) -> int:
        return -(-self.query_rows // self.tuning.max_columns)

    @property
    def columns(self) -> int:
        """Query rows of one tile."""
        return -(-self.query_rows // (8 * self.row_tiles)) * 8

    @property
    def tiles(self) -> int:
        """Tiles of latents that the block table can hold."""
        return -(-self.pages * self.block_size // KEYS)

    @property
    def classes(self) -> int:
        return 1 if self.rows > PREFILL_ROWS else CLASSES

    @property
    def cluster(self) -> int:
        """CTAs that share the keys of one row tile."""
        if self.classes == 1:
            return 1
        if self.tuning.cluster is not None:
            return self.tuning.cluster
        cluster = 1
        while (
            cluster < min(self.tiles, CLASSES, self.rank // CHUNK)
            and 2 * cluster * self.batch * self.row_tiles <= self.tuning.fill
        ):
            cluster *= 2
        return cluster


def latent_attention(inputs: Inputs, *, tuning: Tuning | None = None) -> jax.Array:
    """Run the op; see pallas_kernels.latent_attention.latent_attention.

    The output of a row that sees no key is 0.
    """
    q, cache, block_table = inputs.q, inputs.cache, inputs.block_table
    batch, rows, num_heads, width = q.shape
    plan = Plan(
        batch=batch,
        rows=rows,
        num_heads=num_heads,
        rank=inputs.kv_lora_rank,
        width=width,
        block_size=cache.shape[1],
        pages=block_table.shape[1],
        scale=inputs.scale,
        tuning=tuning or Tuning(),
        interpreted=hopper.interpreting(),
    )
    out, *_ = _attend(plan)(
        q.reshape(batch, plan.query_rows, width),
        cache,
        block_table,
        _bounds(plan, inputs.positions, inputs.seq_lens),
    )
    return out.reshape(batch, rows, num_heads, plan.rank)


def _bounds(plan: Plan, positions: jax.Array, seq_lens: jax.Array) -> jax.Array:
    """Return which keys exist and which queries see them; equal in every layer.

    int32 [batch, row_tiles, columns + 4]. Per column: the key after its row's last. Then the tile
    after the last that any row sees, the number of keys, and two of padding, without which every
    second request's numbers would be unaligned for the kernel's loads.
    """
    written = jnp.minimum(seq_lens, plan.pages * plan.block_size)
    last = jnp.maximum(jnp.minimum(positions + 1, written[:, None]), 0)
    last = jnp.repeat(last, plan.num_heads, axis=1)
    last = jnp.pad(last, ((0, 0), (0, plan.row_tiles * plan.columns - last.shape[1])))
    last = last.reshape(plan.batch, plan.row_tiles, plan.columns)
    stop = (last.max(axis=2) + KEYS - 1) // KEYS
    everyone = jnp.broadcast_to(written[:, None], stop.shape)
    return jnp.concatenate((last, jnp.stack((stop, everyone, everyone, everyone), axis=2)), axis=2)


def _spread(x: jax.Array, size: int) -> jax.Array:
    """Return [size, columns] whose rows are all x [columns]."""
    return lax.broadcast_in_dim(x, (size, x.shape[0]), [1])


def _publish(plan: Plan) -> None:
    """Order device memory across the cluster, together with a barrier.

    After the barrier, writes of this CTA's threads are visible to the cluster's others, and theirs
    to it. A cluster barrier alone orders shared memory only: its arrival has the scope of a CTA.
    """
    if plan.interpreted:
        return
    from jax.experimental.mosaic.gpu import utils

    @plgpu.inline_mgpu()
    def fence(_ctx: object) -> None:
        # New in jax 0.11.
        inline_ptx = utils.inline_ptx  # pyright: ignore[reportAttributeAccessIssue]
        inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        utils.warpgroup_barrier()

    fence()  # pyright: ignore[reportCallIssue]


class Scratch(NamedTuple, Generic[T]):
    """Shared memory and barriers of a CTA.

    q: its query rows. ring: tiles of latents. weights: of a tile, then a chunk of the result.
    last: the key after each column's last. total: the sum of each column. q_ready: the queries
    have arrived. full: for each slot, its copies have arrived. published: of the cluster; with a
    cluster.
    """

    q: T
    ring: T
    weights: T
    last: T
    total: T
    q_ready: Barrier
    full: Barrier
    published: Barrier


def _attend(plan: Plan) -> Callable[..., tuple[jax.Array, ...]]:
    """Return the kernel: a cluster for each (request, row tile).

    Its operands are queries, cache, block_table and bounds.
    """
    rank_size, columns, slots = plan.rank, plan.columns, plan.tuning.slots
    classes, cluster = plan.classes, plan.cluster
    classes_here = classes // cluster  # of one CTA
    pieces = max(KEYS // plan.block_size, 1)  # pages in a tile
    piece = KEYS // pieces
    matrix = plgpu.Layout.WGMMA
    by_column = matrix.reduce(0)
    tall, square = (rank_size, columns), (KEYS, columns)  # of values, of scores
    all_values = pl.ds(0, rank_size)

    def to_chunk(x: jax.Array) -> jax.Array:
        return _spread(x, CHUNK)

    def splat(shape: tuple[int, ...], value: float) -> jax.Array:
        return plgpu.layout_cast(
            jnp.full(shape, value, jnp.float32), matrix if len(shape) == 2 else by_column
        )

    def add_product(values: jax.Array, left: Ref, right: Ref) -> jax.Array:
        """Return values + left @ right."""

        def product(acc: Accumulator) -> jax.Array:
            plgpu.wgmma(acc, left, right)
            return acc[...]

        if plan.interpreted:  # the interpreter's accumulators start at zero
            return values + pl.run_scoped(product, plgpu.ACC(tall, jnp.float32))
        run: Callable[..., Any] = pl.run_state(lambda acc: plgpu.wgmma(acc, left, right))
        return run(plgpu.ACC.init(values))

    def body(
        q_ref: Ref,
        cache_ref: Ref,
        table_ref: Ref,
        bounds_ref: Ref,
        out_ref: Ref,
        exchange: list[Ref],
        scratch: Scratch[Ref],
    ) -> None:
        q_smem, ring, p_smem, last_smem, total_smem = scratch[:5]
        q_barrier, barriers = scratch.q_ready, scratch.full
        await_inputs(plan.interpreted)
        request = lax.axis_index("request")
        row_tile = plan.row_tiles - 1 - lax.axis_index("row_tile")  # the last rows see most keys
        member = lax.axis_index("member") if cluster > 1 else jnp.int32(0)
        stop = bounds_ref[request, row_tile, columns]
        # Rows past the last one are read as zeros and not written.
        query_rows = pl.ds(row_tile * columns, columns)

        def next_class(tile: jax.Array) -> jax.Array:
            """Return the tile, moved on to the next class if its class has ended."""
            if classes_here == 1:
                return tile
            coming_class = lax.rem(tile, classes) + 1
            # If the next class has no tile, no later one has: classes begin at tiles 0, 1, 2, ...
            return jnp.where(
                (tile >= stop) & (lax.rem(coming_class, classes_here) != 0), coming_class, tile
            )

        def pages_of(tile: jax.Array) -> tuple[jax.Array, ...]:
            return paging.pages_of(
                table_ref, request, tile, keys=KEYS, block_size=plan.block_size, pages=plan.pages
            )

        def fetch(slot: Index, tile: jax.Array, blocks: tuple[jax.Array, ...]) -> None:
            for i, block in enumerate(blocks):
                offset = lax.rem(tile * KEYS, plan.block_size) if pieces == 1 else 0
                source = cache_ref.at[block, pl.ds(offset, piece), 0]
                plgpu.copy_gmem_to_smem(
                    source, ring.at[slot, pl.ds(i * piece, piece)], barriers.at[slot]
                )

        ahead = [member * classes_here]
        while len(ahead) < slots:
            ahead.append(next_class(ahead[-1] + classes))
        for slot, tile in enumerate(ahead):

            @pl.when(tile < stop)
            def _fetch_first(slot: int = slot, tile: jax.Array = tile) -> None:
                if slot == 0:
                    plgpu.copy_gmem_to_smem(q_ref.at[request, query_rows], q_smem, q_barrier)
                fetch(slot, tile, pages_of(tile))

        last_smem[...] = load(
            bounds_ref.at[request, row_tile, pl.ds(0, columns)], by_column, optimized=False
        )
        plgpu.commit_smem()
        pl.when(ahead[0] < stop)(lambda: plgpu.barrier_wait(q_barrier))

        def step(carry: Carry) -> Carry:
            tile, values, top, slot = carry
            coming = tile
            for _slot in range(slots):
                coming = next_class(coming + classes)
            # Looked up early: a load from device memory must not delay the copy.
            blocks = pages_of(coming)
            plgpu.barrier_wait(barriers.at[slot])

            @pl.when(tile + 1 >= stop)
            def _clear_unwritten() -> None:
                # Unwritten cache slots may hold NaN, and 0 * NaN is NaN. Only the last visible tile
                # has any.
                num_keys = bounds_ref[request, row_tile, columns + 1]

                @pl.loop(0, plan.width // CHUNK)
                def _clear_chunk(i: jax.Array) -> None:
                    chunk = ring.at[slot, :, pl.ds(i * CHUNK, CHUNK)]
                    row = (
                        plgpu.broadcasted_iota(jnp.int32, (KEYS, CHUNK), 0, layout=matrix)
                        + tile * KEYS
                    )
                    chunk[...] = where(row < num_keys, load(chunk, matrix), 0.0)

                plgpu.commit_smem()

            def scores_of(acc: Accumulator) -> jax.Array:
                plgpu.wgmma(acc, ring.at[slot], q_smem.transpose((1, 0)))
                return acc[...]

            scores = pl.run_scoped(scores_of, plgpu.ACC(square, jnp.float32)) * (plan.scale * LOG2E)
            key = plgpu.broadcasted_iota(jnp.int32, square, 0, layout=matrix) + tile * KEYS
            last = load(last_smem, by_column, optimized=False)
            scores = where(key < _spread(last, KEYS), scores, -jnp.inf)
            new = jnp.maximum(top, scores.max(axis=0))
            old = jnp.exp2(top - new)
            weights = jnp.exp2(scores - _spread(new, KEYS))
            p_smem.transpose((1, 0))[...] = weights.astype(jnp.bfloat16)
            plgpu.commit_smem()
            total_smem[...] = load(total_smem, by_column, optimized=False) * old + weights.sum(
                axis=0
            )
            values = add_product(
                values * _spread(old, rank_size),
                ring.at[slot, :, all_values].transpose((1, 0)),
                p_smem.transpose((1, 0)),
            )
            pl.when(coming < stop)(lambda: fetch(slot, coming, blocks))
            return tile + classes, values, new, jnp.where(slot + 1 == slots, 0, slot + 1)

        def fold(key_class: jax.Array, slot: jax.Array) -> tuple[State, jax.Array]:
            """Return the softmax over one class of tiles, and the slot of the tile after it."""
            total_smem[...] = splat((columns,), 0.0)
            start = (key_class, splat(tall, 0.0), splat((columns,), NEVER), slot)
            _, values, top, slot = lax.while_loop(lambda carry: carry[0] < stop, step, start)
            return (values, top, load(total_smem, by_column, optimized=False)), slot

        def write(values: jax.Array, part: Slice) -> None:
            """Write values [CHUNK, columns] to these value dimensions of the output."""
            plgpu.wait_smem_to_gmem(0)  # the chunk before has left
            p_smem.transpose((1, 0))[...] = values
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(p_smem, out_ref.at[request, query_rows, part])

        if classes == 1:
            state, _ = fold(jnp.int32(0), jnp.int32(0))
            normed = normalise(state, None, lambda x: _spread(x, rank_size)).astype(jnp.bfloat16)
            for start in range(0, rank_size, CHUNK):
                write(normed[start : start + CHUNK], pl.ds(start, CHUNK))
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            return

        values_ref, stats_ref = exchange

        def leave(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            """Fold a class, and leave its state in device memory."""
            key_class, slot = carry
            (values, top, total), slot = fold(key_class, slot)
            here = (request, row_tile, key_class)
            store(values_ref.at[*here], values)
            store(stats_ref.at[*here, 0], top)
            store(stats_ref.at[*here, 1], total)
            return key_class + 1, slot

        # Classes begin at tiles 0, 1, 2, ...: those from `stop` on have none.
        first_class = (member * classes_here, jnp.int32(0))
        if classes_here == 1:

            @pl.when(member < stop)
            def _leave_one() -> None:
                leave(first_class)

        else:
            lax.while_loop(
                lambda carry: (carry[0] < (member + 1) * classes_here) & (carry[0] < stop),
                leave,
                first_class,
            )
        _publish(plan)
        if cluster > 1:
            plgpu.barrier_arrive(scratch.published)
            plgpu.barrier_wait(scratch.published)
            _publish(plan)

        @pl.loop(0, rank_size // CHUNK // cluster)
        def _fold_chunk(i: jax.Array) -> None:
            part = pl.ds((member * (rank_size // CHUNK // cluster) + i) * CHUNK, CHUNK)

            def gather(base: int, size: int) -> State:
                if size > 1:
                    return merge(
                        gather(base, size // 2), gather(base + size // 2, size // 2), to_chunk
                    )
                here = (request, row_tile, base)
                left = base < stop  # otherwise no CTA has left this class
                values = where(left, load(values_ref.at[*here, part], matrix, optimized=False), 0.0)
                top, total = (
                    load(stats_ref.at[*here, j], by_column, optimized=False) for j in range(2)
                )
                return values, where(left, top, NEVER), where(left, total, 0.0)

            write(normalise(gather(0, classes), None, to_chunk).astype(jnp.bfloat16), part)

        plgpu.wait_smem_to_gmem(0, wait_read_only=False)

    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    out = jax.ShapeDtypeStruct((plan.batch, plan.query_rows, rank_size), jnp.bfloat16)
    exchange = []
    if classes > 1:
        lead = (plan.batch, plan.row_tiles, classes)
        exchange = [
            jax.ShapeDtypeStruct((*lead, *tall), jnp.float32),
            jax.ShapeDtypeStruct((*lead, 2, columns), jnp.float32),
        ]
    everyone = plgpu.ClusterBarrier(collective_axes=("member",)) if cluster > 1 else None
    scratch = Scratch(
        q=plgpu.SMEM((columns, plan.width), jnp.bfloat16, transforms=tiling),
        ring=plgpu.SMEM((slots, KEYS, plan.width), jnp.bfloat16, transforms=tiling),
        weights=plgpu.SMEM((columns, KEYS), jnp.bfloat16, transforms=tiling),
        last=plgpu.SMEM((columns,), jnp.int32),
        total=plgpu.SMEM((columns,), jnp.float32),
        q_ready=plgpu.Barrier(),
        full=plgpu.Barrier(num_barriers=slots, num_arrivals=pieces),
        published=everyone,
    )
    return plgpu.kernel(
        body,
        out_type=(out, exchange),
        # The last axis runs fastest: row tiles of one request read the same pages.
        grid=(plan.batch, plan.row_tiles),
        grid_names=("request", "row_tile"),
        scratch_types=[scratch],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="latent_attention",
        **({"cluster": (cluster,), "cluster_names": ("member",)} if cluster > 1 else {}),
    )
