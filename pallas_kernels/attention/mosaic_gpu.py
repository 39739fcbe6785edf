"""Paged attention on Hopper: flash-decoding with TMA and wgmma, one warpgroup a CTA.

FlashAttention's tiles (Dao et al., 2022, arXiv:2205.14135) and Flash-Decoding's splits over the keys (Dao et al., 2023). A CTA holds
the query rows of one KV head (rows x group, padded to wgmma's 64 rows), streams the pages of its keys through a ring in shared memory,
and reads each key and value once. Every tile of 64 keys is a softmax of its own (maximum, sum, weighted values); tiles are folded from
left to right into splits of a fixed number of tokens, and splits from left to right into the row's result. That order depends on
nothing but the row's own keys: neither on the batch, nor on the number of pages in the block table, nor on how many tiles a CTA takes.
A tile that a row does not see leaves its state unchanged to the bit.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as jax_config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

KEYS = 64  # keys a tile, the granularity of everything below
ROWS = 64  # rows of a wgmma tile
NEVER = -1e30  # the maximum of a row that has seen nothing: finite, so that no difference of two is NaN
LOG2E = math.log2(math.e)
SMS = 132


@dataclasses.dataclass(frozen=True)
class Tuning:
    """Static choices. Only tiles_per_split changes a result's bits."""

    tiles_per_split: int = 8  # tokens of a split / 64
    slots: int = 2  # tiles in flight a CTA; with 2, an SM holds two CTAs of head_dim 128 or four of 64
    fine_below: int = SMS  # one tile a CTA instead of one split where splits make fewer CTAs than this
    max_split_row_tiles: int = 4  # more row tiles than this (a prefill chunk) fill the GPU without splits


def interpreting() -> bool:
    """Whether plgpu.force_gpu_interpret_mode is on; its interpreter does not know the PDL instructions."""
    return jax_config.pallas_tpu_interpret_mode_context_manager.value is not None


def unsupported(
    *, rows: int, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, q_dtype: Any, cache_dtype: Any
) -> str | None:
    """Why the kernel cannot run these shapes and dtypes on this device; None if it can."""
    if jax.__version_info__ < (0, 11):
        return f"the Mosaic GPU kernel: expected jax 0.11 or later, got {jax.__version__}"
    if not interpreting() and (device := _not_hopper()) is not None:
        return f"device: expected compute capability 9.0 (Hopper), got {device}"
    if rows < 1:
        return f"rows: expected at least 1, got {rows}"
    if head_dim not in (64, 128):
        return f"head_dim: expected 64 or 128, got {head_dim}"
    if num_heads // num_kv_heads > ROWS:
        return f"num_heads / num_kv_heads: expected at most {ROWS}, got {num_heads // num_kv_heads}"
    if block_size < 8 or (KEYS % block_size and block_size % KEYS):
        return f"block_size: expected 8, 16, 32 or a multiple of {KEYS}, got {block_size}"
    if q_dtype != jnp.bfloat16 or cache_dtype != jnp.bfloat16:
        return f"dtypes of q and the caches: expected bfloat16, got {q_dtype} and {cache_dtype}"
    return None


