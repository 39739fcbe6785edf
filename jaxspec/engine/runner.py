"""The device's side of the engine: the resident state, the KV pool, and which compiled program runs for which batch.

Everything here dispatches and returns at once; nothing waits for the device. Shapes come from few buckets: rows of the batch, and those of
jaxspec.engine.buckets.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.cache import pool_sizes
from jaxspec.config import (
    CacheGroup,
    EngineConfig,
    Kernels,
    RoundConfig,
    SamplingFeatures,
    SpeculativeConfig,
)
from jaxspec.decode import programs, slots
from jaxspec.decode import several_rounds as rounds
from jaxspec.decode import state as decode_state
from jaxspec.decode.several_rounds import RoundProgram
from jaxspec.decode.slots import Admission
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.engine.block_tables import BlockTables
from jaxspec.engine.buckets import Buckets, power_of_two
from jaxspec.engine.request import Request
from jaxspec.engine.scheduler import Chunk
from jaxspec.layers.params import Params
from jaxspec.sampling.params import SamplingParams, end_token_ids
from jaxspec.sampling.processors.processor import SampledRequest, Vocabulary
from jaxspec.sampling.rows import StateLayout, change_layout, sampling_rows

logger = logging.getLogger(__name__)

# A CUDA graph saves the host its launches, and the device a part of the gaps between them, but drops the kernels' early calls of those
# that follow (programmatic dependent launch). So a target whose round outlasts the host's launches does without, as long as its rows are
# so few that the products are our kernels, which call; most of more rows are XLA's (docs/notes/cuda-graphs.md).
GRAPHS_BELOW_BYTES, GRAPHS_ABOVE_ROWS = 4 << 30, 64
CPU_POOL_BYTES = 4 << 30
RESERVE_BYTES = 1 << 30  # for programs, and what the allocator cannot use
MIN_STOPS = 4
ADMISSIONS = 8  # slots that one call of slots.admit fills
GREEDY = SamplingFeatures(sampled=False)


class ModelRunner:
    """Target, draft, and the state of the requests that run.

    Each program consumes `state` (donated) and returns its successor. round_program runs a step's
    rounds; a tool that records them puts a program of its own there, which may return a Verification
    with more fields.
    """

    def __init__(
        self,
        target_config: Any,
        draft_config: Any,
        params: Params,
        speculative: SpeculativeConfig | None,
        config: EngineConfig,
        *,
        kernels: Kernels,
        dtype: Any,
        acceptance_rates: tuple[float, ...] | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.target_config, self.draft_config, self.params = target_config, draft_config, params
        self.speculative, self.config, self.kernels, self.dtype = (
            speculative,
            config,
            kernels,
            jnp.dtype(dtype),
        )
        self.num_speculative_tokens = speculative.num_speculative_tokens if speculative else 0
        self.acceptance_rates = acceptance_rates
        self._overrides: dict[str, Any] = {}
        self._configs: dict[
            tuple[SamplingFeatures, int | None, bool, bool], RoundConfig
        ] = {}  # one object each, for jit
        self.on_gpu = jax.default_backend() == "gpu"
        # A tile holds whole row tiles of the attention kernel (48 rows); jnp gathers a request's keys for each tile, so it has fewer.
        self.prefill_tile = 48 if kernels.attention == "mosaic_gpu" else 32
        self.round_program: RoundProgram = rounds.run_rounds
        self.buckets = Buckets(config, self.prefill_tile, self.on_gpu)
        self.weight_bytes = sum(a.nbytes for a in jax.tree.leaves(params["target"]))
        self.rounds_per_step = rounds.rounds_per_step(
            config, on_gpu=self.on_gpu, weight_bytes=self.weight_bytes
        )
        self.eos_token_ids = eos_token_ids
        self._layout = StateLayout(Vocabulary(target_config.vocab_size, eos_token_ids))
        self._num_stops = power_of_two(
            max(MIN_STOPS, len(eos_token_ids))
        )  # columns of the state's stop tokens
        self._state: DecodeState | None = None
        self._num_blocks: tuple[int, ...] | None = None
        self.tables = BlockTables(len(self.cache_groups), self.buckets.max_pages)

    # --- what is static ----------------------------------------------------------------------------------------------------------

    def override(self, **values: Any) -> None:
        """Fields of every RoundConfig from now on: for benchmarks."""
        self._overrides |= values
        self._configs.clear()

    def round_config(
        self,
        features: SamplingFeatures,
        *,
        num_drafts: int | None = None,
        limits_drafts: bool = False,
        batch: int = 1,
    ) -> RoundConfig:
        """The static description of rounds of K = num_drafts (None: the engine's K) for requests that need these features."""
        K = self.num_speculative_tokens if num_drafts is None else num_drafts
        graphs = self.weight_bytes < GRAPHS_BELOW_BYTES or batch * (K + 1) > GRAPHS_ABOVE_ROWS
        key = (features, num_drafts, limits_drafts, graphs)
        if key not in self._configs:
            self._configs[key] = self._round_config(*key)
        return self._configs[key]

    def _round_config(
        self, features: SamplingFeatures, num_drafts: int | None, limits_drafts: bool, graphs: bool
    ) -> RoundConfig:
        values: dict[str, Any] = {
            f.name: getattr(features, f.name) for f in fields(SamplingFeatures)
        }
        values |= {"kernels": self.kernels, "cuda_graphs": graphs}
        longest = None
        if self.speculative is not None:
            K = self.num_speculative_tokens if num_drafts is None else num_drafts
            longest = self.speculative.draft_max_model_len
            values |= {
                "num_speculative_tokens": K,
                "rule": self.speculative.rejection_sample_method,
                "draft_sampling": self.speculative.draft_sample_method,
                "acceptance_rates": None
                if self.acceptance_rates is None
                else self.acceptance_rates[:K],
                "limits_drafts": limits_drafts and K > 0,
                "draft_max_model_len": longest if limits_drafts and K > 0 else None,
            }
        return RoundConfig.of_pair(
            self.target_config,
            self.draft_config,
            block_size=self.config.block_size,
            max_model_len=self.config.max_model_len,
            draft_context=longest,
            **(values | self._overrides),
        )

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Each with a pool of blocks and a block table of its own."""
        return self.round_config(GREEDY).cache_groups

    def num_drafts(self, batch_size: int) -> int:
        return self.speculative.num_drafts(batch_size) if self.speculative else 0

    # --- memory ------------------------------------------------------------------------------------------------------------------

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Of a KV-cache block of each group, in all layers that it serves."""
        return pool_sizes.block_bytes(self.round_config(GREEDY), self.dtype)

    @property
    def cache_bytes(self) -> int:
        """Of the whole KV cache."""
        return sum(n * size for n, size in zip(self.num_blocks, self.block_bytes, strict=True))

    def demand(self, group: CacheGroup, max_model_len: int) -> pool_sizes.PoolDemand:
        """Blocks that texts of max_model_len tokens take."""
        return pool_sizes.demand(
            group,
            max_model_len=max_model_len,
            head_room=self.num_speculative_tokens + 1,
            max_chunk=self.buckets.max_tiles * self.prefill_tile,
            rounds_per_step=self.rounds_per_step,
        )

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Of each group's pool; settled once, from what the device has free by then."""
        if self._num_blocks is None:
            demands = [self.demand(group, self.config.max_model_len) for group in self.cache_groups]
            self._num_blocks = pool_sizes.settle(
                self.config, self.cache_groups, demands, self.block_bytes, self._room
            )
            held = ", ".join(
                f"{n} for {group}"
                for n, group in zip(self._num_blocks, self.cache_groups, strict=True)
            )
            logger.info(
                "KV cache: blocks of %d tokens, %s, %.2f GB",
                self.config.block_size,
                held,
                self.cache_bytes / 1e9,
            )
        return self._num_blocks

    def _room(self) -> tuple[int, str]:
        """Bytes for the KV pool, and where the number is from."""
        stats = jax.local_devices()[0].memory_stats() if self.on_gpu else None
        if not stats or "bytes_limit" not in stats:
            return CPU_POOL_BYTES, f"{CPU_POOL_BYTES / 1e9:.1f} GB of host memory"
        share, limit, used = (
            self.config.gpu_memory_utilization,
            stats["bytes_limit"],
            stats["bytes_in_use"],
        )
        working = self.working_bytes()
        source = (
            f"gpu_memory_utilization {share} of {limit / 1e9:.1f} GB, of which {used / 1e9:.1f} GB are in use and {working / 1e9:.1f} GB "
            "kept for computing"
        )
        return int(share * limit) - used - working, source

    def working_bytes(self) -> int:
        """An estimate of what the largest programs need beside weights and caches: logits with the sampler's copies, prefill's rows."""
        target, rows = self.target_config, self.config.max_num_batched_tokens
        logits = 4 * min(
            4 * self.config.max_num_seqs * (self.num_speculative_tokens + 1) * target.vocab_size,
            1 << 30,
        )
        logits = max(logits, 4 * 4 * self.buckets.max_tiles * target.vocab_size)
        width = 8 * target.hidden_size + 3 * getattr(
            target, "intermediate_size", 4 * target.hidden_size
        )
        return logits + 2 * rows * width * self.dtype.itemsize + RESERVE_BYTES

    # --- the state ---------------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> DecodeState:
        if self._state is None:
            assert self.config.batch_buckets is not None
            batch, cfg, dtype = (
                self.config.batch_buckets[0],
                self.round_config(GREEDY),
                self.dtype.name,
            )
            self._state = _init_state(
                cfg, batch, self._num_stops, num_blocks=self.num_blocks, dtype=dtype
            )
            self._layout = self._layout.fit(GREEDY)
            self.tables.reset(batch)
        assert self._state is not None
        return self._state

    @state.setter
    def state(self, state: DecodeState) -> None:
        self._state = state

    def set_state(self, state: DecodeState) -> None:
        """Go on with a state made elsewhere, whose sampling rows hold no logits processor."""
        self._state, self._layout = state, self._layout.fit(GREEDY)
        self.tables.reset(state.active.shape[0])

    def take_state(self) -> DecodeState:
        """Return the state and forget it, caches included; the next use makes a new one."""
        state, self._state = self._state, None
        assert state is not None, "expected a state, got none: nothing has run"
        return state

    def forget(self) -> None:
        self._state = None

    @property
    def num_rows(self) -> int:
        return self.state.active.shape[0]

    def _set_rows(self, rows: DecodeState) -> None:
        self.state = slots.with_caches(rows, self.state)

    def move(self, sources: Sequence[int]) -> None:
        """Row i of the new batch is row sources[i] of the old one, an idle row for -1. From bucket to next bucket, so that few
        programs compile."""
        buckets = self.config.batch_buckets
        assert buckets is not None
        at, to = buckets.index(self.num_rows), buckets.index(len(sources))
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
        """These rows stop generating."""
        if cleared:
            ended = np.zeros(self.num_rows, bool)
            ended[list(cleared)] = True
            self.state = replace(self.state, active=slots.deactivate(self.state.active, ended))

    def use(self, features: SamplingFeatures, params: Iterable[SamplingParams]) -> None:
        """Give the state the structure that requests with these parameters need; most often it has it already."""
        params = list(params)
        width = self.state.stop_token_ids.shape[1]
        stops = self._num_stops = power_of_two(
            max([width, *(len(end_token_ids(p, self.eos_token_ids)) for p in params)])
        )
        before, self._layout = self._layout, self._layout.fit(features, params)
        if stops == width and self._layout.has_shapes_of(before):
            return
        ends = jnp.pad(self.state.stop_token_ids, ((0, 0), (0, stops - width)), constant_values=-1)
        sampling = change_layout(self.state.sampling, self._layout)
        self.state = replace(self.state, stop_token_ids=ends, sampling=sampling)

    def admit(self, requests: Sequence[Request]) -> None:
        """Their parameters into their slots. `use` their features first."""
        for first in range(0, max(1, len(requests)), ADMISSIONS):
            self._admit(requests[first : first + ADMISSIONS])

    def _admit(self, requests: Sequence[Request]) -> None:
        idle = ADMISSIONS - len(requests)
        at = np.asarray([*map(slot_of, requests), *[self.num_rows] * idle], np.int32)
        width = self.state.stop_token_ids.shape[1]
        ends = np.full((ADMISSIONS, width), -1, np.int32)
        for row, request in enumerate(requests):
            ends[row, : len(request.stop_token_ids)] = request.stop_token_ids

        def column(value: Callable[[Request], int]) -> Any:
            return np.asarray([*map(value, requests), *[0] * idle], np.int32)

        sampling = sampling_rows(
            self._layout,
            [SampledRequest(r.params, r.seed, r.prompt_token_ids, r.token_ids) for r in requests],
            batch=ADMISSIONS,
        )
        new = Admission(
            next_token=column(lambda r: r.all_token_ids[-1] if r.num_generated else 0),
            num_generated=column(lambda r: r.num_generated),
            max_tokens=column(lambda r: r.max_tokens),
            stop_token_ids=ends,  # type: ignore[arg-type]
            max_drafts=column(lambda r: r.max_drafts),
            sampling=sampling,
        )
        self._set_rows(slots.admit(slots.without_caches(self.state), at, new))

    # --- programs ----------------------------------------------------------------------------------------------------------------

    def prefill(
        self, features: SamplingFeatures, chunks: Sequence[Chunk]
    ) -> tuple[Verification, list[range]]:
        """Dispatch one prefill call. Returns its result, and the rows of it that hold each chunk's tiles."""
        tile = self.prefill_tile
        tiles: list[tuple[Chunk, int]] = []
        rows: list[range] = []
        for chunk in chunks:
            first = len(tiles)
            tiles += [(chunk, offset) for offset in range(0, len(chunk.token_ids), tile)]
            rows.append(range(first, len(tiles)))
        size = self.buckets.tiles(len(tiles))
        pages = self.buckets.pages(max(chunk.request.num_pages for chunk in chunks))
        tables = self.tables.for_prefill([chunk.request for chunk, _ in tiles], size, pages)
        tokens = np.zeros((size, tile), np.int32)
        at, start = np.full(size, self.num_rows, np.int32), np.zeros(size, np.int32)
        num_tokens, following = np.zeros(size, np.int32), np.full(size, -1, np.int32)
        for row, (chunk, offset) in enumerate(tiles):
            part = chunk.token_ids[offset : offset + tile]
            tokens[row, : len(part)], num_tokens[row], start[row] = (
                part,
                len(part),
                chunk.start + offset,
            )
            ends_chunk = offset + tile >= len(chunk.token_ids)
            following[row] = chunk.next_token if ends_chunk else chunk.token_ids[offset + tile]
            if ends_chunk and chunk.ends:
                at[row] = slot_of(chunk.request)
        return self._prefill(
            self.round_config(features), at, tables, tokens, start, num_tokens, following
        ), rows

    def _prefill(
        self, cfg: RoundConfig, at: np.ndarray, tables: Any, *chunk: np.ndarray
    ) -> Verification:
        tiles = slots.with_caches(slots.take(slots.without_caches(self.state), at), self.state)
        verification, after = programs.run_prefill(
            cfg, self.params, tiles, tables, *chunk, compilation=self.config.compilation
        )
        rows = slots.put_back(slots.without_caches(self.state), at, slots.without_caches(after))
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
        running = list(requests)
        self.tables.update(running)
        tables = self.tables.for_round(self.buckets.pages(max(r.num_pages for r in running)))
        cfg = self.round_config(
            features, num_drafts=num_drafts, limits_drafts=limits_drafts, batch=self.num_rows
        )
        return self._round(cfg, tables)

    def _round(self, cfg: RoundConfig, tables: Any) -> Verification:
        args = self.params, self.state, tables, self.config.compilation
        verification, self.state = self.round_program(cfg, self.rounds_per_step, *args)
        return verification

    def warm(
        self,
        features: SamplingFeatures,
        params: Sequence[SamplingParams],
        *,
        batches: Iterable[int],
        round_pages: Iterable[int],
        prefills: Iterable[tuple[int, int]],
        limits_drafts: bool,
    ) -> int:
        """Run every program of these buckets once, on idle rows; prefills are (tiles, pages). params: for as many stop tokens and
        bad words as these requests have. Returns how many programs of rounds and prefills ran."""
        count, sizes = 0, list(batches)
        round_features = replace(features, prompt_logprobs=False)
        self.use(features, params)
        for batch in sizes:
            self.move([-1] * batch)
            for wanted in (
                GREEDY,
                features,
            ):  # taking features on is a few small programs for each batch
                self.use(wanted, [])
            self.admit([])
            self.deactivate([0])
            for tiles, pages in prefills:
                idle = np.zeros(tiles, np.int32)
                chunk = np.zeros((tiles, self.prefill_tile), np.int32)
                self._prefill(
                    self.round_config(features),
                    idle + batch,
                    self.tables.idle(tiles, pages),
                    chunk,
                    idle,
                    idle,
                    idle,
                )
                count += 1
            for K in self._drafts_of(batch):
                cfg = self.round_config(
                    round_features, num_drafts=K, limits_drafts=limits_drafts, batch=batch
                )
                for pages in round_pages:
                    jax.block_until_ready(
                        self._round(cfg, jax.device_put(self.tables.idle(batch, pages)))
                    )
                    count += 1
        self.move([-1] * sizes[0])  # and down again, in this structure
        return count

    def _drafts_of(self, batch: int) -> set[int]:
        """Every K that a bucket's rounds can have: of those who are in it, a single one may generate while the others are prefilled."""
        return {self.num_drafts(n) for n in range(1, batch + 1)}


@partial(jax.jit, static_argnums=(0, 1, 2), static_argnames=("num_blocks", "dtype"))
def _init_state(
    cfg: RoundConfig, batch: int, stops: int, *, num_blocks: tuple[int, ...], dtype: str
) -> DecodeState:
    """Idle rows over empty caches."""
    layout = StateLayout(Vocabulary(cfg.target.vocab_size))
    rows = sampling_rows(layout, [], batch=batch)
    ends = jnp.full((batch, stops), -1, jnp.int32)
    return decode_state.init_state(
        cfg,
        jax.tree.map(jnp.asarray, rows),
        jnp.zeros(batch, jnp.int32),
        ends,
        num_blocks,
        jnp.dtype(dtype),
    )


def slot_of(request: Request) -> int:
    """Of a request that is admitted or prefilled: only a round, or reading a result, takes slots away, and both come after."""
    assert request.slot is not None
    return request.slot
