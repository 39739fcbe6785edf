"""Adaptive drafts: the number of drafts that a request's acceptance so far makes worthwhile.

The estimate is a function of the request's earlier rounds alone. So the drafts that are judged
never choose their own number, and neighbours and the clock do not either: a sampled text depends on
its prompt, parameters and seed. All of it is integer arithmetic, which the host repeats to the bit
(jaxspec.engine.draft_choice).
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

Array = TypeVar("Array", jax.Array, np.ndarray)

UNIT = 1 << 8  # of a judged draft, before it fades
FADING = 4  # each round takes 1 / 2**FADING of the earlier counts
SCALE = 1 << 10  # of the acceptance rates in `thresholds`


class Estimate(NamedTuple):
    """Fading counts of judged and of rejected drafts, in UNITs; a draft after a rejection has none.

    The fields are int32 arrays [batch], or a request's own int.
    """

    judged: jax.Array | np.ndarray | int
    rejected: jax.Array | np.ndarray | int


# A request begins as if 8 drafts had been judged, of which 6 were accepted.
PRIOR = Estimate(8 * UNIT, 2 * UNIT)


@struct.dataclass
class Acceptance:
    """The estimates of a batch, and the acceptance rates that drafts need to be worthwhile.

    estimate:   int32 [batch] each
    thresholds: int32 [batch, K] in 1 / SCALE, never falling: a request with the acceptance rate of
                column i has at least i + 1 drafts
    """

    estimate: Estimate
    thresholds: jax.Array

    @property
    def counts(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The arguments of num_worthwhile."""
        judged, rejected = self.estimate
        return judged, rejected, self.thresholds  # type: ignore[return-value]


def initial(batch: int, num_drafts: int) -> Acceptance:
    """Return the prior for idle slots; every draft is worthwhile."""
    columns = (jnp.full(batch, count, jnp.int32) for count in PRIOR)
    return Acceptance(Estimate(*columns), jnp.zeros((batch, num_drafts), jnp.int32))


def num_worthwhile(judged: Array, rejected: Array, thresholds: Array) -> Array:
    """Return the drafts that pay for themselves, int32 [batch]."""
    accepted = SCALE * (judged - rejected)
    pays = accepted[:, None] >= thresholds * judged[:, None]
    return pays.astype(np.int32).sum(axis=1, dtype=np.int32)  # type: ignore[return-value]


def fade(
    judged: Array, rejected: Array, num_drafts: Array, num_accepted: Array
) -> tuple[Array, Array]:
    """Return the counts after a round of num_drafts drafts, of which num_accepted were accepted.

    All are int32 [batch].
    """
    is_rejected = (num_accepted < num_drafts).astype(np.int32)
    return (
        judged - (judged >> FADING) + UNIT * (num_accepted + is_rejected),
        rejected - (rejected >> FADING) + UNIT * is_rejected,
    )


def observe(acceptance: Acceptance, num_drafts: jax.Array, num_sampled: jax.Array) -> Acceptance:
    """Count a round; a slot without tokens in it (num_sampled 0) keeps its estimate."""
    before: tuple[jax.Array, jax.Array] = acceptance.estimate  # type: ignore[assignment]
    after = fade(*before, num_drafts, jnp.maximum(num_sampled - 1, 0))
    kept = (jnp.where(num_sampled > 0, new, old) for new, old in zip(after, before, strict=True))
    return acceptance.replace(estimate=Estimate(*kept))  # type: ignore[attr-defined]
