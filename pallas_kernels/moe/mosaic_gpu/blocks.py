"""The rows of each expert in blocks: the list that the grouped products work through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

SIZES = (8, 16, 32)  # rows of a block
# A block in the plan: expert, index into SIZES, first row / 8.
SIZE_SHIFT, START_SHIFT = 10, 12


def padded_table(table: jax.Array) -> jax.Array:
    """Pad a list of chosen experts to whole units of 16 bytes, which copies move.

    The last one is repeated, which changes nothing.
    """
    return jnp.pad(table, (0, -table.size % 4), mode="edge")


def num_blocks(slots: int, count: int) -> int:
    """Return the most blocks that `slots` rows of `count` experts can need."""
    return min(slots, count) + slots // (SIZES[-1] + 1)


def num_places(slots: int, count: int) -> int:
    """Return the most rows of those blocks, padded. Each has 8, 16 or 32 rows.

    A block of 1 to 8 rows has at most 7 more, one of more than 16 has 15.
    """
    return (slots + 7 * min(slots, count) + 8 * (slots // 17)) // 8 * 8


def plan_blocks(
    ids: jax.Array, count: int, *, local: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sort the rows of ids [rows, top_k] by expert, in blocks.

    local: bool [rows, top_k], which of the ids are those of experts here; None for all. The others
        have no place, and are not below count.

    Returns:
    table:  int32 [1 + num_blocks, padded]: the number of blocks, then the expert, size and start
            of each
    place:  [rows, top_k], the place of a row's k-th expert among the sorted rows
    row_at: [num_places], the row at each place (0 where there is none)

    Sums over masks take few small kernels, where sorting and scattering take many.
    """
    chosen, most, largest = ids.reshape(-1), num_blocks(ids.size, count), SIZES[-1]
    expert, slot = jnp.arange(count), jnp.arange(ids.size)
    # Number of slots of each expert, and of those of its expert before each slot.
    of = jnp.concatenate((expert, chosen))
    until = jnp.concatenate((jnp.full(count, ids.size), slot))
    slots = ((chosen == of[:, None]) & (slot < until[:, None])).sum(1, dtype=jnp.int32)
    of_expert, earlier = slots[:count], slots[count:]
    # Shifts: XLA fuses no division into the sums that follow.
    blocks = (of_expert + largest - 1) >> (largest.bit_length() - 1)
    last = of_expert - largest * (blocks - 1)  # rows of an expert's last block
    padded = jnp.where(blocks > 0, largest * (blocks - 1) + (8 << size_index(last)), 0)
    before = expert[:, None] > expert  # [expert, those before it]
    first_block = jnp.where(before, blocks, 0).sum(1, dtype=jnp.int32)
    start = jnp.where(before, padded, 0).sum(1, dtype=jnp.int32)
    index = jnp.arange(1 + most)[:, None] - 1
    # [1 + blocks, experts]: the block's number among those of the expert, if it is one of them.
    nth = index - first_block
    size = jnp.where(nth == blocks - 1, size_index(last), len(SIZES) - 1)
    block = expert | (size << SIZE_SHIFT) | ((start + nth * largest) << (START_SHIFT - 3))
    terms = jnp.where(index < 0, blocks, jnp.where((nth >= 0) & (nth < blocks), block, 0))
    table = jnp.pad(terms.sum(1, dtype=jnp.int32), (0, -(1 + most) % 4))
    place = start[chosen] + earlier
    if local is not None:
        place = jnp.where(local.reshape(-1), place, num_places(ids.size, count))
    row = lax.div(slot, ids.shape[1])
    row_at = jnp.where(place == jnp.arange(num_places(ids.size, count))[:, None], row, 0).sum(
        1, dtype=jnp.int32
    )
    return table, place.reshape(ids.shape), row_at


def size_index(rows: jax.Array) -> jax.Array:
    """Return the index of the smallest of SIZES, which are 8 << index, that takes so many rows."""
    return (rows > SIZES[0]).astype(jnp.int32) + (rows > SIZES[1]).astype(jnp.int32)
