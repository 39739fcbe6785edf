"""The keys that a decode step's attention kernel streams, and those that each query row sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.packing import packed_size

KEYS = 64  # keys of a tile: the left side of a wgmma
NARROW = 32  # most queries (row x head of a KV head) of a row tile


def bounds_size(rows: int, queries_per_kv: int) -> int:
    """Return how many numbers key_bounds makes for a row tile of such requests."""
    return 2 * packed_size(min(rows, NARROW // queries_per_kv) * queries_per_kv) + 4


def key_bounds(
    positions: jax.Array,
    seq_lens: jax.Array,
    window_start: jax.Array,
    *,
    queries_per_kv: int,
    max_keys: int,
) -> jax.Array:
    """Return which keys exist and which queries see them; equal in every layer.

    positions, seq_lens, window_start: as paged_attention takes them. queries_per_kv: query heads
    for each KV head. max_keys: keys that the block table can hold.

    Returns int32 [batch, row_tiles, 2 columns + 4]. Per column: its row's first key, and the key
    after its last, which is no less. Then the first tile of keys that any row sees, the tile after
    the last, and the number of keys, twice. One array saves a kernel before the first layer.
    """
    batch, rows = positions.shape
    tile_rows = min(rows, NARROW // queries_per_kv)
    row_tiles, columns = -(-rows // tile_rows), packed_size(tile_rows * queries_per_kv)
    written = jnp.minimum(seq_lens, max_keys)
    last = jnp.minimum(positions + 1, written[:, None])
    first = jnp.minimum(jnp.maximum(window_start, 0), last)
    pad = ((0, 0), (0, row_tiles * tile_rows - rows))
    shape = (batch, row_tiles, tile_rows)
    first, last = jnp.pad(first, pad).reshape(shape), jnp.pad(last, pad).reshape(shape)
    seen = first < last
    end = jnp.max(jnp.where(seen, last, 0), axis=2)
    begin = jnp.min(jnp.where(seen, first, -(-max_keys // KEYS) * KEYS), axis=2)
    everyone = jnp.broadcast_to(written[:, None], end.shape)
    # The fourth number is padding: with an odd count, the kernel's loads would be unaligned for
    # every second request.
    ranges = jnp.stack((begin // KEYS, (end + KEYS - 1) // KEYS, everyone, everyone), axis=2)
    limits = jnp.repeat(jnp.stack((first, last), axis=2), queries_per_kv, axis=3)
    limits = jnp.pad(limits, ((0, 0), (0, 0), (0, 0), (0, columns - limits.shape[3])))
    return jnp.concatenate((limits.reshape(batch, row_tiles, 2 * columns), ranges), axis=2)
