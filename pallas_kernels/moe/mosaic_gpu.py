"""The experts of a decode step on Hopper: each expert that some row chose is read once, streamed through shared memory.

Two launches of one kernel, gate and up with the activation, then down; it is the product of pallas_kernels.matmul (TMA ring, wgmma on
W^T x^T, whose narrow axis is the rows) over a list of blocks: an expert with up to 32 of its rows. A CTA takes (block, 64 columns) items in
turn, and its ring runs on from one into the next, so that neither the number of experts hit nor their sizes leave it idle.

Up to FEW_ROWS rows every block takes all rows: nothing is sorted, and the list is made by each CTA from the chosen ids. Of more rows XLA
gathers each expert's, padded to 8, 16 or 32. An expert with more than 32 rows has several blocks, next to each other in time: the second
one finds the weights in the L2 cache.

One accumulator runs through the whole depth, and a row's experts are summed in the order of its ids: its bits depend on nothing else.
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
from pallas_kernels.moe import MAX_ROWS
from pallas_kernels.moe.reference import activated

MAX_EXPERTS = 1024
FEW_ROWS = 8
SIZES = (8, 16, 32)  # rows of a block
MAX_SMEM = 227 * 1024
NUM_SMS = 132
TILE_N = 64  # output columns of an item: wgmma's M
WORD = 32  # experts that a word of flags holds
# A block in the plan: expert, index into SIZES, first row / 8.
SIZE_SHIFT, START_SHIFT = 10, 12


@dataclass(frozen=True)
class Tuning:
    """tile_k depth a step (a multiple of 64), stages (at least 2) of the ring, most CTAs at once (one or two an SM).

    None of them moves a bit of the result. pdl: programmatic dependent launch, which CUDA graphs ignore and the interpreter does not know.
    """

    tile_k: int = 64
    stages: int = 4
    ctas: int = NUM_SMS
    pdl: bool = True


def smem_bytes(tuning: Tuning, products: int, few: bool) -> int:
    """Shared memory of a CTA, to within the barriers and the plan."""
    sizes = SIZES[:1] if few else SIZES
    return (
        tuning.stages * tuning.tile_k * 2 * (products * TILE_N + sizes[-1])
        + sum(sizes) * TILE_N * 2
        + 4096
    )


def choose_tuning(depth: int, products: int, few: bool, ctas_an_sm: int = 1) -> Tuning | None:
    """The deepest steps of which four stages fit, as many stages as fit; None if nothing does."""
    for fewest in (4, 2):
        for tile_k in (256, 192, 128, 64):
            if depth % tile_k:
                continue
            for stages in range(12, fewest - 1, -1):
                tuning = Tuning(tile_k, stages, NUM_SMS * ctas_an_sm)
                if smem_bytes(tuning, products, few) <= MAX_SMEM // ctas_an_sm:
                    return tuning
    return None


def unsupported(rows: int, top_k: int, gate_up: Any, down: Any, dtype: Any) -> str | None:
    """Why the kernel cannot run, None if it can. gate_up and down: anything with a shape and a dtype."""
    count, size, depth = down.shape
    if any(d != jnp.bfloat16 for d in (dtype, gate_up.dtype, down.dtype)):
        return f"expected bfloat16 operands, got {jnp.dtype(dtype).name}, {gate_up.dtype} and {down.dtype}"
    if not 1 <= rows <= MAX_ROWS:
        return f"expected 1 to {MAX_ROWS} rows, got {rows}"
    if not 1 <= top_k <= count <= MAX_EXPERTS:
        return f"expected at most {MAX_EXPERTS} experts, and a row to choose 1 up to all of them, got {top_k} of {count}"
    if depth % 64 or size % 64:
        return f"expected a hidden and an intermediate size that are multiples of 64, got {depth} and {size}"
    return None


# Compiled as a function of its own, so that a model's layers share the kernels instead of lowering one each.
@partial(jax.jit, static_argnames=("gate", "alpha", "limit", "tunings"))
def experts(
    x: jax.Array,
    ids: jax.Array,
    weights: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    gate: str = "silu",
    alpha: float = 1.702,
    limit: float = 7.0,
    tunings: tuple[Tuning, Tuning] | None = None,
) -> jax.Array:
    """See pallas_kernels.moe.experts."""
    (rows, depth), top_k, count, columns = x.shape, weights.shape[1], down.shape[0], ids.shape[1]
    few = rows <= FEW_ROWS
    if few:
        table, place, gathered = (
            _padded(ids.reshape(-1)),
            ids * FEW_ROWS + jnp.arange(rows)[:, None],
            x,
        )
    else:
        table, place, row_at = plan_blocks(ids[:, :top_k], count)
        gathered = x[row_at]
    shared: dict[str, Any] = {"few": few, "ids_shape": (rows, top_k), "columns": columns}
    first, second = tunings or (None, None)
    inner = _grouped(
        gathered,
        table,
        gate_up,
        gate_up_bias,
        activation=(gate, alpha, limit),
        tuning=first,
        **shared,
    )
    out = _grouped(inner, table, down, down_bias, activation=None, tuning=second, **shared)
    total = jnp.zeros((rows, depth), jnp.float32)
    for k in range(top_k):  # written out: one order of summation, one kernel
        total += weights[:, k, None] * out[place[:, k]].astype(jnp.float32)
    return total.astype(x.dtype)


def _padded(table: jax.Array) -> jax.Array:
    """To whole units of 16 bytes, which copies move; by what changes nothing in a list of chosen experts."""
    return jnp.pad(table, (0, -table.size % 4), mode="edge")


def num_blocks(slots: int, count: int) -> int:
    """At most so many blocks have `slots` rows of `count` experts."""
    return min(slots, count) + slots // (SIZES[-1] + 1)


def num_places(slots: int, count: int) -> int:
    """At most so many rows have those blocks, padded: a block of 1 to 8 has 7 more at most, one of more than 16 has 15."""
    return slots + 7 * min(slots, count) + 8 * (slots // 17)


def plan_blocks(ids: jax.Array, count: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The rows of ids [rows, top_k] sorted by expert, in blocks.

    Returns the table int32 [1 + num_blocks, padded]: how many blocks there are, then each one's expert, size and start; place [rows, top_k]
    of a row's k-th expert among the sorted rows, and row_at [num_places], the row at each place (0 where there is none). Sums over masks:
    few small kernels, where sorting and scattering take many.
    """
    chosen, most, largest = ids.reshape(-1), num_blocks(ids.size, count), SIZES[-1]
    expert, slot = jnp.arange(count), jnp.arange(ids.size)
    # Slots of each expert, and before each slot those of its expert.
    of, until = (
        jnp.concatenate((expert, chosen)),
        jnp.concatenate((jnp.full(count, ids.size), slot)),
    )
    slots = ((chosen == of[:, None]) & (slot < until[:, None])).sum(1, dtype=jnp.int32)
    of_expert, earlier = slots[:count], slots[count:]
    blocks = (of_expert + largest - 1) >> (
        largest.bit_length() - 1
    )  # shifts: XLA fuses no division into the sums that follow
    last = of_expert - largest * (blocks - 1)  # rows of an expert's last block
    padded = jnp.where(blocks > 0, largest * (blocks - 1) + (8 << size_index(last)), 0)
    before = expert[:, None] > expert  # [expert, those before it]
    first_block = jnp.where(before, blocks, 0).sum(1, dtype=jnp.int32)
    start = jnp.where(before, padded, 0).sum(1, dtype=jnp.int32)
    index = jnp.arange(1 + most)[:, None] - 1
    nth = (
        index - first_block
    )  # [1 + blocks, experts]: which of the expert's blocks this is, if it is one of them
    size = jnp.where(nth == blocks - 1, size_index(last), len(SIZES) - 1)
    block = expert | (size << SIZE_SHIFT) | ((start + nth * largest) << (START_SHIFT - 3))
    terms = jnp.where(index < 0, blocks, jnp.where((nth >= 0) & (nth < blocks), block, 0))
    table = jnp.pad(terms.sum(1, dtype=jnp.int32), (0, -(1 + most) % 4))
    place = start[chosen] + earlier
    row = lax.div(slot, ids.shape[1])
    row_at = jnp.where(place == jnp.arange(num_places(ids.size, count))[:, None], row, 0).sum(
        1, dtype=jnp.int32
    )
    return table, place.reshape(ids.shape), row_at


