"""Runs what the scheduler decides: chooses programs, fills their arrays, and dispatches them.

Admission, prefill and rounds return at once and do not wait for the device. Shapes come from few
buckets: rows of the batch, and those of jaxspec.engine.buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxspec.cache.arrays import resolve_cache_dtype
from jaxspec.config import (
    ConfigError,
    DraftConfig,
    EngineConfig,
    Ops,
    SamplingFeatures,
    SpeculativeConfig,
    TargetConfig,
)
from jaxspec.decode.several_rounds import rounds_per_step
from jaxspec.decode.slots import ADMISSIONS
from jaxspec.decode.spread import everywhere
from jaxspec.decode.state import DecodeState
from jaxspec.decode.verify import Verification
from jaxspec.engine.background_compiler import BackgroundCompiler
from jaxspec.engine.block_tables import BlockTables
from jaxspec.engine.buckets import Buckets, Shapes
from jaxspec.engine.memory import CacheMemory
from jaxspec.engine.pass_bytes import PassBytes
from jaxspec.engine.prefill_tiles import PrefillTiles, in_tiles
from jaxspec.engine.program_choice import ProgramChoice
from jaxspec.engine.progress import report_nothing
from jaxspec.engine.rehearsal import Rehearsals
from jaxspec.engine.request import Request
from jaxspec.engine.request_rows import RequestRows, admission_rows
from jaxspec.engine.resident_state import ResidentState
from jaxspec.engine.round_configs import GREEDY, RoundConfigs
from jaxspec.engine.scheduler import Chunk
from jaxspec.engine.variants import RoundShape
from jaxspec.engine.warmup_run import WarmupRun
from jaxspec.layers.op_choice import with_prefill_order
from jaxspec.layers.params import Params
from jaxspec.parallel.layout import ONE_PLACE, Placement, bytes_on_device
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.processors.processor import Vocabulary
from jaxspec.sampling.rows import StateLayout, features_of

OUT_OF_MEMORY = (MemoryError, jax.errors.JaxRuntimeError)  # of the host, of the device


class ModelRunner:
    """Run the requests of one engine on its resident state.

    configs: the static description of each program
    memory: sizes of the KV cache
    resident: the weights, and the state of the requests that run
    program_choice: which program serves a batch
    compiler: what may run without a compilation, and compilation in the background
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
        draft_cache_dtype: DTypeLike | None,
        placement: Placement = ONE_PLACE,
        acceptance_rates: tuple[float, ...] | None = None,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.speculative, self.config = speculative, config
        self.weight_bytes = bytes_on_device(params["target"])
        ops = with_prefill_order(ops, config.prefill_in_order, params["target"])
        self.num_speculative_tokens = speculative.max_k if speculative else 0
        self.adapts = speculative is not None and speculative.adapts
        self.on_gpu = jax.default_backend() == "gpu"
        self.prefill_tile = ops.prefill_tile
        self.on_compiled: Callable[[int, int], object] = report_nothing
        self.buckets = Buckets(config, self.prefill_tile, self.on_gpu)
        self.rounds_per_step = rounds_per_step(
            config, on_gpu=self.on_gpu, weight_bytes=self.weight_bytes
        )
        cache_dtype = resolve_cache_dtype(config.kv_cache_dtype, dtype)
        of_draft = cache_dtype if draft_cache_dtype is None else jnp.dtype(draft_cache_dtype)
        self.configs = RoundConfigs(
            target_config,
            draft_config,
            speculative,
            config,
            ops=ops,
            placement=placement,
            pass_bytes=PassBytes.of(target_config, params["target"]),
            draft_cache_dtype=None if of_draft == cache_dtype else of_draft.name,
            acceptance_rates=acceptance_rates,
        )
        self.memory = CacheMemory(
            self.configs,
            config,
            self.buckets,
            dtype=dtype,
            cache_dtype=cache_dtype,
            rounds_per_step=self.rounds_per_step,
        )
        greedy = self.configs.greedy
        self.resident = ResidentState(
            params,
            self.configs,
            config,
            self.memory,
            BlockTables(len(greedy.cache_groups), self.buckets.max_pages, everywhere(greedy)),
            StateLayout(Vocabulary(target_config.vocab_size, eos_token_ids)).fit(GREEDY),
            dtype=dtype,
            cache_dtype=cache_dtype,
            rounds_per_step=self.rounds_per_step,
        )
        self.program_choice = ProgramChoice(self.resident, self.configs, self.buckets)
        self._rows = RequestRows(
            self.num_speculative_tokens, self.adapts, has_fallback=greedy.fallback is not None
        )
        rehearsals = Rehearsals(
            self.resident, self.program_choice, self.configs, self.buckets, self._rows
        )
        self.compiler = BackgroundCompiler(
            self.resident, self.program_choice, rehearsals, self.configs, self.buckets, speculative
        )
        self._warmup = WarmupRun(
            self.resident, self.program_choice, rehearsals, self.configs, speculative
        )

    def set_state(self, state: DecodeState) -> None:
        """Go on with a state made elsewhere, whose sampling rows hold no logits processor."""
        self.resident.adopt(state)
        self.program_choice.set_needed(self.resident.layout)

    # --- admission -------------------------------------------------------------------------------

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

    def _raise_unless_memory(self, error: Exception) -> None:
        """Raise an error other than a lack of memory, and any that has taken the state along."""
        is_memory = isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
        if not is_memory or not self.resident.is_whole:
            raise error

    def _admit_into(self, added: Sequence[Request], running: Sequence[Request]) -> None:
        resident, choice = self.resident, self.program_choice
        params = [request.params for request in running]
        features, before = features_of(params), resident.needed
        choice.set_needed(before.fit(features, params))
        try:
            # The layout of the program that will serve them once all of them generate.
            expected = choice.next_rounds(resident.num_slots, choice.totals_of(running))
            choice.set_layout(choice.for_rounds(features.of_rounds, *expected).layout)
            if resident.layout.held:
                for first in range(0, len(added), ADMISSIONS):
                    some = added[first : first + ADMISSIONS]
                    rows = admission_rows(some, resident.layout, resident.num_slots)
                    resident.write_rows(*rows)
        except BaseException:
            choice.set_needed(before)
            raise

    # --- programs --------------------------------------------------------------------------------

    def prefill(
        self, features: SamplingFeatures, chunks: Sequence[Chunk]
    ) -> tuple[Verification, list[range]]:
        """Dispatch one prefill call for requests that need these features.

        Returns its result, and the rows of it that hold each chunk's tiles.
        """
        resident, choice, buckets = self.resident, self.program_choice, self.buckets
        placed, rows = in_tiles(chunks, self.prefill_tile)
        pages = buckets.pages_of(chunk.request.num_pages for chunk in chunks)
        shape = choice.prefill_shape(features, buckets.tiles(len(placed)), pages)
        size, serving = shape.tiles, choice.for_prefill(features, shape)
        choice.set_layout(serving.layout)
        owners = [chunk.request for chunk, _ in placed]
        tables = resident.tables.for_prefill(owners, size, pages)
        prompts = self._rows.of_prompts(owners, size, resident.layout)
        tiles = PrefillTiles.idle(
            self.prefill_tile, resident.num_slots, buckets.max_ending, tables, prompts
        )
        tiles.fill(placed)
        verification = resident.prefill(serving.cfg, tiles)
        serving.noted()
        return verification, rows

    def round(
        self,
        features: SamplingFeatures,
        requests: Iterable[Request],
        *,
        num_speculative_tokens: int,
        limits_drafts: bool,
    ) -> Verification:
        """Dispatch a step's rounds; the rows of their results are the slots."""
        resident, choice, running = self.resident, self.program_choice, list(requests)
        resident.tables.update(running)
        pages = self.buckets.pages_of(r.num_pages for r in running)
        shape = RoundShape(resident.num_slots, pages, num_speculative_tokens)
        serving = choice.for_rounds(features, shape, limits_drafts)
        choice.set_layout(serving.layout)
        verification = resident.round(serving.cfg, resident.tables.changed(pages))
        serving.noted()
        if not serving.is_exact:
            self.compiler.count_rounds(serving, features, shape, limits_drafts)
        return verification

    # --- warm-up ---------------------------------------------------------------------------------

    def warm(
        self,
        features: Iterable[SamplingFeatures],
        params: Sequence[SamplingParams],
        shapes: Shapes,
        *,
        limits_drafts: bool,
    ) -> int:
        """Compile the programs of some features; see WarmupRun.of_features."""
        return self._warmup.of_features(
            features, params, shapes, limits_drafts=limits_drafts, report=self.on_compiled
        )

    def warm_levels(self, shapes: Shapes) -> int:
        """Compile programs that serve every request; see WarmupRun.of_levels."""
        return self._warmup.of_levels(shapes, self.on_compiled)


def _no_memory(params: SamplingParams, error: Exception) -> ConfigError:
    """The error of a request whose sampling parameters the state has no memory for."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return ConfigError(
        "sampling_params: expected memory for the request's features "
        f"({', '.join(sorted(features_of([params]).processors)) or 'none'}), got {reason}"
    )
