"""The real query rows of several requests, one after another, in a pass of few rows.

A verify pass has K+1 rows for each request, of which a request with few drafts uses few. Products
and norms are by row, so they run on the real rows alone. Attention is by request: queries go to the
K+1 rows of their request, and outputs come back.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct


@struct.dataclass
class FlatRows:
    """The first `size` rows of a permutation of all rows [batch, rows]: real ones come first.

    Masked rows fill what the real ones leave. So every flat row is a row of its own.

    index: int32 [batch, rows], place of each row in the permutation; a row from place `size` on is
           masked, and takes no part in the pass
    place: int32 [size], the inverse: the number in batch * rows of each flat row
    """

    index: jax.Array
    place: jax.Array

    @classmethod
    def of(cls, num_rows: jax.Array, first: jax.Array, rows: int, size: int) -> FlatRows:
        """Put the first num_rows int32 [batch] of each request's `rows` rows into `size` flat rows.

        first: int32 [batch], place of each request's first row. The real rows' places are the
            numbers from 0 on, without gaps, and below size; size is at most batch * rows
        """
        batch = num_rows.shape[0]
        masked = rows - num_rows
        masked_before = jnp.cumsum(masked) - masked
        row = jnp.arange(rows, dtype=jnp.int32)
        index = row + jnp.where(
            row < num_rows[:, None],
            first[:, None],
            (num_rows.sum() + masked_before - num_rows)[:, None],
        )
        number = jnp.arange(batch * rows, dtype=jnp.int32)
        is_here = index.reshape(-1) == jnp.arange(size, dtype=jnp.int32)[:, None]
        return cls(index, jnp.where(is_here, number, 0).sum(axis=1, dtype=jnp.int32))

    def flatten(self, x: jax.Array) -> jax.Array:
        """Return x [batch, rows, ...] as [1, size, ...]."""
        return x.reshape(-1, *x.shape[2:])[self.place][None]

    def by_request(self, x: jax.Array) -> jax.Array:
        """Return x [1, size, ...] as [batch, rows, ...], with any content in masked rows."""
        return x[0][jnp.minimum(self.index, x.shape[1] - 1)]
