"""The device's side of the engine: the resident state, and the program for each batch.

Everything here dispatches and returns at once; nothing waits for the device. Shapes come from few
buckets: rows of the batch, and those of jaxspec.engine.buckets.
"""

from __future__ import annotations

import itertools
import logging
import traceback
from collections.abc import (
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.cache.arrays import resolve_cache_dtype, resolve_draft_cache_dtype
from jaxspec.config import (
    ConfigError,
    DraftConfig,
    EngineConfig,
    Ops,
    RoundConfig,
    SamplingFeatures,
    SpeculativeConfig,
    TargetConfig,
)
from jaxspec.decode import mailboxes, programs, slots
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode import state as decode_state
from jaxspec.decode.several_rounds import RoundProgram
from jaxspec.decode.slots import ADMISSIONS, PromptRows
from jaxspec.decode.spread import everywhere, shardings, spread
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.engine.background import Background, side_by_side
from jaxspec.engine.block_tables import BlockTables
from jaxspec.engine.buckets import Buckets, Shapes
from jaxspec.engine.draft_choice import compiled_numbers, rows_of
from jaxspec.engine.memory import CacheMemory
from jaxspec.engine.prefill_tiles import PrefillTiles
from jaxspec.engine.progress import report_nothing
from jaxspec.engine.rehearsal import (
    Call,
    Compiled,
    PrefillRehearsal,
    Rehearsal,
    RoundRehearsal,
    SlotsRehearsal,
    compile_call,
    different,
    move_call,
    shape_of,
)
from jaxspec.engine.request import Request
from jaxspec.engine.round_configs import GREEDY, ConfigKey, RoundConfigs
from jaxspec.engine.scheduler import Chunk
from jaxspec.engine.variants import (
    PREFILL_LEVELS,
    ROUND_LEVELS,
    SAMPLED,
    TRUNCATED,
    PrefillShape,
    RoundShape,
    Variant,
    Variants,
    Warmed,
    full_variant,
    is_shared,
    level_for,
    prefill_sizes,
)
from jaxspec.layers.params import Params
from jaxspec.loading import executables
from jaxspec.parallel.layout import ONE_PLACE, Placement, bytes_on_device
from jaxspec.parallel.processes import Channel, ProcessError, end_process
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary
from jaxspec.sampling.rows import STOPS, StateLayout, features_of, sampling_rows
from pallas_kernels import lowered_once
from pallas_kernels.lowering_workers import lowering_workers

logger = logging.getLogger(__name__)

# Rounds that a mixture of features runs in a program with more of them, before its own is compiled.
EXACT_AFTER = 256
# The methods of ModelRunner that use the devices. Their arguments are plain data.
FOLLOWED = (
    "_begin",
    "_compile_begin",
    "_drop_state",
    "_change_layout",
    "_write_rows",
    "move",
    "_deactivate",
    "_prefill",
    "_round",
)
OUT_OF_MEMORY = (MemoryError, jax.errors.JaxRuntimeError)  # of the host, of the device


@dataclass(eq=False)
class Serving:
    """A program that serves batches of one kind, looked up once.

    cfg: its static description
    layout: the state that it runs on
    is_exact: whether it computes just what its requests need
    note: notes that the program is compiled; None once that is done
    num_rounds: steps that it has run
    """

    cfg: RoundConfig
    layout: StateLayout
    is_exact: bool
    note: Callable[[], None] | None
    num_rounds: int = 0

    def noted(self) -> None:
        """Note that the program is compiled, after its first run."""
        if self.note is not None:
            self.note()
            self.note = None


class ModelRunner:
    """Target, draft, and the state of the requests that run.

    Each program consumes `state` (donated) and returns its successor.

    configs: the static description of each program
    memory: sizes of the KV cache
    round_program: runs a step's rounds. A tool that records them puts a program of its own there,
        which may return a Verification with more fields.
    on_compiled: called in warm-up with the number of programs that are compiled, and of all
    """

    def __init__(
        self,
        target_config: TargetConfig,
        draft_config: DraftConfig | None,
        params: Params,
        speculative: SpeculativeConfig | None,
        config: EngineConfig,
        *,
        ops: Ops,
        dtype: DTypeLike,
        placement: Placement = ONE_PLACE,
        acceptance_rates: tuple[float, ...] | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.params, self.speculative, self.config = params, speculative, config
        self.dtype = jnp.dtype(dtype)
        self.cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype)
        of_draft = resolve_draft_cache_dtype(speculative, config.kv_cache_dtype, dtype)
        self.eos_token_ids = eos_token_ids
        self.num_speculative_tokens = speculative.max_k if speculative else 0
        self.adapts = speculative is not None and speculative.adapts
        self.on_gpu = jax.default_backend() == "gpu"
        self.prefill_tile = ops.prefill_tile
        self.round_program: RoundProgram = rounds.run_rounds
        self.on_compiled: Callable[[int, int], object] = report_nothing
        self.buckets = Buckets(config, self.prefill_tile, self.on_gpu)
        self.weight_bytes = bytes_on_device(params["target"])
        self.rounds_per_step = rounds.rounds_per_step(
            config, on_gpu=self.on_gpu, weight_bytes=self.weight_bytes
        )
        self.configs = RoundConfigs(
            target_config,
            draft_config,
            speculative,
            config,
            ops=ops,
            placement=placement,
            weight_bytes=self.weight_bytes,
            draft_cache_dtype=None if of_draft == self.cache_dtype else of_draft.name,
            acceptance_rates=acceptance_rates,
        )
        self.memory = CacheMemory(
            self.configs,
            config,
            self.buckets,
            dtype=self.dtype,
            cache_dtype=self.cache_dtype,
            rounds_per_step=self.rounds_per_step,
        )
        self.tables = BlockTables(
            len(self.configs.cache_groups),
            self.buckets.max_pages,
            everywhere(self.configs.greedy),
        )
        vocabulary = Vocabulary(target_config.vocab_size, eos_token_ids)
        self._needed = StateLayout(vocabulary).fit(GREEDY)  # by the requests that run
        self._layout = self._needed  # of the state
        self._state: DecodeState | None = None
        self._failures_seen = 0  # of the devices' mailboxes, when the state was made
        self._variants = Variants()
        self._variants_of = self.configs.version
        self._is_warm = False  # every request is served, so nothing is compiled to be faster
        self._relays: dict[Hashable, Callable[[DecodeState], DecodeState]] = {}
        self._rounds_served: dict[Any, Serving] = {}
        self._prefills_served: dict[Any, Serving] = {}
        self._prefill_shapes: dict[Any, PrefillShape] = {}
        self._background: Background[list[Compiled]] = Background()
        # The job of each request that waits for one, and the error of each whose job has failed.
        self._waits_for: MutableMapping[Request, Hashable] = WeakKeyDictionary()
        self._uncompilable: set[Hashable] = set()
        self._failed: MutableMapping[Request, Exception] = WeakKeyDictionary()
        self.channel = Channel() if placement.spans_processes else None
        if self.channel is not None and self.channel.leads:
            for name in FOLLOWED:
                setattr(self, name, self._led(self.channel, name))

    # --- several processes -----------------------------------------------------------------------

    def _led(self, channel: Channel, name: str) -> Callable[..., Any]:
        """Return a method that the followers run too, with the same arguments."""
        method = getattr(self, name)

        def run(*args: Any) -> Any:
            if name not in ("_begin", "_drop_state"):
                _ = self.state  # the followers need one first
            sent = [self.configs.key_of(a) if isinstance(a, RoundConfig) else a for a in args]
            try:
                channel.tell((name, sent))
                return method(*args)
            except ProcessError:
                raise
            except BaseException as e:  # they may have launched what is not launched here
                reason = (str(e).splitlines() or [""])[0]
                channel.close(f"{type(e).__name__}: {reason:.300}")
                if not isinstance(e, Exception):
                    raise
                raise ProcessError(
                    f"processes: expected {name.strip('_')} to run on all, "
                    f"got {type(e).__name__}: {reason:.300}"
                ) from e

        return run

    def follow(self) -> None:
        """Run what the leading process runs, until it closes the channel."""
        assert self.channel is not None and not self.channel.leads
        try:
            while (message := self.channel.receive()) is not None:
                name, sent = message
                assert name in FOLLOWED, name
                getattr(self, name)(
                    *(self.configs.at(a) if isinstance(a, ConfigKey) else a for a in sent)
                )
        except ProcessError:
            raise
        except BaseException:  # the leader waits for this process, which an exit would not end
            traceback.print_exc()
            end_process(f"processes: process {jax.process_index()} failed; it ends")

    # --- the state -------------------------------------------------------------------------------

    @property
    def state(self) -> DecodeState:
        """The resident state; the first use makes it, idle and with empty caches."""
        if self._state is None:
            self._begin(self._needed.fit(GREEDY), self.memory.num_blocks)
        assert self._state is not None
        return self._state

    def _begin(self, layout: StateLayout, num_blocks: tuple[int, ...]) -> None:
        """Make the state, idle and with empty caches of so many blocks."""
        self._layout = layout
        cfg, batch, stops = self._first_state(layout)
        self._failures_seen = mailboxes.num_failures(cfg)
        state = _init_state(cfg, batch, stops, **self._caches(num_blocks))
        self._state = jax.tree.map(_committed, state)
        self.tables.reset(batch)

    def _compile_begin(self, layout: StateLayout, num_blocks: tuple[int, ...]) -> None:
        """Compile what the next _begin runs."""
        _init_state.lower(*self._first_state(layout), **self._caches(num_blocks)).compile()

    def _first_state(self, layout: StateLayout) -> tuple[RoundConfig, int, int]:
        """The config, slots and stop tokens of the state that the first use makes."""
        assert self.config.batch_buckets is not None
        (stops,) = layout.sizes[STOPS]
        return self.configs.greedy, self.config.batch_buckets[0], stops

    def _caches(self, num_blocks: tuple[int, ...]) -> dict[str, Any]:
        """The keywords of _init_state."""
        return {
            "num_blocks": num_blocks,
            "dtype": self.dtype.name,
            "cache_dtype": self.cache_dtype.name,
        }

    def check_room(self) -> None:
        """Raise ConfigError for sizes that exceed the whole memory; allocate nothing."""
        cfg, _, stops = self._first_state(self._needed.fit(GREEDY))
        one_block = self._caches((1,) * len(self.configs.cache_groups))
        slot = jax.eval_shape(partial(_init_state, cfg, 1, stops, **one_block))
        rows = jax.tree.leaves(slots.without_caches(slot))
        self.memory.check_room(sum(x.size * x.dtype.itemsize for x in rows))

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    def set_state(self, state: DecodeState) -> None:
        """Go on with a state made elsewhere, whose sampling rows hold no logits processor."""
        self._failures_seen = mailboxes.num_failures(self.configs.greedy)
        self._state = jax.tree.map(_committed, state)
        self._layout = self._layout.hold(GREEDY).with_stops(state.stop_token_ids.shape[1])
        self._set_needed(self._layout)
        self.tables.reset(state.active.shape[0])

    def take_state(self) -> DecodeState:
        """Return the state and forget it, caches included; the next use makes a new one."""
        state, self._state = self._state, None
        assert state is not None, "expected a state, got none: nothing has run"
        return state

    def forget(self) -> None:
        """Drop the state, caches included."""
        if self.channel is None or self.channel.is_open:
            self._drop_state()

    def _drop_state(self) -> None:
        self._state = None

    @property
    def num_slots(self) -> int:
        """Slots of the batch that runs."""
        return self.state.active.shape[0]

    def _set_rows(self, rows: DecodeState) -> None:
        self.state = slots.with_caches(rows, self.state)

    def move(self, sources: Sequence[int]) -> None:
        """Make slot i of the new batch slot sources[i] of the old one, an idle slot for -1.

        Slots move from bucket to next bucket, so that few programs compile.
        """
        buckets = self.config.batch_buckets
        assert buckets is not None
        wanted = np.asarray(sources, np.int32)
        for size in _path(buckets, self.num_slots, len(sources)):
            rows = np.full(size, -1, np.int32)
            count = min(len(wanted), len(rows))
            rows[:count] = wanted[:count]
            self._set_rows(slots.move(slots.without_caches(self.state), rows))
            wanted = np.arange(len(wanted), dtype=np.int32)
            wanted[len(rows) :] = -1
        self.tables.reset(len(sources))

    def deactivate(self, cleared: Sequence[int]) -> None:
        """Stop these slots from generating."""
        if cleared:
            self._deactivate(list(cleared))

    def _deactivate(self, cleared: list[int]) -> None:
        ended = np.zeros(self.num_slots, bool)
        ended[cleared] = True
        self.state = replace(self.state, active=slots.deactivate(self.state.active, ended))

    def admit(
        self, added: Sequence[Request], running: Sequence[Request]
    ) -> dict[Request, ConfigError]:
        """Make room for added requests, and write the states of their processors into their slots.

        running: all that run, the added ones included

        Returns the added requests that there is no memory for, each with its error. Their slots
        hold no such states, and the state has no room for them.
        """
        try:
            self._admit_into(added, running)
        except OUT_OF_MEMORY as e:
            self._raise_unless_memory(e)
        else:
            return {}
        failed: dict[Request, ConfigError] = {}
        kept = [request for request in running if request not in added]
        for request in added:
            try:
                self._admit_into([request], [*kept, request])
                kept.append(request)
            except OUT_OF_MEMORY as e:
                self._raise_unless_memory(e)
                failed[request] = _no_memory(request.params, e)
        return failed

    def check_devices(self) -> None:
        """Raise JaxRuntimeError if a device has not answered another one."""
        cfg = self.configs.greedy
        if (reason := mailboxes.silent_rank(cfg, self._failures_seen)) is not None:
            raise jax.errors.JaxRuntimeError(f"tensor_parallel_size {cfg.placement.size}: {reason}")

    def _raise_unless_memory(self, error: Exception) -> None:
        """Raise an error other than a lack of memory, and any that has taken the state along."""
        is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        lost = self._state is None or any(x.is_deleted() for x in jax.tree.leaves(self._state))
        if lost or not is_memory:
            raise error

    def _admit_into(self, added: Sequence[Request], running: Sequence[Request]) -> None:
        params = [request.params for request in running]
        features, before = features_of(params), self._needed
        self._set_needed(before.fit(features, params))
        try:
            self._set_layout(self._expected_round(features, running).layout)
            for first in range(0, len(added), ADMISSIONS):
                self._admit(added[first : first + ADMISSIONS])
        except BaseException:
            self._set_needed(before)
            raise

    def _expected_round(self, features: SamplingFeatures, running: Sequence[Request]) -> Serving:
        """Return the program that will serve these requests once all of them generate."""
        K = self.configs.k_of_batch(len(running))
        limits_drafts = any(request.draft_limit < K for request in running)
        pages = self.buckets.pages(max(request.num_pages for request in running))
        features = replace(features, prompt_logprobs=False)
        return self._serve_round(features, RoundShape(self.num_slots, pages, K), limits_drafts)

    def _set_needed(self, layout: StateLayout) -> None:
        if layout.sizes != self._needed.sizes:
            self._forget_choices()
        self._needed = layout

    def _set_layout(self, layout: StateLayout) -> None:
        """Give the state the arrays of a layout; without memory for them, nothing changes."""
        if layout is not self._layout:
            self._change_layout(layout)

    def _change_layout(self, layout: StateLayout) -> None:
        state = self.state  # (its first use sets the layout)
        if not layout.has_shapes_of(self._layout):
            self._set_rows(self._relaid(slots.without_caches(state), layout))
            self._prefills_served.clear()
        self._layout = layout

    def _relaid(self, rows: DecodeState, layout: StateLayout) -> DecodeState:
        cfg = self.configs.greedy
        if cfg.placement.mesh is None:
            return jax.tree.map(_committed, slots.relaid(rows, layout))
        key = layout.held, tuple(sorted(layout.sizes.items()))
        if key not in self._relays:
            relaid = partial(slots.relaid, layout=layout)
            out = shardings(cfg, jax.eval_shape(relaid, rows))
            self._relays[key] = jax.jit(relaid, out_shardings=out)
        return self._relays[key](rows)

    def _admit(self, requests: Sequence[Request]) -> None:
        if self._layout.held:
            idle = ADMISSIONS - len(requests)
            at = np.asarray([*map(slot_of, requests), *[self.num_slots] * idle], np.int32)
            self._write_rows(at, self._processor_rows(requests, self._layout))

    def _write_rows(self, at: np.ndarray, new: dict[str, Any]) -> None:
        sampling = self.state.sampling
        processors = slots.admit(sampling.processors, at, new)
        self.state = replace(self.state, sampling=replace(sampling, processors=processors))

    def _processor_rows(self, requests: Sequence[Request], layout: StateLayout) -> dict[str, Any]:
        """Return NumPy rows of the processors' states, and idle rows up to ADMISSIONS."""
        sampled = [*map(_sampled, requests)]
        return sampling_rows(layout, sampled, batch=ADMISSIONS).processors

    def _prompt_rows(
        self, requests: Sequence[Request], size: int, layout: StateLayout
    ) -> PromptRows:
        """Return NumPy rows of the requests that tiles belong to, and idle rows up to `size`."""
        (width,) = layout.sizes[STOPS]

        def integers(r: Request) -> list[int]:
            stops = r.stop_token_ids[:width]  # more only where there was no memory for them
            last = r.all_token_ids[-1] if r.num_generated else 0
            padding = [-1] * (width - len(stops))
            return [last, r.num_generated, r.max_tokens, r.draft_limit, *stops, *padding]

        # Few arrays and calls: a first token waits for this.
        found = {r: (integers(r), _sampled(r)) for r in dict.fromkeys(requests)}
        idle = [0, 0, 0, 0, *[-1] * width]
        rows = [*(found[r][0] for r in requests), *[idle] * (size - len(requests))]
        table: Any = np.asarray(rows, np.int32)
        return PromptRows(
            next_token=table[:, 0],
            num_generated=table[:, 1],
            max_tokens=table[:, 2],
            stop_token_ids=table[:, 4:],
            draft_limit=table[:, 3],
            sampling=sampling_rows(
                layout.hold(GREEDY), [found[r][1] for r in requests], batch=size
            ),
            acceptance=rows_of(
                [r.acceptance for r in requests],
                size,
                self.num_speculative_tokens,
                has_fallback=self.configs.greedy.fallback is not None,
            )
            if self.adapts
            else None,
        )

    # --- programs --------------------------------------------------------------------------------

    def prefill(
        self, features: SamplingFeatures, chunks: Sequence[Chunk]
    ) -> tuple[Verification, list[range]]:
        """Dispatch one prefill call for requests that need these features.

        Returns its result, and the rows of it that hold each chunk's tiles.
        """
        tile = self.prefill_tile
        placed: list[tuple[Chunk, int]] = []
        rows: list[range] = []
        for chunk in chunks:
            first = len(placed)
            placed += [(chunk, offset) for offset in range(0, len(chunk.token_ids), tile)]
            rows.append(range(first, len(placed)))
        pages = self.buckets.pages(max(chunk.request.num_pages for chunk in chunks))
        shape = self._prefill_shape(features, self.buckets.tiles(len(placed)), pages)
        size, serving = shape.tiles, self._serve_prefill(features, shape)
        self._set_layout(serving.layout)
        owners = [chunk.request for chunk, _ in placed]
        tables = self.tables.for_prefill(owners, size, pages)
        prompts = self._prompt_rows(owners, size, self._layout)
        tiles = PrefillTiles.idle(tile, self.num_slots, self.buckets.max_ending, tables, prompts)
        ended = 0
        for row, (chunk, offset) in enumerate(placed):
            end = offset + tile
            part = chunk.token_ids[offset:end]
            tiles.tokens[row, : len(part)] = part
            tiles.start[row], tiles.num_tokens[row] = chunk.start + offset, len(part)
            is_last = end >= len(chunk.token_ids)
            tiles.next_prompt_token[row] = chunk.next_token if is_last else chunk.token_ids[end]
            if is_last and chunk.ends:
                tiles.slots[ended], tiles.ending[ended] = slot_of(chunk.request), row
                ended += 1
        verification = self._prefill(serving.cfg, tiles)
        serving.noted()
        return verification, rows

    def _prefill(self, cfg: RoundConfig, tiles: PrefillTiles) -> Verification:
        processors = slots.take(self.state.sampling.processors, tiles.slots)
        verification, after = programs.run_prefill(
            cfg,
            self.params,
            slots.without_rows(self.state, processors),
            tiles.block_tables,
            tiles.chunk,
            (slots.prefill_rows(self.state, tiles.rows), tiles.ending),
            compilation=self.config.compilation,
        )
        rows = slots.put_back(
            slots.without_caches(self.state), tiles.slots, slots.without_caches(after)
        )
        self.state = slots.with_caches(rows, after)
        return verification

    def round(
        self,
        features: SamplingFeatures,
        requests: Iterable[Request],
        *,
        num_speculative_tokens: int,
        limits_drafts: bool,
    ) -> Verification:
        """Dispatch a step's rounds; the rows of their results are the slots."""
        running = list(requests)
        self.tables.update(running)
        pages = self.buckets.pages(max(r.num_pages for r in running))
        shape = RoundShape(self.num_slots, pages, num_speculative_tokens)
        serving = self._serve_round(features, shape, limits_drafts)
        self._set_layout(serving.layout)
        verification = self._round(serving.cfg, self.tables.changed(pages))
        serving.noted()
        if not serving.is_exact:
            serving.num_rounds += 1
            if serving.num_rounds == EXACT_AFTER and not self._is_warm:
                self._compile_exact(features, shape, limits_drafts)
        return verification

    def is_compiled(self, features: SamplingFeatures, requests: Sequence[Request], K: int) -> bool:
        """Return whether the next rounds can have so many drafts without waiting for a compiler.

        If not, their program is compiled in the background where that is possible.
        """
        pages = self.buckets.pages(max(r.num_pages for r in requests))
        shape = RoundShape(self.num_slots, pages, K)
        self._follow_overrides()
        needed = Variant.of(features, self._needed, limits_drafts=self.adapts)
        if self._is_warm or not self._may_compile_aside or self._variants.serving(shape, needed):
            return True
        self._compile_aside(needed, False, shape, ())
        return False

    def _round(self, cfg: RoundConfig, changed: Mapping[int, np.ndarray]) -> Verification:
        """Dispatch a step's rounds, after copying the block tables that have changed."""
        args = self.params, self.state, self.tables.on_device(changed), self.config.compilation
        verification, self.state = self.round_program(cfg, self.rounds_per_step, *args)
        return verification

    # --- the choice of programs -----------------------------------------------------------------

    def _serve_round(
        self, features: SamplingFeatures, shape: RoundShape, limits_drafts: bool
    ) -> Serving:
        """Return the compiled program that serves requests of these features, or their own."""
        key = (features, shape, limits_drafts, self.configs.version)
        if key not in self._rounds_served:
            self._follow_overrides()
            needed = Variant.of(features, self._needed, limits_drafts=limits_drafts)
            variant = self._variants.serving(shape, needed) or needed
            cfg = self._round_cfg(variant, shape)
            self._rounds_served[key] = self._serving(cfg, variant, needed, shape)
        return self._rounds_served[key]

    def _prefill_shape(self, features: SamplingFeatures, tiles: int, pages: int) -> PrefillShape:
        """Return the shape of the call for so many tiles.

        After a warm-up for every request, rare features run in the next larger call that serves
        them. A size that was not warmed compiles, since a larger call could take far longer.
        """
        least = PrefillShape(tiles, pages)
        if not self._is_warm or not self._variants.knows(least):
            return least
        key = (features, least, self.configs.version)
        if key not in self._prefill_shapes:
            self._follow_overrides()
            needed = Variant.of(features, self._needed)
            self._prefill_shapes[key] = self._variants.smallest_prefill(least, needed)
        return self._prefill_shapes[key]

    def _serve_prefill(self, features: SamplingFeatures, shape: PrefillShape) -> Serving:
        """As _serve_round; programs that run on the state as it is come first."""
        key = (features, shape, self.configs.version)
        if key not in self._prefills_served:
            self._follow_overrides()
            needed = Variant.of(features, self._needed)
            variant = self._variants.serving(shape, needed, arrays=self._layout.shapes)
            if variant is None:
                held = replace(features, processors=features.processors | self._layout.held)
                variant = Variant.of(held, self._layout)
                variant = variant if variant.serves(needed) else needed
            cfg = self.configs.get(variant.features)
            self._prefills_served[key] = self._serving(cfg, variant, needed, shape)
        return self._prefills_served[key]

    def _serving(
        self, cfg: RoundConfig, variant: Variant, needed: Variant, shape: RoundShape | PrefillShape
    ) -> Serving:
        is_new = not self._variants.has(shape, variant)
        return Serving(
            cfg,
            variant.layout(self._needed),
            variant == needed,
            partial(self._variants.add, shape, variant) if is_new else None,
        )

    def _round_cfg(self, variant: Variant, shape: RoundShape) -> RoundConfig:
        return self.configs.get(
            variant.features,
            num_speculative_tokens=shape.num_speculative_tokens,
            limits_drafts=variant.limits_drafts,
            batch=shape.batch,
        )

    def _follow_overrides(self) -> None:
        """Forget the compiled programs of other settings (RoundConfigs.override)."""
        if self._variants_of != self.configs.version:
            self._variants, self._variants_of = Variants(), self.configs.version

    # --- compiling while others run --------------------------------------------------------------

    @property
    def _may_compile_aside(self) -> bool:
        """Whether the programs are those that a Rehearsal compiles."""
        return (
            self.config.compilation == "round"
            and self.round_program is rounds.run_rounds
            and self.channel is None  # all processes compile together
        )

    def poll(self) -> None:
        """Take over the programs that were compiled in the background since the last call."""
        for job, outcome in self._background.take():
            if isinstance(outcome, Exception):
                logger.warning("a program did not compile in the background", exc_info=outcome)
                self._uncompilable.add(job)
                waiting = [r for r, waits_for in self._waits_for.items() if waits_for == job]
                self._failed.update({request: outcome for request in waiting})
                continue
            for shape, variant in outcome:
                self._variants.add(shape, variant)
            self._forget_choices()

    def _forget_choices(self) -> None:
        self._rounds_served.clear()
        self._prefills_served.clear()
        self._prefill_shapes.clear()

    @property
    def num_waiting_for_programs(self) -> int:
        """Requests that may not be admitted until a program is compiled."""
        return sum(request.finish_reason is None for request in self._waits_for)

    def may_admit(
        self,
        request: Request,
        features: SamplingFeatures,
        others: Sequence[Request],
        *,
        alone: bool,
    ) -> bool:
        """Return whether a request can run beside others without a compilation for its features.

        features: what the others need
        alone: whether no request of any replica runs

        If not, programs are compiled in the background, and the others go on meanwhile. A request
        that is alone waits here for the programs that it has waited for. A shape that is compiled
        for no features yet delays nothing. Raises ConfigError if the programs did not compile.
        """
        if self._is_warm or not self._may_compile_aside:
            return True
        waits_for = self._waits_for.get(request)
        if waits_for in self._background:
            if not alone:
                return False
            self._background.wait(waits_for)
            self.poll()
        if request in self._failed:
            del self._waits_for[request]
            raise _not_compiled(self._failed.pop(request))
        if alone or self._is_served(request, features, others):
            self._waits_for.pop(request, None)
            return True
        return False

    def may_shrink(
        self, batch: int, features: SamplingFeatures, running: Sequence[Request]
    ) -> bool:
        """Return whether these requests can move to a smaller batch without such a compilation.

        features: what they need. If not, they go on in the batch that they are in; see may_admit.
        """
        if self._is_warm or not self._may_compile_aside or not running:
            return True
        K = self.configs.k_of_batch(len(running))
        limits_drafts = any(request.draft_limit < K for request in running)
        pages = self.buckets.pages(max(request.num_pages for request in running))
        shape = RoundShape(batch, pages, K)
        of_rounds = replace(features, prompt_logprobs=False)
        needed = Variant.of(of_rounds, self._needed, limits_drafts=limits_drafts)
        if self._variants.serving(shape, needed) or not self._variants.knows(shape):
            return True
        level = level_for(needed, self._needed, limits_drafts=self.speculative is not None)
        job = self._compile_aside(level, False, shape, self._variants.prefills())
        return job in self._uncompilable

    def _is_served(
        self, request: Request, features: SamplingFeatures, others: Sequence[Request]
    ) -> bool:
        own = features_of([request.params])
        # Most often all requests are of one kind. This runs for each admission.
        if (
            self._variants.are_all_of(features)
            and features.holds(own)
            and self._needed.has_room(request.params)
            and request.draft_limit == self.num_speculative_tokens
        ):
            return True
        running = [*others, request]
        layout = self._needed.grown([request.params])
        adds = not features.holds(own) or layout.sizes != self._needed.sizes
        features |= own
        buckets = self.config.batch_buckets
        assert buckets is not None
        batch = next(size for size in buckets if size >= len(running))
        K = self.configs.k_of_batch(len(running))
        limits_drafts = any(r.draft_limit < K for r in running)
        rows = request.num_known + self.rounds_per_step * (self.num_speculative_tokens + 1)
        blocks = -(-min(rows, self.config.max_model_len) // self.config.block_size)
        pages = self.buckets.pages(max([blocks, *(r.num_pages for r in others)]))

        def prefills(tokens: Sequence[int]) -> list[PrefillShape]:
            """The shapes of the calls that prefill so many tokens of each request."""
            tiles = sum(-(-n // self.prefill_tile) for n in tokens)
            most = self.buckets.max_tiles
            calls = {min(tiles, most), tiles % most if tiles > most else 0} - {0}
            return [PrefillShape(size, pages) for size in {*map(self.buckets.tiles, calls)}]

        shape = RoundShape(batch, pages, K)
        of_rounds = replace(features, prompt_logprobs=False)
        needed = Variant.of(of_rounds, layout, limits_drafts=limits_drafts)
        of_prefill = Variant.of(features, layout)
        unprefilled = [r.num_known - r.num_prefilled for r in others if not r.is_prefilled]
        alone = prefills([request.num_known])
        together = prefills([request.num_known, *unprefilled]) if unprefilled else alone

        def missing(shapes: Sequence[PrefillShape]) -> list[RoundShape | PrefillShape]:
            found = [s for s in shapes if not self._variants.serving(s, of_prefill)]
            return [*found, *([] if self._variants.serving(shape, needed) else [shape])]

        lacks = missing(together)
        if not lacks or not (adds or all(map(self._variants.knows, lacks))):
            return True
        if missing(alone):
            level = level_for(needed, layout, limits_drafts=self.speculative is not None)
            self._compile_aside(level, features.prompt_logprobs, shape, alone, request)
        return False

    def _compile_aside(
        self,
        variant: Variant,
        prompt_logprobs: bool,
        shape: RoundShape,
        prefills: Sequence[PrefillShape],
        request: Request | None = None,
    ) -> Hashable:
        """Compile a variant's rounds and prefills in the background, and return the job.

        request: waits for them
        """
        of_prefill = replace(
            variant,
            features=replace(variant.features, prompt_logprobs=prompt_logprobs),
            limits_drafts=False,
        )
        own = () if request is None else tuple(prefills)  # without one, all that are known
        job = (variant, of_prefill, shape, own, self.configs.version)
        if request is not None:
            self._waits_for[request] = job
        if job in self._background or (request is None and job in self._uncompilable):
            return job
        buckets = self.config.batch_buckets
        assert buckets is not None
        layout, moves, at = variant.layout(self._needed), [], self.num_slots
        for batch in _path(buckets, at, shape.batch):
            moves.append(move_call(self._rows_in(self._layout, at), batch))
            at = batch
        rehearsal = Rehearsal(
            self.params,
            moves,
            layout,
            self._rows_in(self._layout, at),
            self._slots_rehearsal(layout, at),
            [
                self._prefill_rehearsal(of_prefill, each)
                for each in prefills
                if not self._variants.has(each, of_prefill)
            ],
            self._round_rehearsal(variant, shape),
        )
        self._background.submit(job, rehearsal.run)
        return job

    def _rows_in(self, layout: StateLayout, batch: int) -> DecodeState:
        """Return the shapes of the state without caches in a layout and a batch."""
        rows = slots.shapes_in(slots.without_caches(self.state), layout, batch)
        cfg = self.configs.greedy
        if cfg.placement.mesh is not None:
            return jax.tree.map(lambda x, to: x.update(sharding=to), rows, shardings(cfg, rows))
        sharding = self.state.seq_lens.sharding
        return jax.tree.map(lambda x: x.update(sharding=sharding), rows)

    def _state_in(self, layout: StateLayout, batch: int) -> DecodeState:
        """As _rows_in, with the caches of the state."""
        return slots.with_caches(self._rows_in(layout, batch), jax.tree.map(shape_of, self.state))

    def _slots_rehearsal(self, layout: StateLayout, batch: int) -> SlotsRehearsal:
        return SlotsRehearsal(
            self._state_in(layout, batch),
            self._state_in(layout, self.buckets.max_ending),
            self._processor_rows([], layout) if layout.held else {},
        )

    def _round_rehearsal(self, variant: Variant, shape: RoundShape) -> RoundRehearsal:
        return RoundRehearsal(
            shape,
            variant,
            self._round_cfg(variant, shape),
            self.rounds_per_step,
            self.tables.idle(shape.batch, shape.pages),
        )

    def _prefill_rehearsal(self, variant: Variant, shape: PrefillShape) -> PrefillRehearsal:
        tiles = self._idle_tiles(shape, variant.layout(self._needed))
        return PrefillRehearsal(shape, variant, self.configs.get(variant.features), tiles)

    def _idle_tiles(self, shape: PrefillShape, layout: StateLayout) -> PrefillTiles:
        tables = self.tables.idle(shape.tiles, shape.pages)
        rows = self._prompt_rows([], shape.tiles, layout)
        return PrefillTiles.idle(
            self.prefill_tile, self.num_slots, self.buckets.max_ending, tables, rows
        )

    def _compile_exact(
        self, features: SamplingFeatures, shape: RoundShape, limits_drafts: bool
    ) -> None:
        """Compile the programs of just these features in the background, for later rounds."""
        if self._may_compile_aside:
            variant = Variant.of(features, self._needed, limits_drafts=limits_drafts)
            self._compile_aside(variant, False, shape, self._variants.prefills())

    # --- warm-up ---------------------------------------------------------------------------------

    def warm(
        self,
        features: Iterable[SamplingFeatures],
        params: Sequence[SamplingParams],
        shapes: Shapes,
        *,
        limits_drafts: bool,
    ) -> int:
        """Compile the programs of each of these features in these shapes; run each on idle slots.

        params: requests whose stop tokens, bad words and so on the arrays shall hold. Returns the
        number of rounds and prefills that ran.
        """
        self._set_needed(self._needed.with_room(params).fit(GREEDY))
        variants = []
        for each in features:
            of_rounds = replace(each, prompt_logprobs=False)
            variants.append(
                Warmed(
                    Variant.of(of_rounds, self._needed, limits_drafts=limits_drafts),
                    # No drafts are limited in a prefill: those of other rounds serve.
                    None if limits_drafts else Variant.of(each, self._needed),
                    shapes.tiles,
                )
            )
        return self._warm(variants, shapes)

    def warm_levels(self, shapes: Shapes) -> int:
        """Compile programs that serve every request in these shapes; as `warm`.

        The state's arrays have room for every request from then on.
        """
        self._set_needed(self._needed.full(GREEDY))
        drafts, variants = self.speculative is not None, []
        for features in dict.fromkeys((*ROUND_LEVELS, *PREFILL_LEVELS)):
            of_rounds = of_prefill = None
            if features in ROUND_LEVELS:
                limits = drafts and is_shared(features)
                of_rounds = full_variant(features, self._needed, limits_drafts=limits)
            if features in PREFILL_LEVELS:
                of_prefill = full_variant(features, self._needed)
            variants.append(Warmed(of_rounds, of_prefill, prefill_sizes(features, shapes.tiles)))
        if self.speculative is not None and self.speculative.draft_max_model_len is not None:
            for features in (GREEDY, SAMPLED, TRUNCATED):
                of_rounds = full_variant(features, self._needed, limits_drafts=True)
                variants.append(Warmed(of_rounds, None, ()))
        count = self._warm(variants, shapes)
        self._compile_begin(self._needed.fit(GREEDY), self.memory.num_blocks)
        self._is_warm = True
        return count

    def _warm(self, variants: Sequence[Warmed], shapes: Shapes) -> int:
        """Compile the variants' programs, then run each once on idle slots; return their number.

        Where that is possible, threads compile them from shapes first. After the runs, the first
        request finds everything launched once.
        """
        self._follow_overrides()
        total = sum(
            len(self._prefills_of(each, shapes))
            + sum(len(self._rounds_of(each, batch, shapes)) for batch in shapes.batches)
            for each in variants
        )
        report = self.on_compiled
        if self._may_compile_aside:
            calls = different(self._small_calls(variants, shapes))
            small = [partial(compile_call, call) for call in calls]
            try:
                with lowering_workers(), executables.written_at_once():
                    side_by_side(list(self._compilations(variants, shapes)), small, report)
            finally:
                lowered_once.cancel_compilations()
            report = report_nothing
        report(0, total)
        finished = itertools.count(1)
        for each, batch in self._with_state_of(variants, shapes):
            for shape in self._rounds_of(each, batch, shapes):
                self._run_idle_round(each.rounds, shape)
                report(next(finished), total)
            prefills, is_first = self._prefills_of(each, shapes), batch == shapes.batches[0]
            for shape in prefills if is_first else prefills[:1]:  # of put_back each batch has one
                self._run_idle_prefill(each.prefill, shape)
                if is_first:
                    report(next(finished), total)
        self._forget_choices()
        return total

    def _with_state_of(
        self, variants: Sequence[Warmed], shapes: Shapes
    ) -> Iterator[tuple[Warmed, int]]:
        """Give the state the arrays of each variant in each batch, and yield both."""
        plain = self._needed.hold(GREEDY)
        for each in variants:
            layout = each.layout(self._needed)
            self._set_layout(layout)
            for batch in shapes.batches:
                self.move([-1] * batch)
                # Requests of other features come and go: a few small programs for each batch.
                self._set_layout(plain)
                self._set_layout(layout)
                self._admit([])
                self.deactivate([0])
                yield each, batch
            if shapes.batches:
                self.move([-1] * shapes.batches[0])  # and back, with these arrays

    def _rounds_of(self, each: Warmed, batch: int, shapes: Shapes) -> list[RoundShape]:
        """Return the shapes of a variant's rounds in a batch."""
        numbers = self._drafts_of(batch) if each.of_rounds is not None else []
        return [RoundShape(batch, n, K) for K, n in itertools.product(numbers, shapes.pages)]

    def _prefills_of(self, each: Warmed, shapes: Shapes) -> list[PrefillShape]:
        """Return the shapes of a variant's prefills, the smallest first."""
        tiles = each.tiles if each.of_prefill is not None else []
        return [PrefillShape(*size) for size in itertools.product(tiles, shapes.pages)]

    def _compilations(
        self, variants: Sequence[Warmed], shapes: Shapes
    ) -> Iterator[Callable[[], None]]:
        """Yield what compiles each round and each prefill."""
        for each in variants:
            layout = each.layout(self._needed)
            for batch in shapes.batches:
                state = self._state_in(layout, batch)
                for shape in self._rounds_of(each, batch, shapes):
                    rehearsal = self._round_rehearsal(each.rounds, shape)
                    yield partial(rehearsal.compile, self.params, state)
            ended = self._state_in(layout, self.buckets.max_ending)
            for shape in self._prefills_of(each, shapes):
                prefill = self._prefill_rehearsal(each.prefill, shape)
                yield partial(prefill.compile, self.params, ended)

    def _small_calls(self, variants: Sequence[Warmed], shapes: Shapes) -> Iterator[Call]:
        """Yield the calls of the small programs; some of them several times."""
        layouts = [each.layout(self._needed) for each in variants]
        for layout in {layout.shapes: layout for layout in layouts}.values():
            for i, batch in enumerate(shapes.batches):
                yield from self._slots_rehearsal(layout, batch).calls()
                rows = self._rows_in(layout, batch)
                for next_batch in [*shapes.batches[:i][-1:], *shapes.batches[i + 1 : i + 2]]:
                    yield move_call(rows, next_batch)

    def _run_idle_round(self, variant: Variant, shape: RoundShape) -> None:
        """Run a step's rounds once, on idle slots."""
        tables = dict(enumerate(self.tables.idle(shape.batch, shape.pages)))
        jax.block_until_ready(self._round(self._round_cfg(variant, shape), tables))
        self._variants.add(shape, variant)

    def _run_idle_prefill(self, variant: Variant, shape: PrefillShape) -> None:
        """Run a prefill call once, on idle tiles."""
        tiles = self._idle_tiles(shape, self._layout)
        self._prefill(self.configs.get(variant.features), tiles)
        self._variants.add(shape, variant)

    def _drafts_of(self, batch: int) -> set[int]:
        """Every K of a batch bucket's rounds: any number of its requests may generate at a time.

        The others are being prefilled.
        """
        if self.speculative is not None and self.speculative.adaptive:
            return set(compiled_numbers(self.num_speculative_tokens))
        return {self.configs.k_of_batch(n) for n in range(1, batch + 1)}


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("num_blocks", "dtype", "cache_dtype"))
def _init_state(
    cfg: RoundConfig,
    batch: int,
    stops: int,
    *,
    num_blocks: tuple[int, ...],
    dtype: str,
    cache_dtype: str,
) -> DecodeState:
    """Return idle rows over empty caches."""
    rows = sampling_rows(StateLayout(Vocabulary(cfg.target.vocab_size)), [], batch=batch)

    def init(cfg: RoundConfig) -> DecodeState:
        return decode_state.init_state(
            cfg,
            jax.tree.map(jnp.asarray, rows),
            jnp.zeros(batch, jnp.int32),
            jnp.full((batch, stops), -1, jnp.int32),
            num_blocks,
            dtype=dtype,
            cache_dtype=cache_dtype,
        )

    return spread(init, 1, None)(cfg)


def _committed(x: jax.Array) -> jax.Array:
    """Return the array bound to its device, without a copy.

    A program with an exported kernel binds its results, and a program is compiled anew for
    arguments that are bound. So the state is bound from the start.
    """
    return x if x.committed else jax.device_put(x, x.sharding)


def _path(buckets: Sequence[int], start: int, end: int) -> list[int]:
    """Return the buckets after `start` on the way to `end`."""
    at, to = buckets.index(start), buckets.index(end)
    step = 1 if to > at else -1
    return [buckets[i] for i in range(at + step, to + step, step)] if at != to else []


def _not_compiled(error: Exception) -> ConfigError:
    """The error of a request whose programs did not compile."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    found = ConfigError(
        "sampling_params: expected programs for the request's features that compile, "
        f"got {type(error).__name__}: {reason:.500}"
    )
    found.__cause__ = error
    return found


def _no_memory(params: SamplingParams, error: Exception) -> ConfigError:
    """The error of a request whose sampling parameters the state has no memory for."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(
        "sampling_params: expected memory for the request's features "
        f"({', '.join(sorted(features_of([params]).processors)) or 'none'}), got {reason}"
    )


def _sampled(request: Request) -> SampledRequest:
    return SampledRequest(request.params, request.seed, request.prompt_token_ids, request.token_ids)


def slot_of(request: Request) -> int:
    """Return the slot of a request that is admitted or prefilled.

    Only a round, or reading a result, takes slots away, and both come after.
    """
    assert request.slot is not None
    return request.slot
