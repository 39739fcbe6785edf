"""The rows of a resident DecodeState: requests come, move and go while the caches stay where they are.

The state always has as many rows as the batch bucket that runs, so that a round touches nothing else; when the bucket changes, one small
program moves rows. Prefill works on a state of its own rows, one a tile (a few tokens of one request), taken from the slots and put back
where a tile ends a prompt: in every layer all keys and values are written before attention reads, so the tiles of one prompt see each
other, and one shape serves any mixture of prompts. All programs here are small; they compile for each batch and prefill bucket.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec.decode.state import DecodeState
from jaxspec.sampling.state import SamplingState


@struct.dataclass
class Admission:
    """What the host knows of requests that get a slot; arrays of as many rows as there are slots to fill.

    next_token, num_generated: of a request that goes on, its last token, and how many it has; 0 and 0 of a new one.
    max_tokens, max_drafts: int32 [rows]; stop_token_ids: int32 [rows, stops], padded with -1.
    """

    next_token: jax.Array
    num_generated: jax.Array
    max_tokens: jax.Array
    stop_token_ids: jax.Array
    max_drafts: jax.Array
    sampling: SamplingState


def without_caches(state: DecodeState) -> DecodeState:
    """The rows alone: what the small programs below take and return, so that the caches are not handed through them."""
    return replace(state, target_caches=(), draft_caches=())


def with_caches(rows: DecodeState, state: DecodeState) -> DecodeState:
    return replace(rows, target_caches=state.target_caches, draft_caches=state.draft_caches)


def _admit(rows: DecodeState, slots: jax.Array, new: Admission) -> DecodeState:
    put = partial(_put, slots)
    return replace(
        rows,
        active=rows.active.at[slots].set(False, mode="drop"),
        next_token=put(rows.next_token, new.next_token),
        num_generated=put(rows.num_generated, new.num_generated),
        max_tokens=put(rows.max_tokens, new.max_tokens),
        stop_token_ids=put(rows.stop_token_ids, new.stop_token_ids),
        max_drafts=put(rows.max_drafts, new.max_drafts),
        sampling=jax.tree.map(put, rows.sampling, new.sampling),
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


admit = jax.jit(_admit, donate_argnums=0)  # slots int32 [n], out of range: nobody
move = jax.jit(_move)  # sources int32 [rows of the new batch], -1: an idle row
take = jax.jit(
    _take
)  # at int32 [tiles], out of range for a tile that ends no prompt: it gets any row, and loses it again
put_back = jax.jit(_put_back, donate_argnums=0)
deactivate = jax.jit(_deactivate, donate_argnums=0)  # active, ended: bool [batch]
