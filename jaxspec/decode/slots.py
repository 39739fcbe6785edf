"""The slots of a resident DecodeState: requests come, move and go while the caches stay in place.

The state always has as many slots as the batch bucket that runs, so that a round touches nothing
else. When the bucket changes, one small program moves slots. A slot is inactive when a request is
admitted into it.

Prefill works on a state of its own, with a row per tile (a few tokens of one request). The host has
these rows (PromptRows), so no other program runs before a first token. Only states of logits
processors, which may be large, live in the slots: `admit` writes them, `take` reads those of the
prompts that end in a prefill call. The call returns a row for each of these prompts, which
`put_back` writes into its slot. In every layer all keys and values are written before attention
reads. So the tiles of one prompt see each other, and one shape serves any mixture of prompts. All
programs here are small; they compile for each batch, whatever the tiles of a prefill call.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jaxspec.decode.adaptive import Acceptance
from jaxspec.decode.kept_jit import KeptJit
from jaxspec.decode.packed import Packed, pack
from jaxspec.decode.state import DecodeState
from jaxspec.sampling.processors.processor import resized
from jaxspec.sampling.rows import STOPS, StateLayout, change_layout
from jaxspec.sampling.state import SamplingState

ADMISSIONS = 8  # requests whose processors' states one call of admit writes


@struct.dataclass
class PromptRows:
    """The host's part of the rows of prefill; n tiles have one each.

    The fields of DecodeState that a prompt's last tile brings into its slot, and of SamplingState
    all but the states of logits processors.

    next_token:     int32 [n], the last token of a request that was preempted; 0 for a new one
    num_generated:  int32 [n], tokens that a preempted request has generated; 0 for a new one
    max_tokens:     int32 [n], see DecodeState
    stop_token_ids: int32 [n, stops], padded with -1
    draft_limit:    int32 [n], see DecodeState
    sampling:       n rows; its processors are {}
    acceptance:     None where DecodeState.acceptance is None
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


def relaid(rows: DecodeState, layout: StateLayout) -> DecodeState:
    """Return the rows with the sampling arrays and the stop tokens of another layout."""
    return replace(
        rows,
        stop_token_ids=resized(rows.stop_token_ids, *layout.sizes[STOPS]),
        sampling=change_layout(rows.sampling, layout),
    )


def shapes_in(rows: DecodeState, layout: StateLayout, batch: int) -> DecodeState:
    """Return the shapes of the rows in a batch of another size, with the arrays of a layout."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), rows)
    return jax.eval_shape(partial(relaid, layout=layout), shapes)


_zeros = cache(jax.ShapeDtypeStruct)  # making one takes longer than finding it


def prefill_rows(state: DecodeState, new: PromptRows) -> DecodeState:
    """Return all rows of a prefill call but those of processors, for `pack`.

    new: NumPy arrays, a row per tile
    """
    (tiles,) = new.next_token.shape

    def zeros(x: jax.Array) -> Any:
        return _zeros((tiles, *x.shape[1:]), x.dtype)

    draft = None if state.draft is None else replace(state.draft, caches=())
    return DecodeState(
        seq_lens=zeros(state.seq_lens),
        next_token=new.next_token,
        active=zeros(state.active),
        num_generated=new.num_generated,
        max_tokens=new.max_tokens,
        stop_token_ids=new.stop_token_ids,
        draft_limit=new.draft_limit,
        sampling=new.sampling,
        draft=jax.tree.map(zeros, draft),
        target_caches=(),
        acceptance=new.acceptance,
        waited=None if state.waited is None else zeros(state.waited),
    )


def without_rows(state: DecodeState, processors: dict[str, Any]) -> DecodeState:
    """Return the caches of a state, with these rows of processors as its only rows."""
    rows: dict[str, Any] = dict.fromkeys(f.name for f in fields(state))
    draft: Any = state.draft
    if draft is not None:
        arrays = (f.name for f in fields(draft) if f.metadata.get("pytree_node", True))
        draft = replace(draft, **{name: None for name in arrays if name != "caches"})
    rows |= {"draft": draft, "target_caches": state.target_caches, "text": state.text}
    rows["sampling"] = SamplingState(None, None, processors)  # type: ignore[arg-type]
    return DecodeState(**rows)


def with_rows(state: DecodeState, rows: DecodeState, processors: dict[str, Any]) -> DecodeState:
    """Join the caches of without_rows and prefill_rows with the processors of spread_rows."""
    sampling = replace(rows.sampling, processors=processors)
    return with_caches(replace(rows, sampling=sampling), state)


def spread_rows(processors: dict[str, Any], ending: jax.Array, num_tiles: int) -> dict[str, Any]:
    """Return a row of processors for each tile, from those of the prompts that end.

    ending: int32 [prompts], the tile that ends each prompt, out of range where there is no prompt

    A tile that ends no prompt gets an arbitrary row, since its result is discarded.
    """
    prompts = jnp.arange(ending.shape[0], dtype=jnp.int32)
    owner = jnp.zeros(num_tiles, jnp.int32).at[ending].set(prompts, mode="drop")
    return jax.tree.map(lambda x: x[owner], processors)


def ended_rows(state: DecodeState, ending: jax.Array) -> DecodeState:
    """Return the state with the rows of the tiles that end prompts; see spread_rows.

    Where there is no prompt the row is arbitrary.
    """
    return with_caches(_take(without_caches(state), ending), state)


def admit(processors: dict[str, Any], slots: np.ndarray, new: dict[str, Any]) -> dict[str, Any]:
    """Write requests' rows of processors into their slots; the old ones are donated.

    slots: int32 [ADMISSIONS], out of range where a row of `new` holds no request
    new: NumPy arrays
    """
    return admit_packed(processors, pack((slots, new)))


def _admit(processors: dict[str, Any], added: Packed) -> dict[str, Any]:
    slots, new = added.unpack()
    return jax.tree.map(partial(_put, slots), processors, new)


def take(processors: dict[str, Any], slots: np.ndarray) -> dict[str, Any]:
    """Return the rows of processors for a prefill call; {} of none, without a launch.

    slots: int32 [prompts], out of range where no prompt ends: that row is arbitrary
    """
    return take_rows(processors, slots) if processors else {}


def _move(rows: DecodeState, sources: jax.Array) -> DecodeState:
    moved = jax.tree.map(lambda x: x[jnp.maximum(sources, 0)], rows)
    return replace(moved, active=moved.active & (sources >= 0))


def _take(rows: Any, at: jax.Array) -> Any:
    return jax.tree.map(lambda x: x[jnp.minimum(at, x.shape[0] - 1)], rows)


def _put_back(rows: DecodeState, at: jax.Array, taken: DecodeState) -> DecodeState:
    return jax.tree.map(partial(_put, at), rows, taken)


def _deactivate(active: jax.Array, ended: jax.Array) -> jax.Array:
    return active & ~ended


def _put(slots: jax.Array, x: jax.Array, new: jax.Array) -> jax.Array:
    return x.at[slots].set(new, mode="drop")


# added: (slots, new) of admit.
admit_packed = KeptJit(_admit, donate=0)
# sources: int32 [slots of the new batch], -1 for an idle slot.
move = KeptJit(_move)
take_rows = KeptJit(_take)
# at: int32 [prompts], out of range where no prompt ends: nothing is written.
put_back = KeptJit(_put_back, donate=0)
# active, ended: bool [batch].
deactivate = KeptJit(_deactivate, donate=0)
