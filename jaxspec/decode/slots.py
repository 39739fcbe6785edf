"""The slots of a resident DecodeState: requests come, move and go while the caches stay in place.

The state always has as many slots as the batch bucket that runs, so that a round touches nothing
else. When the bucket changes, one small program moves slots. Prefill works on a state of its own
with a row per tile, a few tokens of one request. Its rows are taken from the slots, and put back
where a tile ends a prompt. In every layer all keys and values are written before attention reads.
So the tiles of one prompt see each other, and one shape serves any mixture of prompts. All programs
here are small; they compile for each batch and prefill bucket.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.decode.adaptive import Acceptance
from jaxspec.decode.packed import Packed, pack
from jaxspec.decode.state import DecodeState
from jaxspec.sampling.processors.processor import resized
from jaxspec.sampling.rows import STOPS, StateLayout, change_layout
from jaxspec.sampling.state import SamplingState


@struct.dataclass
class Admission:
    """The host's part of the state of requests that get a slot; n slots are filled together.

    next_token:     int32 [n], the last token of a request that was preempted; 0 for a new one
    num_generated:  int32 [n], tokens that a preempted request has generated; 0 for a new one
    max_tokens:     int32 [n], see DecodeState
    stop_token_ids: int32 [n, stops], padded with -1
    draft_limit:    int32 [n], see DecodeState
    sampling:       n rows of the sampling state
    acceptance:     n rows of DecodeState.acceptance; None where that is None
    """

    next_token: jax.Array
    num_generated: jax.Array
    max_tokens: jax.Array
    stop_token_ids: jax.Array
    draft_limit: jax.Array
    sampling: SamplingState
    acceptance: Acceptance | None = None


def without_caches(state: DecodeState) -> DecodeState:
    """Return the state without caches, which the small programs below need not pass through."""
    draft = None if state.draft is None else replace(state.draft, caches=())
    return replace(state, target_caches=(), draft=draft, text=None)


def with_caches(rows: DecodeState, state: DecodeState) -> DecodeState:
    """Return `rows` with the caches of `state`."""
    draft = None if rows.draft is None else replace(rows.draft, caches=state.draft.caches)
    return replace(rows, target_caches=state.target_caches, draft=draft, text=state.text)


def relaid(state: DecodeState, layout: StateLayout) -> DecodeState:
    """Return the state with the sampling arrays and the stop tokens of another layout."""
    return replace(
        state,
        stop_token_ids=resized(state.stop_token_ids, *layout.sizes[STOPS]),
        sampling=change_layout(state.sampling, layout),
    )


def admit(rows: DecodeState, slots: np.ndarray, new: Admission) -> DecodeState:
    """Fill slots of the rows, which are donated.

    slots: int32 [n], out of range where a row of the Admission holds no request
    new: NumPy arrays
    """
    return admit_packed(rows, pack((slots, new)))


def _admit(rows: DecodeState, added: Packed) -> DecodeState:
    slots, new = added.unpack()
    put = partial(_put, slots)
    return replace(
        rows,
        active=rows.active.at[slots].set(False, mode="drop"),
        next_token=put(rows.next_token, new.next_token),
        num_generated=put(rows.num_generated, new.num_generated),
        max_tokens=put(rows.max_tokens, new.max_tokens),
        stop_token_ids=put(rows.stop_token_ids, new.stop_token_ids),
        draft_limit=put(rows.draft_limit, new.draft_limit),
        sampling=jax.tree.map(put, rows.sampling, new.sampling),
        acceptance=jax.tree.map(put, rows.acceptance, new.acceptance),
        waited=None if rows.waited is None else put(rows.waited, jnp.zeros_like(slots)),
    )


def _move(rows: DecodeState, sources: jax.Array) -> DecodeState:
    moved = jax.tree.map(lambda x: x[jnp.maximum(sources, 0)], rows)
    return replace(moved, active=moved.active & (sources >= 0))


def _take(rows: DecodeState, at: jax.Array) -> DecodeState:
    taken = jax.tree.map(lambda x: x[jnp.minimum(at, x.shape[0] - 1)], rows)
    return replace(taken, active=jnp.zeros_like(taken.active))


def _put_back(rows: DecodeState, at: jax.Array, taken: DecodeState) -> DecodeState:
    return jax.tree.map(partial(_put, at), rows, taken)


def _deactivate(active: jax.Array, ended: jax.Array) -> jax.Array:
    return active & ~ended


def _put(slots: jax.Array, x: jax.Array, new: jax.Array) -> jax.Array:
    return x.at[slots].set(new, mode="drop")


# added: (slots, new) of admit.
admit_packed = jax.jit(_admit, donate_argnums=0)
# sources: int32 [slots of the new batch], -1 for an idle slot.
move = jax.jit(_move)
# at: int32 [tiles], out of range for a tile that ends no prompt: it reads an arbitrary row, and the
# result is discarded.
take = jax.jit(_take)
put_back = jax.jit(_put_back, donate_argnums=0)
# active, ended: bool [batch].
deactivate = jax.jit(_deactivate, donate_argnums=0)
