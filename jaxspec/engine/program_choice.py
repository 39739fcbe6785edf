"""The program that serves a batch: chosen among those that are compiled, and remembered.

A batch that no compiled program serves gets one of its own, which compiles when it first runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jaxspec.config import RoundConfig, SamplingFeatures
from jaxspec.engine.buckets import Buckets
from jaxspec.engine.request import Request
from jaxspec.engine.resident_state import ResidentState
from jaxspec.engine.round_configs import RoundConfigs
from jaxspec.engine.totals import Totals
from jaxspec.engine.variants import PrefillShape, RoundShape, Shape, Variant, Variants
from jaxspec.sampling.rows import StateLayout


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


class ProgramChoice:
    """Choose the program of each batch, for the state that it runs on.

    variants: the compiled programs
    is_warm: whether every request is served, so that nothing is compiled to be faster
    """

    def __init__(self, resident: ResidentState, configs: RoundConfigs, buckets: Buckets) -> None:
        self.variants = Variants()
        self.is_warm = False
        self._resident, self._configs, self._buckets = resident, configs, buckets
        self._variants_of = configs.version
        self._rounds: dict[Any, Serving] = {}
        self._prefills: dict[Any, Serving] = {}
        self._shapes: dict[Any, Any] = {}

    # --- layouts and settings --------------------------------------------------------------------

    def set_needed(self, layout: StateLayout) -> None:
        """Serve requests that need this layout from now on."""
        if layout.sizes != self._resident.needed.sizes:
            self.forget_choices()
        self._resident.needed = layout

    def set_layout(self, layout: StateLayout) -> None:
        """Give the state the arrays of a layout; without memory for them, nothing changes."""
        resident = self._resident
        if layout is not resident.layout and resident.change_layout(layout):
            self._prefills.clear()  # programs that run on the state as it is come first

    def forget_choices(self) -> None:
        """Choose anew from now on."""
        self._rounds.clear()
        self._prefills.clear()
        self._shapes.clear()

    def follow_overrides(self) -> None:
        """Forget the compiled programs of other settings (RoundConfigs.override)."""
        if self._variants_of != self._configs.version:
            self.variants, self._variants_of = Variants(), self._configs.version

    # --- rounds ----------------------------------------------------------------------------------

    def batch_for(self, features: SamplingFeatures, requests: Sequence[Request], least: int) -> int:
        """Return the size of the batch for these requests: `least`, or a larger one (_smallest)."""
        buckets = self._buckets.config.batch_buckets
        assert buckets is not None
        if not self.is_warm or not requests or least == buckets[-1]:
            return least
        totals = self.totals_of(requests)
        shape, _ = self.next_rounds(least, totals)
        # Only some of them generate while the others are prefilled, with the K of so many.
        fewest = totals.fewest_drafts
        assert fewest is not None
        numbers = range(1, len(requests) + 1)

        def needed() -> Variant:
            limits_drafts = fewest < max(map(self._configs.k_of_batch, numbers))
            return self._needed(features.of_rounds, limits_drafts)

        return self._smallest(shape, needed, features, len(requests), fewest).batch

    def for_rounds(
        self, features: SamplingFeatures, shape: RoundShape, limits_drafts: bool
    ) -> Serving:
        """Return the compiled program that serves requests of these features, or their own."""
        key = (features, shape, limits_drafts, self._configs.version)
        if key not in self._rounds:
            self.follow_overrides()
            needed = self._needed(features, limits_drafts)
            variant = self.variants.serving(shape, needed) or needed
            cfg = self.round_config(variant, shape)
            self._rounds[key] = self._serving(cfg, variant, needed, shape)
        return self._rounds[key]

    def next_rounds(
        self, batch: int, totals: Totals, num_blocks: int = 0
    ) -> tuple[RoundShape, bool]:
        """Return the shape of rounds in a batch once all requests of these totals generate.

        The second value says whether some of them have fewer drafts than the rounds.

        num_blocks: blocks that a request without any will need
        """
        K = self._configs.k_of_batch(totals.count)
        limits_drafts = totals.fewest_drafts is not None and totals.fewest_drafts < K
        pages = self._buckets.pages_of([num_blocks, totals.most_pages])
        return RoundShape(batch, pages, K), limits_drafts or self._configs.always_limits_drafts

    def totals_of(self, requests: Iterable[Request]) -> Totals:
        """Return the totals over requests that run."""
        return Totals.of(requests, self._buckets.prefill_tile)

    def round_config(self, variant: Variant, shape: RoundShape) -> RoundConfig:
        """Return the static description of a variant's rounds."""
        return self._configs.get(
            variant.features,
            num_speculative_tokens=shape.num_speculative_tokens,
            limits_drafts=variant.limits_drafts,
            batch=shape.batch,
        )

    def prefill_config(self, variant: Variant) -> RoundConfig:
        """Return the static description of a variant's prefill calls."""
        return self._configs.for_prefill(variant.features)

    # --- prefill ---------------------------------------------------------------------------------

    def prefill_shape(self, features: SamplingFeatures, tiles: int, pages: int) -> PrefillShape:
        """Return the shape of the call for so many tiles, or of a larger one (_smallest)."""
        return self._smallest(PrefillShape(tiles, pages), lambda: self._needed(features), features)

    def for_prefill(self, features: SamplingFeatures, shape: PrefillShape) -> Serving:
        """As for_rounds; programs that run on the state as it is come first."""
        key = (features, shape, self._configs.version)
        if key not in self._prefills:
            self.follow_overrides()
            needed, layout = self._needed(features), self._resident.layout
            variant = self.variants.serving(shape, needed, arrays=layout.shapes)
            if variant is None:
                held = replace(features, processors=features.processors | layout.held)
                variant = Variant.of(held, layout)
                variant = variant if variant.serves(needed) else needed
            cfg = self.prefill_config(variant)
            self._prefills[key] = self._serving(cfg, variant, needed, shape)
        return self._prefills[key]

    # --- both ------------------------------------------------------------------------------------

    def _smallest(self, least: Shape, needed: Callable[[], Variant], *kind: Any) -> Shape:
        """Return the shape of the program that serves requests: `least`, or a larger one.

        After a warm-up for every request, rare features run in the next larger program that serves
        them. A shape that was not warmed compiles, since a larger one could take far longer.

        needed: returns the variant that they need
        kind: what that follows from
        """
        self.follow_overrides()
        if not self.is_warm or not self.variants.knows(least):
            return least
        key = (least, *kind, self._configs.version)
        if key not in self._shapes:
            self._shapes[key] = self.variants.smallest(least, needed())
        return self._shapes[key]

    def _needed(self, features: SamplingFeatures, limits_drafts: bool = False) -> Variant:
        return Variant.of(features, self._resident.needed, limits_drafts=limits_drafts)

    def _serving(
        self, cfg: RoundConfig, variant: Variant, needed: Variant, shape: RoundShape | PrefillShape
    ) -> Serving:
        is_new = not self.variants.has(shape, variant)
        return Serving(
            cfg,
            variant.layout(self._resident.needed),
            variant == needed,
            partial(self.variants.add, shape, variant) if is_new else None,
        )
