"""Compiles programs in the background while requests run; only requests that need them wait."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

from jaxspec.config import ConfigError, SamplingFeatures, SpeculativeConfig
from jaxspec.engine.background import Background
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.program_choice import ProgramChoice, Serving
from jaxspec.engine.rehearsal import Compiled, Rehearsals
from jaxspec.engine.request import Request
from jaxspec.engine.resident_state import ResidentState
from jaxspec.engine.round_configs import RoundConfigs
from jaxspec.engine.totals import Totals
from jaxspec.engine.variants import PrefillShape, RoundShape, Variant, level_for
from jaxspec.sampling.rows import features_of

logger = logging.getLogger(__name__)

# Rounds that a mixture of features runs in a program with more of them, before its own is compiled.
EXACT_AFTER = 256


class BackgroundCompiler:
    """Say what may run without a compilation, and compile in the background what may not."""

    def __init__(
        self,
        resident: ResidentState,
        choice: ProgramChoice,
        rehearsals: Rehearsals,
        configs: RoundConfigs,
        buckets: Buckets,
        speculative: SpeculativeConfig | None,
    ) -> None:
        self._resident, self._choice, self._rehearsals = resident, choice, rehearsals
        self._configs, self._buckets = configs, buckets
        self._has_draft = speculative is not None
        self._max_k = speculative.max_k if speculative else 0
        self._background: Background[list[Compiled]] = Background()
        # The job of each request that waits for one, and the error of each whose job has failed.
        self._waits_for: MutableMapping[Request, Hashable] = WeakKeyDictionary()
        self._uncompilable: set[Hashable] = set()
        self._failed: MutableMapping[Request, Exception] = WeakKeyDictionary()

    def poll(self) -> None:
        """Take over the programs that were compiled since the last call."""
        for job, outcome in self._background.take():
            if isinstance(outcome, Exception):
                logger.warning("a program did not compile in the background", exc_info=outcome)
                self._uncompilable.add(job)
                waiting = [r for r, waits_for in self._waits_for.items() if waits_for == job]
                self._failed.update({request: outcome for request in waiting})
                continue
            for shape, variant in outcome:
                self._choice.variants.add(shape, variant)
            self._choice.forget_choices()

    @property
    def num_waiting(self) -> int:
        """Requests that may not be admitted until a program is compiled."""
        return sum(request.finish_reason is None for request in self._waits_for)

    # --- what may run now ------------------------------------------------------------------------

    def may_admit(
        self,
        request: Request,
        features: SamplingFeatures,
        others: Callable[[], Totals],
        *,
        alone: bool,
    ) -> bool:
        """Return whether a request can run beside others without a compilation for its features.

        features: what the others need
        others: returns the totals over them, which take a while to count
        alone: whether no request of any replica runs

        If not, programs are compiled in the background, and the others go on meanwhile. A request
        that is alone waits here for the programs that it has waited for. A shape that is compiled
        for no features yet delays nothing. Raises ConfigError if the programs did not compile.
        """
        if self._choice.is_warm or not self._rehearsals.are_possible:
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
        choice, needed_layout = self._choice, self._resident.needed
        if choice.is_warm or not self._rehearsals.are_possible or not running:
            return True
        shape, limits_drafts = choice.next_rounds(batch, choice.totals_of(running))
        needed = Variant.of(features.of_rounds, needed_layout, limits_drafts=limits_drafts)
        if choice.variants.serving(shape, needed) or not choice.variants.knows(shape):
            return True
        level = level_for(needed, needed_layout, limits_drafts=self._has_draft)
        job = self._compile(level, False, shape, choice.variants.prefills())
        return job in self._uncompilable

    def is_compiled(self, features: SamplingFeatures, requests: Sequence[Request], K: int) -> bool:
        """Return whether the next rounds can have so many drafts without waiting for a compiler.

        If not, their program is compiled in the background where that is possible.
        """
        choice, resident = self._choice, self._resident
        pages = self._buckets.pages_of(r.num_pages for r in requests)
        shape = RoundShape(resident.num_slots, pages, K)
        choice.follow_overrides()
        needed = Variant.of(
            features, resident.needed, limits_drafts=self._configs.always_limits_drafts
        )
        if (
            choice.is_warm
            or not self._rehearsals.are_possible
            or choice.variants.serving(shape, needed)
        ):
            return True
        self._compile(needed, False, shape, ())
        return False

    def _is_served(
        self, request: Request, features: SamplingFeatures, others: Callable[[], Totals]
    ) -> bool:
        variants, needed_layout = self._choice.variants, self._resident.needed
        config = self._buckets.config
        own = features_of([request.params])
        # Most often all requests are of one kind. This runs for each admission.
        if (
            variants.are_all_of(features)
            and features.holds(own)
            and needed_layout.has_room(request.params)
            and request.draft_limit == self._max_k
        ):
            return True
        before = others()
        running = replace(before)
        running.expect(request)
        layout = needed_layout.grown([request.params])
        adds = not features.holds(own) or layout.sizes != needed_layout.sizes
        features |= own
        assert config.batch_buckets is not None
        batch = next(size for size in config.batch_buckets if size >= running.count)
        rows = request.num_known + self._resident.rounds_per_step * (self._max_k + 1)
        blocks = -(-min(rows, config.max_model_len) // config.block_size)
        shape, limits_drafts = self._choice.next_rounds(batch, running, blocks)

        def prefills(tiles: int) -> list[PrefillShape]:
            """The shapes of the calls that prefill so many tiles."""
            most = self._buckets.max_tiles
            calls = {min(tiles, most), tiles % most if tiles > most else 0} - {0}
            return [PrefillShape(size, shape.pages) for size in {*map(self._buckets.tiles, calls)}]

        needed = Variant.of(features.of_rounds, layout, limits_drafts=limits_drafts)
        of_prefill = Variant.of(features, layout)
        own_tiles = before.tiles_of(request.num_known)
        alone = prefills(own_tiles)
        together = prefills(own_tiles + before.prefill_tiles) if before.prefill_tiles else alone

        def missing(shapes: Sequence[PrefillShape]) -> list[RoundShape | PrefillShape]:
            found = [s for s in shapes if not variants.serving(s, of_prefill)]
            return [*found, *([] if variants.serving(shape, needed) else [shape])]

        lacks = missing(together)
        if not lacks or not (adds or all(map(variants.knows, lacks))):
            return True
        if missing(alone):
            level = level_for(needed, layout, limits_drafts=self._has_draft)
            self._compile(level, features.prompt_logprobs, shape, alone, request)
        return False

    # --- compiling -------------------------------------------------------------------------------

    def count_rounds(
        self, serving: Serving, features: SamplingFeatures, shape: RoundShape, limits_drafts: bool
    ) -> None:
        """Count a step of a program with more than these features.

        After EXACT_AFTER of them, the programs of just these features are compiled for later ones.
        """
        serving.num_rounds += 1
        choice = self._choice
        if serving.num_rounds != EXACT_AFTER or choice.is_warm or not self._rehearsals.are_possible:
            return
        variant = Variant.of(features, self._resident.needed, limits_drafts=limits_drafts)
        self._compile(variant, False, shape, choice.variants.prefills())

    def _compile(
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
        job = (variant, of_prefill, shape, own, self._configs.version)
        if request is not None:
            self._waits_for[request] = job
        if job in self._background or (request is None and job in self._uncompilable):
            return job
        rehearsal = self._rehearsals.of_admission(variant, of_prefill, shape, prefills)
        self._background.submit(job, rehearsal.run)
        return job


def _not_compiled(error: Exception) -> ConfigError:
    """The error of a request whose programs did not compile."""
    reason = (str(error) or type(error).__name__).splitlines()[0]
    found = ConfigError(
        "sampling_params: expected programs for the request's features that compile, "
        f"got {type(error).__name__}: {reason:.500}"
    )
    found.__cause__ = error
    return found