def size_index(rows: jax.Array) -> jax.Array:
    """Index of the smallest of SIZES, which are 8 << index, that takes so many rows."""
    return (rows > SIZES[0]).astype(jnp.int32) + (rows > SIZES[1]).astype(jnp.int32)


def _grouped(
    x: jax.Array,
    table: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    *,
    few: bool,
    ids_shape: tuple[int, int],
    columns: int,
    activation: tuple[str, float, float] | None,
    tuning: Tuning | None,
) -> jax.Array:
    """Each block's rows of x by its expert's weight [experts, depth, width]; with an activation the halves of the width are gate and up.

    few: table holds the chosen ids, of ids_shape in `columns` columns, and x the rows (with an activation) or 8 rows of each expert.
    Otherwise x's rows are sorted and table is plan_blocks'. What no block owns of the result is not written.
    """
    count, depth, width = weight.shape
    products = 2 if activation else 1
    width //= products
    tuning = tuning or choose_tuning(depth, products, few)
    assert tuning is not None  # two stages of the least steps always fit
    tile_k, stages = tuning.tile_k, tuning.stages
    sizes = SIZES[:1] if few else SIZES
    tiles, steps = width // TILE_N, depth // tile_k
    slots, top_k = ids_shape[0] * ids_shape[1], ids_shape[1]
    most = min(slots, count) if few else num_blocks(slots, count)
    assert stages > 1 and steps * tile_k == depth, (depth, tuning)
    ctas = min(tuning.ctas, most * tiles)
    all_rows = few and activation is not None
    pdl = tuning.pdl and not interpreting()
    layout = plgpu.Layout.WGMMA
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(*refs: Any) -> None:
        x_gmem, table_gmem, w_gmem, *rest = refs
        bias_gmem, rest = (rest[0], rest[1:]) if bias is not None else (None, rest)
        out_gmem, x_smem, w_smem, table_smem, *rest = rest
        list_smem, rest = (rest[0], rest[1:]) if few else (None, rest)
        *out_smems, barrier, table_barrier = rest
        cta = lax.axis_index("cta")
        if pdl and activation is not None:
            plgpu.griddepcontrol_wait()
        # Down reads the table before it waits: what wrote it was done before gate and up, which did wait, let this kernel come.
        plgpu.copy_gmem_to_smem(table_gmem, table_smem, table_barrier)
        plgpu.barrier_wait(table_barrier)
        found = list_experts(table_smem, list_smem) if few else table_smem[0]

        def block_of(item: Any) -> tuple[Any, Any, Any, Any, Any]:
            """Expert, first row in x and in the result, index of the size, first column."""
            index = lax.div(item, tiles)
            column = (item - index * tiles) * TILE_N
            if few:
                expert = list_smem[index]  # pyright: ignore[reportOptionalSubscript]
                return (
                    expert,
                    0 * expert if all_rows else expert * FEW_ROWS,
                    expert * FEW_ROWS,
                    jnp.int32(0),
                    column,
                )
            packed = table_smem[index + 1]
            start = pl.multiple_of((packed >> START_SHIFT) * 8, 8)
            return (
                packed & ((1 << SIZE_SHIFT) - 1),
                start,
                start,
                (packed >> SIZE_SHIFT) & 3,
                column,
            )

        items_here = lax.div(found * tiles - cta + (ctas - 1), ctas)
        turns = items_here * steps

        # Turns count the steps through all items of a CTA.
        def place(turn: Any) -> tuple[Any, Any, Any]:
            index = lax.div(turn, steps)
            return (
                cta + index * ctas,
                pl.ds((turn - index * steps) * tile_k, tile_k),
                lax.rem(turn, stages),
            )

        def load_weights(turn: Any) -> None:
            item, depths, slot = place(turn)
            expert, _, _, _, column = block_of(item)
            for product in range(products):
                source = w_gmem.at[expert, depths, pl.ds(product * width + column, TILE_N)]
                plgpu.copy_gmem_to_smem(source, w_smem.at[slot, product], barrier.at[slot])

        def load_x(turn: Any) -> None:
            item, depths, slot = place(turn)
            _, start, _, size, _ = block_of(item)
            for i, rows in enumerate(sizes):

                def copy(rows: int = rows) -> None:
                    source = x_gmem.at[pl.ds(start, rows), depths]
                    plgpu.copy_gmem_to_smem(
                        source, x_smem.at[slot, pl.ds(0, rows)], barrier.at[slot]
                    )

                copy() if few else pl.when(size == i)(copy)

        for turn in range(stages):
            pl.when(turn < turns)(lambda turn=turn: load_weights(jnp.int32(turn)))
        if pdl and activation is None:
            plgpu.griddepcontrol_wait()
        for turn in range(stages):
            pl.when(turn < turns)(lambda turn=turn: load_x(jnp.int32(turn)))

        def multiply(index: Any, rows: int, out_smem: Any) -> None:
            expert, _, start, _, column = block_of(cta + index * ctas)
            biases = []
            if bias_gmem is not None:  # asked for now, used after the last step
                for product in range(products):
                    source = bias_gmem.at[expert, pl.ds(product * width + column, TILE_N)]
                    biases.append(plgpu.load(source, layout=layout.reduce(1), optimized=False))  # pyright: ignore[reportCallIssue]

            def accumulate(*accumulators: Any) -> Any:
                @pl.loop(0, steps)
                def _step(step: Any) -> None:
                    turn = step + index * steps
                    slot = lax.rem(turn, stages)
                    plgpu.barrier_wait(barrier.at[slot])
                    x_tile = x_smem.at[slot, pl.ds(0, rows)].transpose((1, 0))
                    for product, acc in enumerate(accumulators):
                        plgpu.wgmma(acc, w_smem.at[slot, product].transpose((1, 0)), x_tile)
                    plgpu.wgmma_wait(
                        products
                    )  # the step before is done: its slot takes a later turn

                    @pl.when((turn > 0) & (turn - 1 + stages < turns))
                    def _refill() -> None:
                        load_weights(turn - 1 + stages)
                        load_x(turn - 1 + stages)

                    if pdl:
                        # Not before the last copy is on its way: the next kernel's CTAs would compete with this one's.
                        pl.when(turn == jnp.maximum(turns - stages, 0))(
                            plgpu.griddepcontrol_launch_dependents
                        )

                return tuple(acc[...] for acc in accumulators)

            totals = list(
                pl.run_scoped(accumulate, *[plgpu.ACC((TILE_N, rows), jnp.float32)] * products)
            )
            for product, vector in enumerate(biases):
                totals[product] += lax.broadcast_in_dim(
                    vector.astype(jnp.float32), (TILE_N, rows), (0,)
                )
            totals = [total.astype(x.dtype) for total in totals]
            if activation is not None:
                kind, alpha, limit = activation
                gate, up = (total.astype(jnp.float32) for total in totals)
                totals = [activated(gate, up, kind, alpha=alpha, limit=limit).astype(x.dtype)]
            plgpu.wait_smem_to_gmem(0)  # the item before has left out_smem
            out_smem.transpose((1, 0))[...] = totals[0]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                out_smem, out_gmem.at[pl.ds(start, rows), pl.ds(column, TILE_N)]
            )

        @pl.loop(0, items_here)
        def _item(index: Any) -> None:
            for i, rows in enumerate(sizes):
                take = partial(multiply, index, rows, out_smems[i])
                take() if few else pl.when(block_of(cta + index * ctas)[3] == i)(take)

        plgpu.wait_smem_to_gmem(0)

    def list_experts(table_smem: Any, list_smem: Any) -> Any:
        """The different ones of the table's ids into list_smem; how many. Every thread does the same, and reads what it has written."""
        chosen = [
            table_smem[row * columns + k] for row in range(ids_shape[0]) for k in range(top_k)
        ]
        found, seen = jnp.int32(0), [jnp.int32(0)] * -(-count // WORD)
        for expert in chosen:
            bit, word = jnp.int32(1) << (expert & (WORD - 1)), lax.shift_right_logical(expert, 5)
            mine = sum((jnp.where(word == i, bits, 0) for i, bits in enumerate(seen)), jnp.int32(0))
            new = (mine & bit) == 0

            @pl.when(new)
            def _note(found: Any = found, expert: Any = expert) -> None:
                list_smem[found] = expert

            found += new.astype(jnp.int32)
            seen = [jnp.where(word == i, bits | bit, bits) for i, bits in enumerate(seen)]
        return found

    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((FEW_ROWS * count if few else x.shape[0], width), x.dtype),
        grid=(ctas,),
        grid_names=("cta",),
        kernel_name=f"experts_{depth}x{width}" + ("_gated" if activation else ""),
        scratch_types=[
            plgpu.SMEM((stages, sizes[-1], tile_k), x.dtype, transforms=transforms),
            plgpu.SMEM((stages, products, tile_k, TILE_N), x.dtype, transforms=transforms),
            plgpu.SMEM(table.shape, jnp.int32),
            *([plgpu.SMEM((slots,), jnp.int32)] if few else []),
            *[plgpu.SMEM((rows, TILE_N), x.dtype) for rows in sizes],
            plgpu.Barrier(num_barriers=stages, num_arrivals=products + 1),
            plgpu.Barrier(),
        ],
    )
    return call(x, table, weight, *(() if bias is None else (bias,)))
