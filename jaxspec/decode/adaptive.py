"""Adaptive drafts: the number of drafts that a request's acceptance so far makes worthwhile.

The estimate is a function of the request's earlier rounds alone. So the drafts that are judged
never choose their own number, and neighbours and the clock do not either: a sampled text depends on
its prompt, parameters and seed. All of it is integer arithmetic, which the host repeats to the bit
(jaxspec.engine.draft_choice).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

Array = TypeVar("Array", jax.Array, np.ndarray)
Count = TypeVar("Count", jax.Array, np.ndarray, int)

UNIT = 1 << 8  # of a judged draft, before it fades
FADING = 4  # each round takes 1 / 2**FADING of the earlier counts
FORGETTING = 10  # each round of looked-up drafts takes 1 / 2**FORGETTING of the rejected counts
SCALE = 1 << 10  # of the acceptance rates in `thresholds` and `break_even`


class Estimate(NamedTuple, Generic[Count]):
    """Fading counts of judged and of rejected drafts, in UNITs; a draft after a rejection has none.

    The fields are int32 arrays [batch], or a request's own int.
    """

    judged: Count
    rejected: Count


# A request begins as if 8 drafts had been judged, of which 6 were accepted.
PRIOR: Estimate[int] = Estimate(8 * UNIT, 2 * UNIT)


@struct.dataclass
class Acceptance:
    """The estimates of a batch, and the acceptance rates that drafts need to be worthwhile.

    estimate:   int32 [batch] each
    thresholds: int32 [batch, K] in 1 / SCALE, never falling: a request with the acceptance rate of
                column i has at least i + 1 drafts
    break_even: int32 [batch] in 1 / SCALE: a request with a lower acceptance rate has looked-up
                drafts; None without RoundConfig.fallback
    """

    estimate: Estimate[jax.Array]
    thresholds: jax.Array
    break_even: jax.Array | None = None


def initial(batch: int, K: int, *, has_fallback: bool) -> Acceptance:
    """Return the prior for idle slots; every draft is worthwhile."""
    columns = (jnp.full(batch, count, jnp.int32) for count in PRIOR)
    return Acceptance(
        Estimate(*columns),
        jnp.zeros((batch, K), jnp.int32),
        jnp.zeros(batch, jnp.int32) if has_fallback else None,
    )


def num_worthwhile(estimate: Estimate[Array], thresholds: Array) -> Array:
    """Return the drafts that pay for themselves, int32 [batch]."""
    judged, rejected = estimate
    accepted = SCALE * (judged - rejected)
    pays = accepted[:, None] >= thresholds * judged[:, None]
    return pays.astype(np.int32).sum(axis=1, dtype=np.int32)  # type: ignore[return-value]


def falls_back(estimate: Estimate[Array], break_even: Array) -> Array:
    """Return whether the head's drafts cost more than they bring, bool [batch]."""
    judged, rejected = estimate
    return SCALE * (judged - rejected) < break_even * judged  # type: ignore[return-value]


def fade(estimate: Estimate[Array], num_proposed: Array, num_accepted: Array) -> Estimate[Array]:
    """Return the counts after a round of num_proposed drafts, num_accepted of them accepted.

    All are int32 [batch]. A round without drafts says nothing, and leaves the counts.
    """
    judged, rejected = estimate
    drafted = (num_proposed > 0).astype(np.int32)
    is_rejected = (num_accepted < num_proposed).astype(np.int32)
    return Estimate(
        judged - drafted * (judged >> FADING) + UNIT * (num_accepted + is_rejected),
        rejected - drafted * (rejected >> FADING) + UNIT * is_rejected,
    )


def forget(estimate: Estimate[Array]) -> Estimate[Array]:
    """Return the counts after a round of looked-up drafts, which say nothing of the head.

    Its rejections are forgotten little by little, until it drafts again.
    """
    judged, rejected = estimate
    is_left = (rejected > 0).astype(np.int32)
    return Estimate(judged, rejected - is_left * ((rejected >> FORGETTING) + 1))


def observe(
    acceptance: Acceptance,
    num_proposed: jax.Array,
    num_sampled: jax.Array,
    is_lookup: jax.Array | None,
) -> Acceptance:
    """Count a round; a slot without tokens in it (num_sampled 0) keeps its estimate.

    is_lookup: bool [batch], whether the drafts were looked up; None where none are
    """
    before = acceptance.estimate
    after = fade(before, num_proposed, jnp.maximum(num_sampled - 1, 0))
    if is_lookup is not None:
        pairs = zip(forget(before), after, strict=True)
        after = Estimate(*(jnp.where(is_lookup, of_text, of_head) for of_text, of_head in pairs))
    kept = (jnp.where(num_sampled > 0, new, old) for new, old in zip(after, before, strict=True))
    return replace(acceptance, estimate=Estimate(*kept))