def _not_hopper() -> str | None:
    """The name of the device that is compiled for, if it is no Hopper GPU."""
    described = jax.sharding.get_abstract_mesh().abstract_device  # ahead-of-time compilation for a device that is not here
    if described is not None:
        return None if any(name in described.device_kind for name in ("H100", "H200", "GH200")) else described.device_kind
    device = jax.devices()[0]
    if device.platform != "gpu":
        return device.platform
    return None if device.compute_capability == "9.0" else f"{device.device_kind} ({device.compute_capability})"


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes that the two kernels share."""

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
    pdl: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def tile_rows(self) -> int:
        """Query rows in one wgmma tile."""
        return min(self.rows, ROWS // self.group)

    @property
    def row_tiles(self) -> int:
        return -(-self.rows // self.tile_rows)

    @property
    def used(self) -> int:
        """Rows of the wgmma tile that mean something: row of the query * group + head in the group."""
        return self.tile_rows * self.group

    @property
    def packed(self) -> int:
        """`used`, rounded up to what shared memory is tiled by."""
        return -(-self.used // 8) * 8

    @property
    def tiles(self) -> int:
        """Tiles of keys that the block table can hold."""
        return -(-self.pages * self.block_size // KEYS)

    def parts_of(self, size: int) -> int:
        """Ranges of `size` tiles, aligned to their size, that the keys of one row tile can touch."""
        everything = -(-self.tiles // size)
        if self.window is None:
            return everything
        return min(everything, max(self.window + self.tile_rows - 3, 0) // (size * KEYS) + 2)

    @property
    def tiles_per_cta(self) -> int:
        """1, tiles_per_split, or everything that the rows see."""
        split = self.tuning.tiles_per_split
        short = self.window is not None and self.window <= split * KEYS
        if short or self.row_tiles > self.tuning.max_split_row_tiles:
            return self.tiles
        ctas = self.parts_of(split) * self.batch * self.row_tiles * self.num_kv_heads
        return 1 if ctas < self.tuning.fine_below else split

    @property
    def parts(self) -> int:
        """CTAs that share the keys of one row tile."""
        return self.parts_of(self.tiles_per_cta) if self.tiles_per_cta < self.tiles else 1

    @property
    def slots(self) -> int:
        return min(self.tuning.slots, self.tiles_per_cta)


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
    window: int | None = None,
    tuning: Tuning | None = None,
) -> jax.Array:
    """See pallas_kernels.attention.paged_attention; the output of a row that sees no key is 0."""
    batch, rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    plan = Plan(
        batch=batch,
        rows=rows,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        pages=block_table.shape[1],
        window=window,
        scale=scale,
        tuning=tuning or Tuning(),
        has_sinks=sinks is not None,
        pdl=not interpreting(),
    )
    bounds = _bounds(plan, positions, seq_lens, window_start)
    sink_args = () if sinks is None else (sinks,)
    attended = _attend(plan)(_pack(plan, q), k_cache, v_cache, block_table, bounds, *sink_args)
    if plan.parts == 1:
        (out,) = attended
    else:
        values, stats = attended
        values = values.reshape(*values.shape[:4], -1)
        (out,) = _combine(plan)(values, stats, bounds, *sink_args)
    return out.reshape(q.shape)


def _pack(plan: Plan, q: jax.Array) -> jax.Array:
    """q [batch, rows, num_heads, head_dim] -> [batch, row_tiles, num_kv_heads, packed, head_dim]; XLA fuses it with what makes q."""
    padded = plan.row_tiles * plan.tile_rows
    q = jnp.pad(q, ((0, 0), (0, padded - plan.rows), (0, 0), (0, 0)))
    q = q.reshape(plan.batch, plan.row_tiles, plan.tile_rows, plan.num_kv_heads, plan.group, plan.head_dim)
    q = q.transpose(0, 1, 3, 2, 4, 5).reshape(plan.batch, plan.row_tiles, plan.num_kv_heads, plan.used, plan.head_dim)
    return jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, plan.packed - plan.used), (0, 0)))


def _bounds(plan: Plan, positions: jax.Array, seq_lens: jax.Array, window_start: jax.Array) -> jax.Array:
    """What the kernels need to know about which keys exist and who sees them; equal in every layer, so XLA computes it once.

    int32 [batch, row_tiles, 128 + 3]: per row of the wgmma tile, its first key (64 numbers) and the key after its last (64); first tile of
    keys that any row sees, the tile after the last, number of keys. One array: a kernel less before the first layer.
    """
    written = jnp.minimum(seq_lens, plan.pages * plan.block_size)
    last = jnp.minimum(positions + 1, written[:, None])
    first = jnp.minimum(jnp.maximum(window_start, 0), last)
    pad = ((0, 0), (0, plan.row_tiles * plan.tile_rows - plan.rows))
    shape = (plan.batch, plan.row_tiles, plan.tile_rows)
    first, last = jnp.pad(first, pad).reshape(shape), jnp.pad(last, pad).reshape(shape)
    seen = first < last
    end = jnp.max(jnp.where(seen, last, 0), axis=2)
    begin = jnp.min(jnp.where(seen, first, plan.tiles * KEYS), axis=2)
    everyone = jnp.broadcast_to(written[:, None], end.shape)
    ranges = jnp.stack((begin // KEYS, (end + KEYS - 1) // KEYS, everyone), axis=2)
    limits = jnp.repeat(jnp.stack((first, last), axis=2), plan.group, axis=3)
    limits = jnp.pad(limits, ((0, 0), (0, 0), (0, 0), (0, ROWS - plan.used)))
    return jnp.concatenate((limits.reshape(*ranges.shape[:2], 2 * ROWS), ranges), axis=2)


def _load(ref: Any, layout: Any, optimized: bool = True) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=optimized)  # pyright: ignore[reportCallIssue]  # jax 0.10 wanted an index


def _where(condition: jax.Array, x: jax.Array, y: jax.Array | float) -> jax.Array:
    """jnp.where with numbers spread to x's shape, which Mosaic wants spelled out."""
    return jnp.where(jnp.broadcast_to(condition, x.shape), x, jnp.full(x.shape, y, x.dtype))


