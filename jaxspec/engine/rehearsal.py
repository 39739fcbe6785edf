"""Rehearsals compile programs for later calls, without touching the state.

Shapes are enough but for a new layout of the rows, which is tried on zeros. A later call of the
same programs compiles nothing. A Rehearsal has all that an admission will run: the small programs
of jaxspec.decode.slots too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxspec.config import RoundConfig
from jaxspec.decode import programs, slots
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode.kept_jit import KeptJit
from jaxspec.decode.packed import pack
from jaxspec.decode.slots import ADMISSIONS
from jaxspec.decode.spread import shardings
from jaxspec.decode.state import DecodeState
from jaxspec.engine.buckets import Buckets, buckets_between
from jaxspec.engine.prefill_tiles import PrefillTiles
from jaxspec.engine.program_choice import ProgramChoice
from jaxspec.engine.request_rows import RequestRows, processor_rows
from jaxspec.engine.resident_state import ResidentState
from jaxspec.engine.round_configs import RoundConfigs
from jaxspec.engine.variants import PrefillShape, RoundShape, Variant
from jaxspec.layers.params import Params
from jaxspec.sampling.rows import StateLayout, repeated

Compiled = tuple[RoundShape | PrefillShape, Variant]
Call = tuple[Any, tuple[Any, ...]]  # a jitted function, and its arguments or their shapes


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
        """Compile the program for these weights and a state of these shapes."""
        rounds.compile_rounds(self.cfg, self.num_rounds, params, state, self.block_tables)


@dataclass(frozen=True)
class PrefillRehearsal:
    """A prefill call.

    tiles: idle ones
    """

    shape: PrefillShape
    variant: Variant
    cfg: RoundConfig
    tiles: PrefillTiles

    def compile(self, params: Params, state: DecodeState) -> None:
        """Compile the program for these weights.

        state: shapes, with a row for each prompt that ends in the call
        """
        programs.compile_prefill(
            self.cfg,
            params,
            slots.without_rows(state, state.sampling.processors),
            self.tiles.block_tables,
            self.tiles.chunk,
            (slots.prefill_rows(state, self.tiles.rows), self.tiles.ending),
        )


@dataclass(frozen=True)
class SlotsRehearsal:
    """The small programs of a batch whose state has one layout.

    state: its shapes
    ended: the same, with a row for each prompt that ends in a prefill call
    processors: NumPy rows of idle requests, ADMISSIONS of them; {} without processors
    """

    state: DecodeState
    ended: DecodeState
    processors: dict[str, Any]

    def calls(self) -> Iterator[Call]:
        """Yield the calls that an admission, a prefill and the end of a request make."""
        rows, ended = slots.without_caches(self.state), slots.without_caches(self.ended)
        batch = rows.active.shape[0]
        for row in jax.tree.leaves(self.processors):
            yield repeated, (row[:1], batch)
        yield slots.deactivate, (rows.active, np.zeros(batch, bool))
        at = np.full(ended.active.shape[0], batch, np.int32)
        if self.processors:
            held = rows.sampling.processors
            added = np.full(ADMISSIONS, batch, np.int32), self.processors
            yield slots.admit_packed, (held, pack(added))
            yield slots.take_rows, (held, at)
        yield slots.put_back, (rows, at, ended)


@dataclass(frozen=True)
class Rehearsal:
    """The programs that an admission runs, in this order.

    params: the weights of target and draft
    moves: of the batches on the way, for the layout that the state has
    layout: the state's after that
    before: shapes of the state without caches, in the new batch but not yet in this layout
    small: the small programs in the new batch and layout, with the shapes of the state then
    """

    params: Params
    moves: Sequence[Call]
    layout: StateLayout
    before: DecodeState
    small: SlotsRehearsal
    prefills: Sequence[PrefillRehearsal]
    rounds: RoundRehearsal

    def run(self) -> list[Compiled]:
        """Compile everything, and return the programs that prefill and rounds now have."""
        for call in self.moves:
            compile_call(call)
        slots.relaid(jax.tree.map(_zeros, self.before), self.layout)
        for call in self.small.calls():
            compile_call(call)
        for prefill in self.prefills:
            prefill.compile(self.params, self.small.ended)
        self.rounds.compile(self.params, self.small.state)
        return [(each.shape, each.variant) for each in (*self.prefills, self.rounds)]


class Rehearsals:
    """Make the rehearsals of programs that run on the resident state."""

    def __init__(
        self,
        resident: ResidentState,
        choice: ProgramChoice,
        configs: RoundConfigs,
        buckets: Buckets,
        rows: RequestRows,
    ) -> None:
        self._resident, self._choice = resident, choice
        self._configs, self._buckets, self._rows = configs, buckets, rows

    @property
    def are_possible(self) -> bool:
        """Whether the programs are those that a Rehearsal compiles."""
        return (
            self._buckets.config.compilation == "round"
            and self._resident.round_program is rounds.run_rounds
            and self._resident.channel is None  # all processes compile together
        )

    def of_admission(
        self,
        variant: Variant,
        of_prefill: Variant,
        shape: RoundShape,
        prefills: Sequence[PrefillShape],
    ) -> Rehearsal:
        """Return the rehearsal of all programs between the state as it is and a variant's rounds.

        prefills: the shapes of its calls, of which those that are compiled are left out
        """
        resident, buckets = self._resident, self._buckets.config.batch_buckets
        assert buckets is not None
        layout, moves, at = variant.layout(resident.needed), [], resident.num_slots
        for batch in buckets_between(buckets, at, shape.batch):
            moves.append(move_call(self.rows_in(resident.layout, at), batch))
            at = batch
        return Rehearsal(
            resident.params,
            moves,
            layout,
            self.rows_in(resident.layout, at),
            self.of_slots(layout, at),
            [
                self.of_prefill(of_prefill, each)
                for each in prefills
                if not self._choice.variants.has(each, of_prefill)
            ],
            self.of_rounds(variant, shape),
        )

    def of_slots(self, layout: StateLayout, batch: int) -> SlotsRehearsal:
        """Return the rehearsal of the small programs."""
        return SlotsRehearsal(
            self.state_in(layout, batch),
            self.ended_in(layout),
            processor_rows([], layout) if layout.held else {},
        )

    def of_rounds(self, variant: Variant, shape: RoundShape) -> RoundRehearsal:
        """Return the rehearsal of a variant's rounds."""
        return RoundRehearsal(
            shape,
            variant,
            self._choice.round_config(variant, shape),
            self._resident.rounds_per_step,
            self._resident.tables.idle(shape.batch, shape.pages),
        )

    def of_prefill(self, variant: Variant, shape: PrefillShape) -> PrefillRehearsal:
        """Return the rehearsal of a variant's prefill call."""
        tiles = self.idle_tiles(shape, variant.layout(self._resident.needed))
        return PrefillRehearsal(shape, variant, self._choice.prefill_config(variant), tiles)

    def idle_tiles(self, shape: PrefillShape, layout: StateLayout) -> PrefillTiles:
        """Return the tiles of a prefill call that holds no request."""
        tables = self._resident.tables.idle(shape.tiles, shape.pages)
        rows = self._rows.of_prompts([], shape.tiles, layout)
        return PrefillTiles.idle(
            self._buckets.prefill_tile,
            self._resident.num_slots,
            self._buckets.max_ending,
            tables,
            rows,
        )

    def rows_in(self, layout: StateLayout, batch: int) -> DecodeState:
        """Return the shapes of the state without caches in a layout and a batch."""
        state, cfg = self._resident.state, self._configs.greedy
        rows = slots.shapes_in(slots.without_caches(state), layout, batch)
        if cfg.placement.mesh is not None:
            return jax.tree.map(lambda x, to: x.update(sharding=to), rows, shardings(cfg, rows))
        sharding = state.seq_lens.sharding
        return jax.tree.map(lambda x: x.update(sharding=sharding), rows)

    def state_in(self, layout: StateLayout, batch: int) -> DecodeState:
        """As rows_in, with the caches of the state."""
        caches = jax.tree.map(_shape_of, self._resident.state)
        return slots.with_caches(self.rows_in(layout, batch), caches)

    def ended_in(self, layout: StateLayout) -> DecodeState:
        """As state_in, with a row for each prompt that ends in a prefill call."""
        return self.state_in(layout, self._buckets.max_ending)


def move_call(rows: DecodeState, batch: int) -> Call:
    """Return the call that moves slots to a batch of another size.

    rows: shapes of a state without caches
    """
    return slots.move, (rows, np.full(batch, -1, np.int32))


def compile_call(call: Call) -> None:
    """Compile a jitted function for arguments of these shapes."""
    function, args = call
    if isinstance(function, KeptJit):
        function.compile(*args)
    else:
        function.lower(*args).compile()


def different(calls: Iterator[Call]) -> Iterator[Call]:
    """Yield each program once."""
    seen = set()
    for function, args in calls:
        leaves, structure = jax.tree.flatten(args)
        key = (function, structure, *(getattr(x, "shape", x) for x in leaves))
        key = (*key, *(getattr(x, "dtype", None) for x in leaves))
        if key not in seen:
            seen.add(key)
            yield function, args


def _shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Return the shape of an array, with its sharding where that is fixed."""
    sharding = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding, weak_type=x.weak_type)


def _zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
    """Return an array of this shape; np.zeros compiles nothing."""
    return jax.device_put(np.zeros(x.shape, x.dtype), x.sharding)
