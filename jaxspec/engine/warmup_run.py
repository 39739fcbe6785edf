"""The run of a warm-up: compile programs of given features and shapes, and run each once.

Where that is possible, threads compile them from shapes first. After the runs, the first request
finds everything launched once. jaxspec.engine.warmup_shapes says which programs requests will need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import jax

from jaxspec.config import SamplingFeatures, SpeculativeConfig
from jaxspec.engine.background import side_by_side
from jaxspec.engine.buckets import Shapes
from jaxspec.engine.draft_choice import compiled_numbers
from jaxspec.engine.program_choice import ProgramChoice
from jaxspec.engine.progress import report_nothing
from jaxspec.engine.rehearsal import Call, Rehearsals, compile_call, different, move_call
from jaxspec.engine.request_rows import admission_rows
from jaxspec.engine.resident_state import ResidentState
from jaxspec.engine.round_configs import GREEDY, RoundConfigs
from jaxspec.engine.variants import (
    COMMON,
    PREFILL_LEVELS,
    ROUND_LEVELS,
    PrefillShape,
    RoundShape,
    Variant,
    Warmed,
    full_variant,
    is_shared,
    prefill_sizes,
    round_batches,
)
from jaxspec.loading import executables
from jaxspec.sampling.params import SamplingParams
from pallas_kernels import lowered_once
from pallas_kernels.lowering_workers import lowering_workers

Report = Callable[[int, int], object]


class WarmupRun:
    """Compile programs before any request runs, and run each once on idle slots.

    `report` is called with the number of programs that are compiled, and of all.
    """

    def __init__(
        self,
        resident: ResidentState,
        choice: ProgramChoice,
        rehearsals: Rehearsals,
        configs: RoundConfigs,
        speculative: SpeculativeConfig | None,
    ) -> None:
        self._resident, self._choice, self._rehearsals = resident, choice, rehearsals
        self._configs, self._speculative = configs, speculative

    # --- what to compile -------------------------------------------------------------------------

    def of_features(
        self,
        features: Iterable[SamplingFeatures],
        params: Sequence[SamplingParams],
        shapes: Shapes,
        *,
        limits_drafts: bool,
        report: Report,
    ) -> int:
        """Compile the programs of each of these features in these shapes; run each on idle slots.

        params: requests whose stop tokens, bad words and so on the arrays shall hold. Returns the
        number of rounds and prefills that ran.
        """
        self._choice.set_needed(self._resident.needed.with_room(params).fit(GREEDY))
        needed, variants = self._resident.needed, []
        always = self._configs.always_limits_drafts
        for each in features:
            variants.append(
                Warmed(
                    Variant.of(each.of_rounds, needed, limits_drafts=limits_drafts or always),
                    # No drafts are limited in a prefill: those of other rounds serve.
                    None if limits_drafts else Variant.of(each, needed),
                    shapes.batches,
                    shapes.tiles,
                )
            )
        return self._run(variants, shapes, report)

    def of_levels(self, shapes: Shapes, report: Report) -> int:
        """Compile programs that serve every request in these shapes; as `of_features`.

        The state's arrays have room for every request from then on.
        """
        self._choice.set_needed(self._resident.needed.full(GREEDY))
        needed, speculative, variants = self._resident.needed, self._speculative, []
        always = self._configs.always_limits_drafts
        for features in dict.fromkeys((*ROUND_LEVELS, *PREFILL_LEVELS)):
            of_rounds = of_prefill = None
            if features in ROUND_LEVELS:
                limits = always or (speculative is not None and is_shared(features))
                of_rounds = full_variant(features, needed, limits_drafts=limits)
            if features in PREFILL_LEVELS:
                of_prefill = full_variant(features, needed)
            batches = round_batches(features, shapes.batches)
            tiles = prefill_sizes(features, shapes.tiles)
            variants.append(Warmed(of_rounds, of_prefill, batches, tiles))
        has_limit = speculative is not None and speculative.draft_max_model_len is not None
        if has_limit and not always:
            for features in COMMON:
                of_rounds = full_variant(features, needed, limits_drafts=True)
                variants.append(Warmed(of_rounds, None, shapes.batches, ()))
        count = self._run(variants, shapes, report)
        self._resident.compile_begin(*self._resident.initial_sizes)
        self._choice.is_warm = True
        return count

    # --- the run ---------------------------------------------------------------------------------

    def _run(self, variants: Sequence[Warmed], shapes: Shapes, report: Report) -> int:
        """Compile the variants' programs, then run each once on idle slots; return their number."""
        self._choice.follow_overrides()
        total = sum(
            len(self._prefills_of(each, shapes))
            + sum(len(self._rounds_of(each, batch, shapes)) for batch in shapes.batches)
            for each in variants
        )
        if self._rehearsals.are_possible:
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
        self._choice.forget_choices()
        return total

    def _with_state_of(
        self, variants: Sequence[Warmed], shapes: Shapes
    ) -> Iterator[tuple[Warmed, int]]:
        """Give the state the arrays of each variant in each batch, and yield both."""
        resident, choice = self._resident, self._choice
        plain = resident.needed.hold(GREEDY)
        for each in variants:
            layout = each.layout(resident.needed)
            choice.set_layout(layout)
            for batch in shapes.batches:
                resident.move([-1] * batch)
                # Requests of other features come and go: a few small programs for each batch.
                choice.set_layout(plain)
                choice.set_layout(layout)
                if layout.held:
                    resident.write_rows(*admission_rows([], layout, batch))
                resident.deactivate([0])
                yield each, batch
            if shapes.batches:
                resident.move([-1] * shapes.batches[0])  # and back, with these arrays

    def _run_idle_round(self, variant: Variant, shape: RoundShape) -> None:
        """Run a step's rounds once, on idle slots."""
        tables = dict(enumerate(self._resident.tables.idle(shape.batch, shape.pages)))
        cfg = self._choice.round_config(variant, shape)
        jax.block_until_ready(self._resident.round(cfg, tables))
        self._choice.variants.add(shape, variant)

    def _run_idle_prefill(self, variant: Variant, shape: PrefillShape) -> None:
        """Run a prefill call once, on idle tiles."""
        tiles = self._rehearsals.idle_tiles(shape, self._resident.layout)
        self._resident.prefill(self._choice.prefill_config(variant), tiles)
        self._choice.variants.add(shape, variant)

    # --- compiling from shapes -------------------------------------------------------------------

    def _compilations(
        self, variants: Sequence[Warmed], shapes: Shapes
    ) -> Iterator[Callable[[], None]]:
        """Yield what compiles each round and each prefill."""
        resident, rehearsals = self._resident, self._rehearsals
        for each in variants:
            layout = each.layout(resident.needed)
            for batch in each.batches:
                state = rehearsals.state_in(layout, batch)
                for shape in self._rounds_of(each, batch, shapes):
                    rounds = rehearsals.of_rounds(each.rounds, shape)
                    yield partial(rounds.compile, resident.params, state)
            ended = rehearsals.ended_in(layout)
            for shape in self._prefills_of(each, shapes):
                prefill = rehearsals.of_prefill(each.prefill, shape)
                yield partial(prefill.compile, resident.params, ended)

    def _small_calls(self, variants: Sequence[Warmed], shapes: Shapes) -> Iterator[Call]:
        """Yield the calls of the small programs; some of them several times."""
        layouts = [each.layout(self._resident.needed) for each in variants]
        for layout in {layout.shapes: layout for layout in layouts}.values():
            for i, batch in enumerate(shapes.batches):
                yield from self._rehearsals.of_slots(layout, batch).calls()
                rows = self._rehearsals.rows_in(layout, batch)
                for next_batch in [*shapes.batches[:i][-1:], *shapes.batches[i + 1 : i + 2]]:
                    yield move_call(rows, next_batch)

    # --- shapes ----------------------------------------------------------------------------------

    def _rounds_of(self, each: Warmed, batch: int, shapes: Shapes) -> list[RoundShape]:
        """Return the shapes of a variant's rounds in a batch."""
        has_rounds = each.of_rounds is not None and batch in each.batches
        numbers = self._drafts_of(batch) if has_rounds else []
        return [RoundShape(batch, n, K) for K, n in itertools.product(numbers, shapes.pages)]

    def _prefills_of(self, each: Warmed, shapes: Shapes) -> list[PrefillShape]:
        """Return the shapes of a variant's prefills, the smallest first."""
        tiles = each.tiles if each.of_prefill is not None else []
        return [PrefillShape(*size) for size in itertools.product(tiles, shapes.pages)]

    def _drafts_of(self, batch: int) -> set[int]:
        """Every K of a batch bucket's rounds: any number of its requests may generate at a time.

        The others are being prefilled.
        """
        if self._speculative is not None and self._speculative.adaptive:
            return set(compiled_numbers(self._speculative.max_k))
        return {self._configs.k_of_batch(n) for n in range(1, batch + 1)}