def _merge(left: tuple, right: tuple, spread=lambda x: x) -> tuple:
    """Two softmaxes over neighbouring keys (values, maximum in powers of two, sum) as one; `spread` widens a number a row to its values."""
    (values, top, total), (values_r, top_r, total_r) = left, right
    new = jnp.maximum(top, top_r)
    a, b = jnp.exp2(top - new), jnp.exp2(top_r - new)
    return values * spread(a) + values_r * spread(b), new, total * a + total_r * b


def _normalise(state: tuple, sink: jax.Array | None, spread=lambda x: x) -> jax.Array:
    """The weighted mean; a sink is one more logit whose value is zero."""
    values, top, total = state
    if sink is not None:
        sink = sink * LOG2E
        new = jnp.maximum(top, sink)
        a = jnp.exp2(top - new)
        values, total = values * spread(a), total * a + jnp.exp2(sink - new)
    return values * spread(1.0 / _where(total > 0.0, total, 1.0))


def _begin(plan: Plan) -> None:
    """Let the next kernel's CTAs come, then wait for what the kernels before this one write: here, everything that it reads."""
    if plan.pdl:
        plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()


def _attend(plan: Plan):
    """Kernel 1: a CTA for every (request, row tile, range of keys, KV head). Writes the output, or its part if the keys are shared."""
    head_dim, group, slots = plan.head_dim, plan.group, plan.slots
    pieces = max(KEYS // plan.block_size, 1)  # pages in a tile
    piece = KEYS // pieces
    single = plan.parts == 1
    matrix = plgpu.Layout.WGMMA
    by_row = matrix.reduce(1)

    def body(q_ref, k_ref, v_ref, table_ref, bounds_ref, *rest):
        sinks_ref, outs = (rest[0], rest[1:]) if plan.has_sinks else (None, rest)
        _begin(plan)
        request = lax.axis_index("request")
        row_tile = plan.row_tiles - 1 - lax.axis_index("row_tile")  # the last rows of a prefill chunk see most keys: they start first
        part, kv_head = lax.axis_index("part"), lax.axis_index("kv_head")
        first_tile, stop, num_keys = (bounds_ref[request, row_tile, 2 * ROWS + i] for i in range(3))
        if single:
            start = first_tile
        else:
            index = part if plan.window is None else part + lax.div(first_tile, plan.tiles_per_cta)
            start = index * plan.tiles_per_cta
            stop = jnp.minimum(stop, start + plan.tiles_per_cta)
            if plan.tiles_per_cta > 1:  # the only tile starts where it starts: its page is looked up without waiting for bounds_ref
                start = jnp.maximum(start, first_tile)

        def pages_of(tile):
            """Block ids of a tile's pages. Those past the request's last page may be anything: their keys are masked."""
            if pieces == 1:
                return (table_ref[request, jnp.minimum(lax.div(tile * KEYS, plan.block_size), plan.pages - 1)],)
            return tuple(table_ref[request, jnp.minimum(tile * pieces + i, plan.pages - 1)] for i in range(pieces))

        ahead_blocks = [pages_of(start + ahead) for ahead in range(slots)]
        first = _load(bounds_ref.at[request, row_tile, pl.ds(0, ROWS)], by_row, optimized=False)
        last = _load(bounds_ref.at[request, row_tile, pl.ds(ROWS, ROWS)], by_row, optimized=False)

        def spread(x):
            return lax.broadcast_in_dim(x, (ROWS, head_dim), [0])

        def stream(q_smem, k_smem, v_smem, p_smem, q_barrier, k_barriers, v_barriers):
            def fetch(source, target, barriers, tile, blocks):
                slot = lax.rem(tile - start, slots)
                for i, block in enumerate(blocks):
                    offset = lax.rem(tile * KEYS, plan.block_size) if pieces == 1 else 0
                    plgpu.copy_gmem_to_smem(
                        source.at[block, pl.ds(offset, piece), kv_head],
                        target.at[slot, pl.ds(i * piece, piece)],
                        barriers.at[slot],
                    )

            for ahead in range(slots):

                @pl.when(start + ahead < stop)
                def _(ahead=ahead):
                    blocks = ahead_blocks[ahead]
                    if ahead == 0:
                        plgpu.copy_gmem_to_smem(q_ref.at[request, row_tile, kv_head], q_smem.at[pl.ds(0, plan.packed)], q_barrier)
                    fetch(k_ref, k_smem, k_barriers, start + ahead, blocks)
                    fetch(v_ref, v_smem, v_barriers, start + ahead, blocks)

            pl.when(start < stop)(lambda: plgpu.barrier_wait(q_barrier))

            def step(tile, carry):
                *state, blocks = carry
                slot = lax.rem(tile - start, slots)
                coming = tile + slots
                # Looked up one tile early: a load from device memory must not hold up the copy.
                after = pages_of(coming + 1) if plan.tiles_per_cta > 1 else blocks

                plgpu.barrier_wait(k_barriers.at[slot])

                def scores_of(acc):
                    plgpu.wgmma(acc, q_smem, k_smem.at[slot].transpose((1, 0)))
                    return acc[...]

                scores = pl.run_scoped(scores_of, plgpu.ACC((ROWS, KEYS), jnp.float32)) * (plan.scale * LOG2E)
                pl.when(coming < stop)(lambda: fetch(k_ref, k_smem, k_barriers, coming, blocks))

                key = plgpu.broadcasted_iota(jnp.int32, (ROWS, KEYS), 1, layout=matrix) + tile * KEYS
                wide = (ROWS, KEYS)
                seen = (key >= lax.broadcast_in_dim(first, wide, [0])) & (key < lax.broadcast_in_dim(last, wide, [0]))
                scores = _where(seen, scores, -jnp.inf)
                top = jnp.maximum(scores.max(axis=1), NEVER)
                weights = jnp.exp2(scores - lax.broadcast_in_dim(top, wide, [0]))
                total = weights.sum(axis=1)
                p_smem[...] = weights.astype(jnp.bfloat16)

                plgpu.barrier_wait(v_barriers.at[slot])

                @pl.when((tile + 1) * KEYS > num_keys)
                def _():
                    # Slots that nobody has written may hold NaN, and 0 * NaN is NaN.
                    row = plgpu.broadcasted_iota(jnp.int32, (KEYS, head_dim), 0, layout=matrix) + tile * KEYS
                    v = _load(v_smem.at[slot], matrix)
                    v_smem[slot] = _where(row < num_keys, v, 0.0)

                plgpu.commit_smem()

                def values_of(acc):
                    plgpu.wgmma(acc, p_smem, v_smem.at[slot])
                    return acc[...]

                values = pl.run_scoped(values_of, plgpu.ACC((ROWS, head_dim), jnp.float32))
                pl.when(coming < stop)(lambda: fetch(v_ref, v_smem, v_barriers, coming, blocks))
                return *_merge(tuple(state), (values, top, total), spread), after

            state = (
                plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), matrix),
                plgpu.layout_cast(jnp.full((ROWS,), NEVER, jnp.float32), by_row),
                plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row),
            )
            *state, _ = lax.fori_loop(start, stop, step, (*state, pages_of(start + slots) if plan.tiles_per_cta > 1 else ahead_blocks[0]))
            return tuple(state)

        def attend():
            tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
            state = pl.run_scoped(
                stream,
                plgpu.SMEM((ROWS, head_dim), jnp.bfloat16, transforms=tiling),
                plgpu.SMEM((slots, KEYS, head_dim), jnp.bfloat16, transforms=tiling),
                plgpu.SMEM((slots, KEYS, head_dim), jnp.bfloat16, transforms=tiling),
                plgpu.SMEM((ROWS, KEYS), jnp.bfloat16, transforms=tiling),
                plgpu.Barrier(),
                plgpu.Barrier(num_barriers=slots, num_arrivals=pieces),
                plgpu.Barrier(num_barriers=slots, num_arrivals=pieces),
            )
            if single:
                write_output(state)
            else:
                write_part(state)

        def write_output(state):
            (out_ref,) = outs
            sink = None
            if sinks_ref is not None:
                head = lax.rem(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row), group)
                sink = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), by_row)
                for i in range(group):
                    sink = _where(head != i, sink, sinks_ref[kv_head * group + i])
            out = _normalise(state, sink, spread).astype(jnp.bfloat16)

            def store(smem):
                smem[...] = out
                plgpu.commit_smem()
                for i in range(plan.tile_rows):
                    row = row_tile * plan.tile_rows + i

                    @pl.when(row < plan.rows)
                    def _(i=i, row=row):
                        plgpu.copy_smem_to_gmem(smem.at[pl.ds(i * group, group)], out_ref.at[request, row, pl.ds(kv_head * group, group)])

                plgpu.wait_smem_to_gmem(0, wait_read_only=False)

            pl.run_scoped(store, plgpu.SMEM((ROWS, head_dim), jnp.bfloat16))

        def write_part(state):
            values_ref, stats_ref = outs
            values, top, total = state

            def store(values_smem, top_smem, total_smem):
                values_smem[...] = values
                top_smem[...] = top
                total_smem[...] = total
                plgpu.commit_smem()
                used = pl.ds(0, plan.packed)
                plgpu.copy_smem_to_gmem(values_smem.at[used], values_ref.at[part, request, row_tile, kv_head])
                plgpu.copy_smem_to_gmem(top_smem.at[used], stats_ref.at[part, request, row_tile, kv_head, 0])
                plgpu.copy_smem_to_gmem(total_smem.at[used], stats_ref.at[part, request, row_tile, kv_head, 1])
                plgpu.wait_smem_to_gmem(0, wait_read_only=False)

            pl.run_scoped(
                store,
                plgpu.SMEM((ROWS, head_dim), jnp.float32, transforms=(plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))),
                plgpu.SMEM((ROWS,), jnp.float32),
                plgpu.SMEM((ROWS,), jnp.float32),
            )

        if single:
            attend()
        else:
            # Nobody reads the part of a CTA without keys. Block ids are never negative: asking keeps their load ahead of the branch, beside
            # that of bounds_ref, where the compiler would put it after.
            pl.when((first_tile <= start) & (start < stop) & (ahead_blocks[0][0] >= 0))(attend)

    if single:
        out_type = (jax.ShapeDtypeStruct((plan.batch, plan.rows, plan.num_heads, head_dim), jnp.bfloat16),)
    else:
        lead = (plan.parts, plan.batch, plan.row_tiles, plan.num_kv_heads)
        out_type = (
            jax.ShapeDtypeStruct((*lead, plan.packed, head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*lead, 2, plan.packed), jnp.float32),
        )
    return plgpu.kernel(
        body,
        out_type=out_type,
        # The last axis runs fastest: neighbours in time read the KV heads of the same pages.
        grid=(plan.batch, plan.row_tiles, plan.parts, plan.num_kv_heads),
        grid_names=("request", "row_tile", "part", "kv_head"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention",
    )


def _combine(plan: Plan):
    """Kernel 2: folds the parts of 128 output values (one row of head_dim 128, two of 64), in the order that kernel 1 would have used."""
    width = 128
    rows_in = width // plan.head_dim
    chunks = -(-plan.used // rows_in)
    nested = plan.tiles_per_cta == 1
    unroll = plan.tuning.tiles_per_split if nested else 8
    strided = plgpu.Layout.WG_STRIDED((width,), vec_size=1)

    def body(values_ref, stats_ref, bounds_ref, *rest):
        sinks_ref, out_ref = rest if plan.has_sinks else (None, *rest)
        _begin(plan)
        request, row_tile = lax.axis_index("request"), lax.axis_index("row_tile")
        kv_head, chunk = lax.axis_index("kv_head"), lax.axis_index("chunk")
        here = (request, row_tile, kv_head)
        start = lax.div(bounds_ref[request, row_tile, 2 * ROWS], plan.tiles_per_cta)
        stop = lax.div(bounds_ref[request, row_tile, 2 * ROWS + 1] + (plan.tiles_per_cta - 1), plan.tiles_per_cta)
        lane = plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=strided)

        def splat(x, dtype=jnp.float32):
            return plgpu.layout_cast(jnp.full((width,), x, dtype), strided)

        def per_row(read):
            """read(row of the wgmma tile) -> a scalar; here as one value a lane."""
            row = chunk * rows_in
            if rows_in == 1:
                return splat(read(row))
            return jnp.where(lane < plan.head_dim, splat(read(row)), splat(read(row + 1)))

        def part(index):
            exists = (index >= start) & (index < stop)
            index = jnp.clip(index if plan.window is None else index - start, 0, plan.parts - 1)
            values = _load(values_ref.at[index, *here, pl.ds(chunk * width, width)], strided)
            stats = [per_row(lambda row, i=i: stats_ref[index, *here, i, row]) for i in range(2)]
            # A part that was not written holds anything, NaN too.
            return tuple(_where(exists, x, y) for x, y in zip((values, *stats), (0.0, NEVER, 0.0), strict=True))

        def fold(block, state):
            parts = [part(block * unroll + i) for i in range(unroll)]  # all loads first: their latencies overlap
            inner = (splat(0.0), splat(NEVER), splat(0.0)) if nested else state
            for one in parts:
                inner = _merge(inner, one)
            return _merge(state, inner) if nested else inner

        state = (splat(0.0), splat(NEVER), splat(0.0))
        if plan.window is None and plan.parts <= unroll:
            state = fold(0, state)  # does not wait for bounds_ref
        else:
            state = lax.fori_loop(lax.div(start, unroll), lax.div(stop + (unroll - 1), unroll), fold, state)
        sink = None
        if sinks_ref is not None:
            sink = per_row(lambda row: sinks_ref[kv_head * plan.group + lax.rem(row, plan.group)])
        out = _normalise(state, sink).astype(jnp.bfloat16)

        def place(row):
            """Where a row of the wgmma tile belongs: (row of the query, first column in [num_heads * head_dim])."""
            return row_tile * plan.tile_rows + lax.div(row, plan.group), (kv_head * plan.group + lax.rem(row, plan.group)) * plan.head_dim

        if plan.group % rows_in == 0:
            row, column = place(chunk * rows_in)

            @pl.when(row < plan.rows)
            def _():
                out_ref[request, row, pl.ds(column, width)] = out

            return

        def store(smem):
            smem[...] = out
            plgpu.commit_smem()
            for i in range(rows_in):
                row, column = place(chunk * rows_in + i)

                @pl.when((row < plan.rows) & (chunk * rows_in + i < plan.used))
                def _(i=i, row=row, column=column):
                    columns = pl.ds(column, plan.head_dim)
                    plgpu.copy_smem_to_gmem(smem.at[pl.ds(i * plan.head_dim, plan.head_dim)], out_ref.at[request, row, columns])

            plgpu.wait_smem_to_gmem(0, wait_read_only=False)

        pl.run_scoped(store, plgpu.SMEM((width,), jnp.bfloat16))

    return plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((plan.batch, plan.rows, plan.num_heads * plan.head_dim), jnp.bfloat16),),
        grid=(plan.batch, plan.row_tiles, plan.num_kv_heads, chunks),
        grid_names=("request", "row_tile", "kv_head", "chunk"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_attention_combine",
    )
