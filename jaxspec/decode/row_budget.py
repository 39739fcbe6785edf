"""The budget of a verify pass: which requests take part in a round, and where their rows lie.

A request takes part with all of its drafts, or it waits for the next round. While it waits, neither
its tokens nor its drafter's state advance, and its random numbers are keyed by its own length. So
the next round makes the same drafts and judges them by the same numbers: the request gets the text
that it has alone. Cutting its drafts to the room that its neighbours leave would change the text of
a sampled request.

Those that have waited for most rounds come first, so that none waits forever.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.layers.flat_rows import FlatRows


@struct.dataclass
class Share:
    """How the requests of a round share the rows of its verify pass.

    num_rows: int32 [batch], rows of each request; 0 where it is idle or waits
    waited:   int32 [batch], rounds in a row that each request has waited, this one included
    flat:     where the rows lie
    """

    num_rows: jax.Array
    waited: jax.Array
    flat: FlatRows


def share_rows(wanted: jax.Array, waited: jax.Array, rows: int, budget: int) -> Share:
    """Give requests the rows that they want, in the order of their waiting, up to a budget.

    wanted: int32 [batch], at most `rows`; 0 for an idle request
    waited: int32 [batch], rounds in a row that each request has waited
    budget: rows of the pass: at least `rows`, at most batch * rows
    """
    slot = jnp.arange(wanted.shape[0], dtype=jnp.int32)
    is_before = (waited > waited[:, None]) | ((waited == waited[:, None]) & (slot < slot[:, None]))
    first = jnp.where(is_before, wanted, 0).sum(axis=1, dtype=jnp.int32)
    fits = first + wanted <= budget
    num_rows = jnp.where(fits, wanted, 0)
    flat = FlatRows.of(num_rows, first, rows, budget)
    return Share(num_rows, jnp.where(fits | (wanted == 0), 0, waited + 1), flat)
