"""Rehearsals compile programs for later calls, on idle rows and without touching the state.

Prefill and rounds, which need the caches, are compiled for their shapes only. A later call of the
same programs compiles nothing. A Rehearsal has all that an admission will run: the small programs
of jaxspec.decode.slots too, which run on rows of zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from jaxspec.config import RoundConfig
from jaxspec.decode import programs, slots
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode.slots import PromptRows
from jaxspec.decode.state import DecodeState
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.engine.variants import PrefillShape, RoundShape, Variant
from jaxspec.layers.params import Params
from jaxspec.sampling.rows import StateLayout

Compiled = tuple[RoundShape | PrefillShape, Variant]


@dataclass(frozen=True)
class RoundRehearsal:
    """A step's rounds.

    block_tables: of idle rows
    """

    shape: RoundShape
    variant: Variant
    cfg: RoundConfig
    num_rounds: int
    block_tables: Any

    def compile(self, params: Params, state: DecodeState) -> None:
        """Compile the program for these weights and the shapes of a state."""
        rounds.compile_rounds(self.cfg, self.num_rounds, params, state, self.block_tables)


@dataclass(frozen=True)
class PrefillRehearsal:
    """A prefill call.

    slots, block_tables, chunk, rows: of idle tiles
    """

    shape: PrefillShape
    variant: Variant
    cfg: RoundConfig
    slots: np.ndarray
    block_tables: Any
    chunk: PromptChunk
    rows: PromptRows

    def taken(self, processors: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of processors that a call takes."""
        return slots.take(processors, self.slots)

    def compile(self, params: Params, state: DecodeState, processors: dict[str, Any]) -> None:
        """Compile the program for these weights and the shapes of a state.

        processors: of `taken`
        """
        programs.compile_prefill(
            self.cfg,
            params,
            slots.without_rows(state, jax.tree.map(shape_of, processors)),
            self.block_tables,
            self.chunk,
            slots.prefill_rows(state, self.rows),
        )


@dataclass(frozen=True)
class Rehearsal:
    """The programs that an admission runs, in this order.

    params: the weights of target and draft
    state: the shapes of the present state, a ShapeDtypeStruct for each array
    batches: the sizes that the batch moves through
    layout: the sampling state's after that
    processors: idle rows for slots.admit; {} without processors
    """

    params: Params
    state: DecodeState
    batches: Sequence[int]
    layout: StateLayout
    processors: dict[str, Any]
    prefills: Sequence[PrefillRehearsal]
    rounds: RoundRehearsal

    def run(self) -> list[Compiled]:
        """Compile everything, and return the programs that prefill and rounds now have."""
        rows = jax.tree.map(_zeros, slots.without_caches(self.state))
        for batch in self.batches:
            rows = slots.move(rows, np.full(batch, -1, np.int32))
        rows = slots.relaid(rows, self.layout)
        batch = rows.active.shape[0]
        if self.processors:
            at = np.full(slots.ADMISSIONS, batch, np.int32)
            processors = slots.admit(rows.sampling.processors, at, self.processors)
            rows = replace(rows, sampling=replace(rows.sampling, processors=processors))
        slots.deactivate(_zeros(shape_of(rows.active)), np.zeros(batch, bool))
        for prefill in self.prefills:
            taken = prefill.taken(rows.sampling.processors)
            prefill.compile(self.params, with_caches_of(rows, self.state), taken)
            rows = slots.put_back(rows, prefill.slots, _result(rows, taken, len(prefill.slots)))
        self.rounds.compile(self.params, with_caches_of(rows, self.state))
        return [(each.shape, each.variant) for each in (*self.prefills, self.rounds)]


def with_caches_of(rows: DecodeState, state: DecodeState) -> DecodeState:
    """Return the shapes of these rows, with the caches of a state of shapes."""
    return slots.with_caches(jax.tree.map(shape_of, rows), state)


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape of an array, with its sharding where that is fixed."""
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)


def _result(rows: DecodeState, processors: dict[str, Any], num_tiles: int) -> DecodeState:
    """Return the rows of a prefill call's result: zeros, and these of processors."""

    def zeros(x: jax.Array) -> jax.Array:
        return _zeros(shape_of(x).update(shape=(num_tiles, *x.shape[1:])))

    result = jax.tree.map(zeros, replace(rows, sampling=replace(rows.sampling, processors={})))
    return replace(result, sampling=replace(result.sampling, processors=processors))


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of this shape; np.zeros compiles nothing."""
    return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
