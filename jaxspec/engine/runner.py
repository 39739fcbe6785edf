"""The device's side of the engine: the resident state, and the program for each batch.

Everything here dispatches and returns at once; nothing waits for the device. Shapes come from few
buckets: rows of the batch, and those of jaxspec.engine.buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxspec.cache.arrays import resolve_cache_dtype
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
from jaxspec.decode import programs, slots
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode import state as decode_state
from jaxspec.decode.several_rounds import RoundProgram
from jaxspec.decode.slots import Admission
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.drafts.drafter import PromptChunk
from jaxspec.engine.block_tables import BlockTables
from jaxspec.engine.buckets import Buckets, Shapes
from jaxspec.engine.memory import CacheMemory
from jaxspec.engine.request import Request
from jaxspec.engine.round_configs import GREEDY, RoundConfigs
from jaxspec.engine.scheduler import Chunk
from jaxspec.layers.params import Params
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary, resized
from jaxspec.sampling.rows import (
    STOPS,
    StateLayout,
    change_layout,
    features_of,
    sampling_rows,
)

ADMISSIONS = 8  # slots that one call of slots.admit fills
OUT_OF_MEMORY = (MemoryError, jax.errors.JaxRuntimeError)  # of the host, of the device


@dataclass(frozen=True)
class PrefillTiles:
    """One call of prefill: NumPy arrays with a row per tile, a few tokens of one request.

    slots:             int32 [tiles], the slot that a tile's row goes back to, where the tile ends a
                       prompt; out of range elsewhere
    block_tables:      as jaxspec.decode.prefill takes them, a row per tile
    tokens:            int32 [tiles, prefill_tile]
    start:             int32 [tiles], position of the first token
    num_tokens:        int32 [tiles], tokens that are real; 0 for an idle tile
    next_prompt_token: int32 [tiles], the known token after the tile, -1 where the prompt ends
    """

    slots: np.ndarray
    block_tables: Any
    tokens: np.ndarray
    start: np.ndarray
    num_tokens: np.ndarray
    next_prompt_token: np.ndarray

    @property
    def chunk(self) -> PromptChunk:
        """The tiles as prefill takes them; it reads NumPy arrays as it reads JAX's."""
        arrays: Any = (self.tokens, self.start, self.num_tokens, self.next_prompt_token)
        return PromptChunk(*arrays)

    @classmethod
    def idle(
        cls, num_tiles: int, prefill_tile: int, num_slots: int, block_tables: Any
    ) -> PrefillTiles:
        """Return tiles that hold no request; the caller fills in those that do."""

        def column(value: int) -> np.ndarray:
            return np.full(num_tiles, value, np.int32)

        tokens = np.zeros((num_tiles, prefill_tile), np.int32)
        return cls(column(num_slots), block_tables, tokens, column(0), column(0), column(-1))


