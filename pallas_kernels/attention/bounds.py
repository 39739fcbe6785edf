"""Which keys a decode step's attention kernel streams, and which of them each query row sees."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.packing import packed_size

KEYS = 64  # keys a tile: the left side of a wgmma
NARROW = 32  # query rows (row x head of the group) of a row tile


def bounds_size(rows: int, group: int) -> int:
    """Numbers a row tile, of requests with so many rows and heads a KV head."""
    return 2 * packed_size(min(rows, NARROW // group) * group) + 4


def key_bounds(
    positions: jax.Array, seq_lens: jax.Array, window_start: jax.Array, *, group: int, max_keys: int
) -> jax.Array:
    """What the kernel needs to know about which keys exist and who sees them; equal in every layer.

    int32 [batch, row_tiles, 2 columns + 4]: per column, its row's first key and the key after its last; first tile of keys that any row
    sees, the tile after the last, number of keys. One array: a kernel less before the first layer. group: query heads a KV head; max_keys:
    what the block table holds; positions, seq_lens and window_start as paged_attention takes them.
    """
    batch, rows = positions.shape
    tile_rows = min(rows, NARROW // group)
    row_tiles, columns = -(-rows // tile_rows), packed_size(tile_rows * group)
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
    # The fourth number is padding: a row of an odd length would leave every second request's rows unaligned for the kernel's loads.
    ranges = jnp.stack((begin // KEYS, (end + KEYS - 1) // KEYS, everyone, everyone), axis=2)
    limits = jnp.repeat(jnp.stack((first, last), axis=2), group, axis=3)
    limits = jnp.pad(limits, ((0, 0), (0, 0), (0, 0), (0, columns - limits.shape[3])))
    return jnp.concatenate((limits.reshape(batch, row_tiles, 2 * columns), ranges), axis=2)
