"""Pages of a block table in a tile of keys, for the kernels that stream a paged cache."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.types import Index, Ref


def unsupported(block_size: int, keys: int) -> str | None:
    """Return why tiles of `keys` keys cannot be read from such blocks, None if they can."""
    if block_size < 8 or (keys % block_size and block_size % keys):
        return f"block_size: expected 8, 16, 32 or a multiple of {keys}, got {block_size}"
    return None


def pages_of(
    table_ref: Ref, request: Index, tile: jax.Array, *, keys: int, block_size: int, pages: int
) -> tuple[jax.Array, ...]:
    """Return the block ids of a tile's pages.

    Those past the request's last page are arbitrary: their keys are masked.
    """
    pieces = max(keys // block_size, 1)
    if pieces == 1:
        return (table_ref[request, jnp.minimum(lax.div(tile * keys, block_size), pages - 1)],)
    return tuple(
        table_ref[request, jnp.minimum(tile * pieces + i, pages - 1)] for i in range(pieces)
    )
