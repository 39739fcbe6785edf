"""The rows of a resident DecodeState: requests come, move and go while the caches stay where they are.

The state always has as many rows as the batch bucket that runs, so that a round touches nothing else; when the bucket changes, one small
program moves rows. Prefill works on tiles, [tiles, rows of a tile], each with the block table of its request: in every layer all keys
and values are written before attention reads, so the tiles of one prompt see each other, and one shape serves any mixture of prompts.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jaxspec import decode
from jaxspec.config import RoundConfig
from jaxspec.decode import DecodeState, Program
from jaxspec.params import Params
from jaxspec.sampling import SamplingState
from jaxspec.verify import Verification


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


def _deactivate(active: jax.Array, ended: jax.Array) -> jax.Array:
    return active & ~ended


def _put(slots: jax.Array, x: jax.Array, new: jax.Array) -> jax.Array:
    return x.at[slots].set(new, mode="drop")


admit = jax.jit(_admit, donate_argnums=0)  # slots int32 [n], out of range: nobody
move = jax.jit(_move)  # sources int32 [rows of the new batch], -1: an idle row
deactivate = jax.jit(_deactivate, donate_argnums=0)  # active, ended: bool [batch]


def prefill_tiles(
    cfg: RoundConfig,
    params: Params,
    state: DecodeState,
    slots: jax.Array,
    block_table: jax.Array,
    tokens: jax.Array,
    start: jax.Array,
    num_tokens: jax.Array,
    next_prompt_token: jax.Array,
) -> tuple[Verification, DecodeState]:
    """decode.prefill of tiles: int32 [tiles, rows] tokens of any requests, with the block table of each.

    slots: int32 [tiles], where a tile that ends a prompt puts its row; out of range for the other tiles, which change the caches only.
    The result's rows are the tiles'.
    """
    at = jnp.minimum(slots, state.active.shape[0] - 1)
    rows = jax.tree.map(lambda x: x[at], without_caches(state))
    rows = with_caches(replace(rows, active=jnp.zeros_like(rows.active)), state)
    verification, after = decode.prefill(cfg, params, rows, block_table, tokens, start, num_tokens, next_prompt_token)
    put = partial(_put, slots)
    return verification, with_caches(jax.tree.map(put, without_caches(state), without_caches(after)), after)


_prefill_tiles = Program(prefill_tiles, donate=2)


def run_prefill(cfg: RoundConfig, params: Params, state: DecodeState, *args: Any, compilation: str) -> tuple[Verification, DecodeState]:
    """One call of prefill_tiles in the given compilation mode; args as it takes them after the state."""
    if compilation == "eager":
        with jax.disable_jit():
            return prefill_tiles(cfg, params, state, *(jnp.asarray(x) for x in args))
    return _prefill_tiles(cfg, params, state, *args)