class ModelRunner:
    """Target, draft, and the state of the requests that run.

    Each program consumes `state` (donated) and returns its successor.

    configs: the static description of each program
    memory: sizes of the KV cache
    round_program: runs a step's rounds. A tool that records them puts a program of its own there,
        which may return a Verification with more fields.
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
        acceptance_rates: tuple[float, ...] | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.params, self.speculative, self.config = params, speculative, config
        self.dtype = jnp.dtype(dtype)
        self.cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype)
        self.eos_token_ids = eos_token_ids
        self.num_speculative_tokens = speculative.num_speculative_tokens if speculative else 0
        self.on_gpu = jax.default_backend() == "gpu"
        self.prefill_tile = ops.prefill_tile
        self.round_program: RoundProgram = rounds.run_rounds
        self.buckets = Buckets(config, self.prefill_tile, self.on_gpu)
        self.weight_bytes = sum(a.nbytes for a in jax.tree.leaves(params["target"]))
        self.rounds_per_step = rounds.rounds_per_step(
            config, on_gpu=self.on_gpu, weight_bytes=self.weight_bytes
        )
        self.configs = RoundConfigs(
            target_config,
            draft_config,
            speculative,
            config,
            ops=ops,
            weight_bytes=self.weight_bytes,
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
        self.tables = BlockTables(len(self.configs.cache_groups), self.buckets.max_pages)
        vocabulary = Vocabulary(target_config.vocab_size, eos_token_ids)
        self._layout = StateLayout(vocabulary).fit(GREEDY)
        self._state: DecodeState | None = None

    # --- the state -------------------------------------------------------------------------------

    @property
    def state(self) -> DecodeState:
        """The resident state; the first use makes it, idle and with empty caches."""
        if self._state is None:
            assert self.config.batch_buckets is not None
            batch = self.config.batch_buckets[0]
            self._layout = self._layout.fit(GREEDY)
            self._state = _init_state(
                self.configs.greedy,
                batch,
                *self._layout.sizes[STOPS],
                num_blocks=self.memory.num_blocks,
                dtype=self.dtype.name,
                cache_dtype=self.cache_dtype.name,
            )
            self.tables.reset(batch)
        assert self._state is not None
        return self._state

    def check_room(self) -> None:
        """Raise ConfigError for sizes that exceed the whole memory; allocate nothing."""
        groups = len(self.configs.cache_groups)
        init = partial(
            _init_state,
            num_blocks=(1,) * groups,
            dtype=self.dtype.name,
            cache_dtype=self.cache_dtype.name,
        )
        slot = jax.eval_shape(partial(init, self.configs.greedy, 1, *self._layout.sizes[STOPS]))
        rows = jax.tree.leaves(slots.without_caches(slot))
        self.memory.check_room(sum(x.size * x.dtype.itemsize for x in rows))

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    def set_state(self, state: DecodeState) -> None:
        """Go on with a state made elsewhere, whose sampling rows hold no logits processor."""
        self._state = state
        self._layout = self._layout.hold(GREEDY).with_stops(state.stop_token_ids.shape[1])
        self.tables.reset(state.active.shape[0])

    def take_state(self) -> DecodeState:
        """Return the state and forget it, caches included; the next use makes a new one."""
        state, self._state = self._state, None
        assert state is not None, "expected a state, got none: nothing has run"
        return state

    def forget(self) -> None:
        """Drop the state, caches included."""
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
        at, to = buckets.index(self.num_slots), buckets.index(len(sources))
        wanted = np.asarray(sources, np.int32)
        while at != to:
            at += 1 if to > at else -1
            rows = np.full(buckets[at], -1, np.int32)
            count = min(len(wanted), len(rows))
            rows[:count] = wanted[:count]
            self._set_rows(slots.move(slots.without_caches(self.state), rows))
            wanted = np.arange(len(wanted), dtype=np.int32)
            wanted[len(rows) :] = -1
        self.tables.reset(len(sources))

    def deactivate(self, cleared: Sequence[int]) -> None:
        """Stop these slots from generating."""
        if cleared:
            ended = np.zeros(self.num_slots, bool)
            ended[list(cleared)] = True
            self.state = replace(self.state, active=slots.deactivate(self.state.active, ended))

    def admit(
        self, added: Sequence[Request], running: Sequence[Request]
    ) -> dict[Request, ConfigError]:
        """Write the parameters of added requests into their slots.

        running: all that run, the added ones included

        Returns the added requests that there is no memory for, each with its error. Their slots
        hold no parameters, and the state has no room for them.
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

    def _raise_unless_memory(self, error: Exception) -> None:
        """Raise an error other than a lack of memory, and any that has taken the state along."""
        is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        lost = self._state is None or any(x.is_deleted() for x in jax.tree.leaves(self._state))
        if lost or not is_memory:
            raise error

    def _admit_into(self, added: Sequence[Request], running: Sequence[Request]) -> None:
        params = [request.params for request in running]
        features = features_of(params)
        self._set_layout(self._layout.fit(features, params))
        for first in range(0, len(added), ADMISSIONS):
            self._admit(added[first : first + ADMISSIONS])

    def _fit_state(self, features: SamplingFeatures) -> None:
        """Give the state the arrays that these features need; most often it has them already."""
        if features.processors != self._layout.held:
            self._set_layout(self._layout.hold(features))

    def _set_layout(self, layout: StateLayout) -> None:
        """Give the state the arrays of a layout; without memory for them, nothing changes."""
        state = self.state  # (its first use sets the layout)
        if not layout.has_shapes_of(self._layout):
            self.state = replace(
                state,
                stop_token_ids=resized(state.stop_token_ids, *layout.sizes[STOPS]),
                sampling=change_layout(state.sampling, layout),
            )
        self._layout = layout

    def _admit(self, requests: Sequence[Request]) -> None:
        idle = ADMISSIONS - len(requests)
        at = np.asarray([*map(slot_of, requests), *[self.num_slots] * idle], np.int32)
        width = self.state.stop_token_ids.shape[1]
        ends = np.full((ADMISSIONS, width), -1, np.int32)
        for row, request in enumerate(requests):
            ends[row, : len(request.stop_token_ids)] = request.stop_token_ids

        def column(value: Callable[[Request], int]) -> Any:
            return np.asarray([*map(value, requests), *[0] * idle], np.int32)

        sampled = [
            SampledRequest(r.params, r.seed, r.prompt_token_ids, r.token_ids) for r in requests
        ]
        new = Admission(
            next_token=column(lambda r: r.all_token_ids[-1] if r.num_generated else 0),
            num_generated=column(lambda r: r.num_generated),
            max_tokens=column(lambda r: r.max_tokens),
            stop_token_ids=ends,  # type: ignore[arg-type]
            max_drafts=column(lambda r: r.max_drafts),
            sampling=sampling_rows(self._layout, sampled, batch=ADMISSIONS),
        )
        self._set_rows(slots.admit(slots.without_caches(self.state), at, new))

    # --- programs --------------------------------------------------------------------------------

    def prefill(
        self, features: SamplingFeatures, chunks: Sequence[Chunk]
    ) -> tuple[Verification, list[range]]:
        """Dispatch one prefill call for requests that need these features.

        Returns its result, and the rows of it that hold each chunk's tiles.
        """
        self._fit_state(features)
        tile = self.prefill_tile
        placed: list[tuple[Chunk, int]] = []
        rows: list[range] = []
        for chunk in chunks:
            first = len(placed)
            placed += [(chunk, offset) for offset in range(0, len(chunk.token_ids), tile)]
            rows.append(range(first, len(placed)))
        size = self.buckets.tiles(len(placed))
        pages = self.buckets.pages(max(chunk.request.num_pages for chunk in chunks))
        tables = self.tables.for_prefill([chunk.request for chunk, _ in placed], size, pages)
        tiles = PrefillTiles.idle(size, tile, self.num_slots, tables)
        for row, (chunk, offset) in enumerate(placed):
            end = offset + tile
            part = chunk.token_ids[offset:end]
            tiles.tokens[row, : len(part)] = part
            tiles.start[row], tiles.num_tokens[row] = chunk.start + offset, len(part)
            is_last = end >= len(chunk.token_ids)
            tiles.next_prompt_token[row] = chunk.next_token if is_last else chunk.token_ids[end]
            if is_last and chunk.ends:
                tiles.slots[row] = slot_of(chunk.request)
        return self._prefill(self.configs.get(features), tiles), rows

    def _prefill(self, cfg: RoundConfig, tiles: PrefillTiles) -> Verification:
        rows = slots.take(slots.without_caches(self.state), tiles.slots)
        verification, after = programs.run_prefill(
            cfg,
            self.params,
            slots.with_caches(rows, self.state),
            tiles.block_tables,
            tiles.chunk,
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
        num_drafts: int,
        limits_drafts: bool,
    ) -> Verification:
        """Dispatch a step's rounds; the rows of their results are the slots."""
        self._fit_state(features)
        running = list(requests)
        self.tables.update(running)
        tables = self.tables.for_round(self.buckets.pages(max(r.num_pages for r in running)))
        cfg = self.configs.get(
            features, num_drafts=num_drafts, limits_drafts=limits_drafts, batch=self.num_slots
        )
        return self._round(cfg, tables)

    def _round(self, cfg: RoundConfig, tables: Any) -> Verification:
        args = self.params, self.state, tables, self.config.compilation
        verification, self.state = self.round_program(cfg, self.rounds_per_step, *args)
        return verification

    # --- warm-up ---------------------------------------------------------------------------------

    def warm(
        self,
        features: SamplingFeatures,
        params: Sequence[SamplingParams],
        shapes: Shapes,
        *,
        limits_drafts: bool,
    ) -> int:
        """Run every program of these shapes once, on idle slots.

        params: requests whose stop tokens, bad words and so on the arrays shall hold. Returns the
        number of rounds and prefills that ran.
        """
        count = 0
        round_features = replace(features, prompt_logprobs=False)
        self._layout = self._layout.with_room(params)
        self._set_layout(self._layout.fit(features))
        for batch in shapes.batches:
            self.move([-1] * batch)
            # Requests of other features come and go: a few small programs for each batch.
            self._fit_state(GREEDY)
            self._fit_state(features)
            self._admit([])
            self.deactivate([0])
            for num_tiles, pages in itertools.product(shapes.tiles, shapes.pages):
                tables = self.tables.idle(num_tiles, pages)
                tiles = PrefillTiles.idle(num_tiles, self.prefill_tile, batch, tables)
                self._prefill(self.configs.get(features), tiles)
                count += 1
            for K in self._drafts_of(batch):
                cfg = self.configs.get(
                    round_features, num_drafts=K, limits_drafts=limits_drafts, batch=batch
                )
                for pages in shapes.pages:
                    tables = jax.device_put(self.tables.idle(batch, pages))
                    jax.block_until_ready(self._round(cfg, tables))
                    count += 1
        self.move([-1] * shapes.batches[0])  # and back to the smallest batch with these arrays
        return count

    def _drafts_of(self, batch: int) -> set[int]:
        """Every K of a batch bucket's rounds: any number of its requests may generate at a time.

        The others are being prefilled.
        """
        return {self.configs.num_drafts(n) for n in range(1, batch + 1)}


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
    return decode_state.init_state(
        cfg,
        jax.tree.map(jnp.asarray, rows),
        jnp.zeros(batch, jnp.int32),
        jnp.full((batch, stops), -1, jnp.int32),
        num_blocks,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )


def _no_memory(params: SamplingParams, error: Exception) -> ConfigError:
    """The error of a request whose sampling parameters the state has no memory for."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(
        "sampling_params: expected memory for the request's features "
        f"({', '.join(sorted(features_of([params]).processors)) or 'none'}), got {reason}"
    )


def slot_of(request: Request) -> int:
    """Return the slot of a request that is admitted or prefilled.

    Only a round, or reading a result, takes slots away, and both come after.
    """
    assert request.slot is not None
    return request.slot
